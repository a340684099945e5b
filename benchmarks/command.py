"""The command line of an experiment: options that stand once, in a dataclass, and what it prints and writes.

The fields of a dataclass, made by `option`, are the flags of a command. `run` parses them, makes the dataclass and
hands it on. The dataclass judges itself in ``__post_init__``, by `check_options` and its own rules, so options that
were made in Python are judged, too.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_odc.arguments import allows, examples

#: What trainers of experiments leave out.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
Options = TypeVar("Options")


class OptionError(ValueError):
    """An option that cannot work; the message is the one line that the user sees."""


def option(
    default: Any,
    text: str,
    *,
    letter: str = "N",  # what stands for the value in the help
    least: float | None = None,  # the smallest number that can work
    choices: Sequence[str] = (),  # the names that are known, of each value if there are several
) -> Any:
    """A field of a dataclass that is an option of a command, too."""
    # ``MISSING`` of `dataclasses` as the default means that the option has to be given.
    told = {"help": text, "letter": letter, "least": least, "choices": choices}
    return field(default=default, metadata=told)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a flag for each field of a dataclass: a switch for a ``bool``, several values for a ``tuple``."""
    hints = get_type_hints(options)
    for entry in _fields(options):
        whole = hints[entry.name]
        inner = (whole, *get_args(whole))
        text = entry.metadata["help"]
        if bool in inner:
            parser.add_argument(flag(entry.name), action="store_true", help=text)
            continue
        default = entry.default
        is_required = default is MISSING
        if is_required:
            default = None
        if default is not None:
            shown = default
            if isinstance(default, tuple):
                shown = " ".join(map(str, default))
            text += f" (default: {shown})"
        nargs = None
        if any(get_origin(hint) is tuple for hint in inner):
            nargs = "+"
        kind = next((kind for kind in (int, float, Path) if kind in inner), str)
        parser.add_argument(
            flag(entry.name),
            type=kind,
            nargs=nargs,
            default=default,
            required=is_required,
            metavar=entry.metadata["letter"],
            help=text.replace("%", "%%"),
        )


def read_options(options: type[Options], parsed: Mapping[str, Any]) -> Options:
    """The dataclass of a parsed command line, which may hold more."""
    values = {entry.name: parsed[entry.name] for entry in _fields(options)}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return options(**values | lists)


def check_options(options: Any) -> None:
    """Refuse values of a wrong type, numbers that are too small, and names that are unknown."""
    hints = get_type_hints(type(options))
    for entry in _fields(options):
        least = entry.metadata["least"]
        choices = entry.metadata["choices"]
        items = getattr(options, entry.name)
        if not allows(hints[entry.name], items):
            raise OptionError(f"{flag(entry.name)} {items}: use {examples(hints[entry.name])}")
        if items is None:
            continue
        if not isinstance(items, tuple):
            items = (items,)
        for item in items:
            if least is not None and item < least:
                raise OptionError(f"{flag(entry.name)} {item:g}: use {least:g} or more")
            if choices and item not in choices:
                known = ", ".join(choices) + did_you_mean(item, choices)
                raise OptionError(f"{flag(entry.name)} {item!r} is unknown: choose from {known}")


def _fields(options: Any) -> list[Field[Any]]:
    """Those made by `option`; a dataclass may have others."""
    return [entry for entry in fields(options) if "help" in entry.metadata]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: the closest name that is known; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    if not close:
        return ""
    return f": did you mean {close[0]}?"


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def prepare_output(folder: Path) -> None:
    """Create the output folder, so that a long run does not end in an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}") from None


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table, one line per row; every cell is written with ``str``."""
    lines = []
    for row in [head, ["---"] * len(head), *rows]:
        cells = " | ".join(map(str, row))
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``, described by the first line of a docstring."""
    first = (text or "").splitlines()[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=first)


def run(
    name: str,
    text: str | None,
    options: type[Options],
    work: Callable[[Options], int],
    given: Sequence[str] | None,
) -> int:
    """Parse, run, and turn options that cannot work into one line; returns the exit code.

    Args:
        name: The module in ``benchmarks/``.
        text: Its docstring, whose first line is the description.
        options: The dataclass of its options.
        work: What runs them.
        given: The command line; by default that of the process.
    """
    parser = parser_of(name, text)
    add_options(parser, options)
    parsed = vars(parser.parse_args(given))
    try:
        return work(read_options(options, parsed))
    except OptionError as error:
        parser.error(str(error))
