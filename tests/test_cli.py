"""The command line: what it accepts, what it refuses, and what its messages look like."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from lightning_odc import __version__, cli
from lightning_odc.demo import options
from lightning_odc.demo.options import DemoOptions, OptionError, available_cores, prepare_output


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """The options that reached the demo, which does not run."""
    pytest.importorskip("rich")
    from lightning_odc.demo import run

    seen: list[DemoOptions] = []

    def record(given: DemoOptions) -> int:
        seen.append(given)
        return 0

    monkeypatch.setattr(run, "run_demo", record)
    return seen


def test_without_options_the_defaults_reach_the_demo(asked_for: list[DemoOptions]) -> None:
    assert cli.main(["demo"]) == 0
    assert asked_for == [DemoOptions()]


def test_every_option_reaches_the_demo(asked_for: list[DemoOptions], tmp_path: Path) -> None:
    wanted = DemoOptions(
        output=tmp_path,
        devices=1,
        communication=("lockstep", "balanced"),
        minibatches=3,
        repetitions=2,
        samples_per_rank=5,
        samples_per_microbatch=4,
        max_length=512,
        order="shuffled",
        equal_lengths=True,
        layers=1,
        hidden_size=128,
        precision="bf16-mixed",
        device="cuda",
        seed=7,
    )
    line = (
        f"demo --output {tmp_path} --devices 1 --communication lockstep balanced --minibatches 3 "
        "--repetitions 2 --samples-per-rank 5 --samples-per-microbatch 4 --max-length 512 --order shuffled "
        "--equal-lengths --layers 1 --hidden-size 128 --precision bf16-mixed --device cuda --seed 7"
    )
    assert cli.main(line.split()) == 0
    assert asked_for == [wanted]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("demo --devices 0", "--devices 0: use 1 or more"),
        ("demo --devices 1000000", f"the most is {4 * available_cores()}"),
        ("demo --devices two", "invalid int value: 'two'"),
        (
            "demo --communication one_sided",
            "'one_sided' is unknown: choose from collective, on_demand, lockstep, balanced",
        ),
        ("demo --communication collective collective", "names a mode twice"),
        ("demo --communication", "expected at least one argument"),
        ("demo --max-length 10", "--max-length 10 leaves hardly any text: use at least 64 tokens"),
        ("demo --minibatches 0", "--minibatches 0: use 1 or more"),
        ("demo --samples-per-rank -1", "--samples-per-rank -1: use 1 or more"),
        ("demo --hidden-size 100", "--hidden-size 100 is not a multiple of 64"),
        ("demo --order random", "--order 'random' is unknown: choose from sorted, shuffled"),
        ("demo --precision 16", "--precision '16' is unknown"),
        ("demo --speed fast", "unrecognized arguments: --speed fast"),
        ("train", "invalid choice: 'train'"),
        ("", "required: command"),
    ],
)
def test_bad_options_get_one_line_and_exit_code_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str], asked_for: list[DemoOptions]
) -> None:
    try:
        code = cli.main(line.split())
    except SystemExit as stop:  # What argparse itself refuses.
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lightning-odc: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert asked_for == []


def test_missing_packages_come_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "EXTRA_PACKAGES", ("torch", "no_such_package"))
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


def test_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked_for: list[DemoOptions]
) -> None:
    from lightning_odc.demo import run

    def interrupted(_: DemoOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "lightning-odc: interrupted; no results were written\n"


def test_python_dash_m_tells_the_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("lightning_odc", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-odc {__version__}\n"
