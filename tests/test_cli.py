"""The command line: what it accepts, what it refuses, and what its messages look like."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_odc import __version__, cli, console
from lightning_odc.console import OptionError, prepare_output
from tests.support.refusals import assert_one_line

WRONG = [
    ("--vresion", "did you mean --version? (see lightning-odc --help)"),
    ("docter", ": did you mean lightning-odc doctor?"),
    ("advise --lenghts longalign --model 7b", "did you mean --lengths?"),
]


def test_bad_options_get_one_line_and_exit_code_2(capsys):
    assert_one_line(capsys, cli.main, WRONG)


def test_missing_packages_come_with_the_line_that_installs_them(monkeypatch, capsys):
    monkeypatch.setattr(console, "EXTRA_PACKAGES", ("torch", "no_such_package"))
    assert cli.main(["demo"]) == 2
    expected = 'lightning-odc: the demo needs no_such_package: pip install "lightning-odc[demo]"\n'
    assert capsys.readouterr().err == expected


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OptionError, match=f"--output {file}: File exists"):
        prepare_output(file)
    with pytest.raises(OptionError, match=f"--output {file / 'below'}: Not a directory"):
        prepare_output(file / "below")
    prepare_output(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_alone_it_prints_help_with_examples_of_commands_that_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("lightning_odc", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-odc {__version__}\n"
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    examples = [line for line in shown.out.split("examples:")[1].splitlines() if "  lightning-odc" in line]
    assert len(examples) == 3
    for line in examples:
        words = line.strip().split("   ")[0].split()[1:]
        assert "command" in vars(cli._build_parser().parse_args(words))


def test_help_does_not_wait_for_torch() -> None:
    """As the installed command: options are judged, and the first line is written, before torch is imported."""
    program = (
        "import sys; sys.argv = ['/usr/bin/lightning-odc', *sys.argv[1:]]\n"
        "from lightning_odc import cli, console\n"
        "assert cli.main([]) == 0\n"
        "assert not {'torch', 'lightning', 'transformers'} & sys.modules.keys(), 'imported too early'\n"
        "console.say_first(console.Form()); console.say_first(console.Form(quiet=True))\n"
        "import lightning_odc; assert lightning_odc.Minibatch.__name__ == 'Minibatch'\n"
        "console.say_first(console.Form())\n"
    )
    command, options = [sys.executable, "-c", program], {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert done.stderr == "lightning-odc: loading torch ...\n"
