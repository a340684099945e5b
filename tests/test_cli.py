"""The command line: what it accepts, what it refuses, and what its messages look like."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_odc import __version__, cli, console
from lightning_odc.bench.options import DemoOptions, available_cores
from lightning_odc.console import OptionError, prepare_output
from tests.support.refusals import assert_one_line


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """The options that reached the demo, which does not run."""
    pytest.importorskip("rich")
    from lightning_odc.bench import demo

    seen: list[DemoOptions] = []

    def record(given: demo.DemoOutcome) -> int:
        seen.append(given.demo)
        return 0

    monkeypatch.setattr(demo, "run_demo", record)
    return seen


def test_options_or_their_defaults_reach_the_demo(asked_for: list[DemoOptions], tmp_path: Path) -> None:
    wanted = DemoOptions(
        output=tmp_path,
        devices=1,
        communication=("lockstep", "balanced"),
        model="1x128",
        minibatches=3,
        repetitions=2,
        samples_per_rank=5,
        max_length=512,
        equal_lengths=True,
        device="cuda",
        seed=7,
    )
    line = (
        f"demo --output {tmp_path} --devices 1 --communication lockstep balanced --model 1x128 --minibatches 3 "
        "--repetitions 2 --samples-per-rank 5 --max-length 512 --equal-lengths --device cuda --seed 7"
    )
    assert cli.main(line.split()) == cli.main(["demo"]) == 0
    assert asked_for == [wanted, DemoOptions()]


WRONG = [
    ("demo --devices 0", "--devices 0: use 1 or more"),
    ("demo --devices 1000000", f"the most is {4 * available_cores()}"),
    ("demo --communication one_sided", "'one_sided' is unknown: choose from collective, on_demand"),
    ("demo --communication colective", "lockstep, balanced: did you mean collective?"),
    ("demo --communication collective collective", "names a mode twice"),
    ("demo --max-length 10", "--max-length 10: use 64 or more"),
    ("demo --speed fast", "unrecognized arguments: --speed fast: did you mean --seed? (see lightning-odc"),
    ("--vresion", "did you mean --version? (see lightning-odc --help)"),
    ("docter", ": did you mean lightning-odc doctor?"),
    ("bench sweep", "invalid choice: 'sweep'"),
    ("bench train --repetition=3 --model-size 7b", "did you mean --model?"),
    ("advise --lenghts longalign --model 7b", "did you mean --lengths?"),
]


def test_bad_options_get_one_line_and_exit_code_2(capsys, asked_for):
    assert_one_line(capsys, cli.main, WRONG)
    assert asked_for == []


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
    assert len(examples) == 4
    for line in examples:
        words = line.strip().split("   ")[0].split()[1:]
        assert "command" in vars(cli._build_parser().parse_args(words))


DOCUMENT = '{"speedup": 1.5}\n'
NOTHING = json.dumps({"error": "a table\n", "exit_code": 1}) + "\n"


def test_output_has_the_form_that_was_asked_for(monkeypatch, capsys):
    pytest.importorskip("rich")
    from lightning_odc.bench import demo

    assert demo.DemoOutcome(DemoOptions()).json == "", "nothing was measured"
    for options, code, document, out, err in (
        ("", 0, DOCUMENT, "a table\n", "a bar\n"),
        ("--json", 0, DOCUMENT, DOCUMENT, "a bar\n"),
        ("--json", 1, "", NOTHING, "a bar\n"),
        ("--quiet", 0, DOCUMENT, "", ""),
        ("--quiet", 1, DOCUMENT, "", "a bar\n"),
        ("--json --quiet", 0, DOCUMENT, DOCUMENT, ""),
    ):

        def run_demo(_: demo.DemoOutcome, code: int = code) -> int:
            print("a table")
            print("a bar", file=sys.stderr)
            return code

        monkeypatch.setattr(demo, "run_demo", run_demo)
        monkeypatch.setattr(demo.DemoOutcome, "json", document)
        assert cli.main(["demo", *options.split()]) == code
        assert capsys.readouterr() == (out, err), options
    monkeypatch.setattr(demo, "run_demo", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "lightning-odc: interrupted; no results were written\n"


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
