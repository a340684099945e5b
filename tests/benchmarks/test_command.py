"""Options that stand once: the flags that a dataclass becomes, what is read back, and what is refused."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from benchmarks.command import OptionError, add_options, check_options, option, read_options


@dataclass(frozen=True)
class Voyage:
    """Options of a command."""

    goal: str = option(MISSING, "where to", letter="G")
    folder: Path = option(Path("log"), "folder of the log", letter="DIR")
    sails: int | None = option(None, "sails, 100 % of them by default", least=1)
    speeds: tuple[float, ...] = option((1.0, 2.0), "speeds in turn", least=0.5)
    crews: tuple[str, ...] | None = option(None, "crews", choices=("red", "blue"))
    by_night: bool = option(False, "sail by night, too")

    def __post_init__(self) -> None:
        check_options(self)


def parse(line: str) -> Voyage:
    parser = argparse.ArgumentParser()
    add_options(parser, Voyage)
    return read_options(Voyage, {**vars(parser.parse_args(line.split())), "beside": "the options"})


def test_fields_are_flags_with_their_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--goal Samoa") == Voyage(goal="Samoa")
    line = "--goal Samoa --folder a/b --sails 3 --speeds 4 0.5 --crews red blue --by-night"
    assert parse(line) == Voyage("Samoa", Path("a/b"), 3, (4.0, 0.5), ("red", "blue"), True)
    for line in ("--help", ""):
        with pytest.raises(SystemExit):
            parse(line)
    out, err = capsys.readouterr()
    assert "required: --goal" in err
    shown = " ".join(out.split())
    for text in ("--goal G where to", "of the log (default: log)", "speeds in turn (default: 1.0 2.0)"):
        assert text in shown
    assert "--sails N sails, 100 % of them by default --speeds" in shown


def test_values_that_cannot_work_are_refused() -> None:
    for line, message in (
        ("--sails 0", "--sails 0: use 1 or more"),
        ("--speeds 3 0.25", "--speeds 0.25: use 0.5 or more"),
        ("--crews red green", "--crews 'green' is unknown: choose from red, blue"),
    ):
        with pytest.raises(OptionError) as refusal:
            parse(f"--goal Samoa {line}")
        assert str(refusal.value) == message
