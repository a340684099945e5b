"""The command line: its help, what it refuses, and what it imports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lightning_odc import __version__, cli


def test_alone_it_prints_help_with_examples_of_commands_that_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("lightning_odc", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-odc {__version__}\n"
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    examples = [line.split()[1:] for line in shown.out.split("examples:")[1].strip().splitlines()]
    assert {words[0] for words in examples} == cli.COMMANDS.keys()
    for words in examples:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([*words, "--help"])
        assert f"usage: lightning-odc {words[0]} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("docter", "There is no command 'docter'. Write one of doctor, advise, demo. Did you mean doctor?\n"),
        (
            "advize --model 7b",
            "There is no command 'advize'. Write one of doctor, advise, demo. Did you mean advise?",
        ),
        ("nothing", "There is no command 'nothing'. Write one of doctor, advise, demo.\n"),
        ("--vresion", "unrecognized arguments: --vresion"),
        ("advise --modle 7b", "There is no option --modle. Did you mean --model?\n"),
        ("advise --modle=7b", "There is no option --modle. Did you mean --model?\n"),
        ("doctor --json", "There is no option --json.\n"),
        ("doctor --hepl", "There is no option --hepl. Did you mean --help?"),
        ("doctor tihs", "unrecognized arguments: tihs\n"),  # the help has "this"
        ("demo --devcies 2", "There is no option --devcies. Did you mean --devices?"),
        ("demo --device 2", "There is no option --device. Did you mean --devices?"),  # the beginning of one
        ("demo --devices two", "argument --devices: 'two' is not a whole number of at least 1"),
        ("demo --repetitions 0", "argument --repetitions: '0' is not a whole number of at least 1"),
    ],
)
def test_bad_options_get_the_usage_and_exit_code_2(line, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(line.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lightning-odc")
    assert message in err


def test_a_missing_package_comes_with_the_line_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(cli.COMMANDS, "demo", ("matplotlib", "train"))
    assert cli.main(["demo"]) == cli.BAD_USAGE
    assert capsys.readouterr().err == ("lightning-odc demo: matplotlib is missing: pip install matplotlib\n")


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    command = SimpleNamespace(add_arguments=Mock(), run=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(cli, "import_module", lambda _: command)
    assert cli.main(["doctor"]) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "lightning-odc doctor: interrupted\n")


def test_help_does_not_import_torch() -> None:
    """As the installed command; and the doctor answers where torch cannot be imported."""
    program = (
        "import sys; sys.argv = ['/usr/bin/lightning-odc', *sys.argv[1:]]\n"
        "from lightning_odc import cli\n"
        "assert cli.main([]) == 0\n"
        "assert not {'torch', 'lightning', 'transformers'} & sys.modules.keys(), 'imported too early'\n"
        "sys.modules['torch'] = None\n"
        "assert cli.main(['doctor']) == 1\n"
        "del sys.modules['torch']\n"
        "import lightning_odc; assert lightning_odc.Minibatch.__name__ == 'Minibatch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert "import        ModuleNotFoundError: import of torch halted" in done.stdout
