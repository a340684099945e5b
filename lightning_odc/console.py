"""What every command of ``lightning-odc`` shares: options that stand once, in a dataclass, and the form of output.

The fields of a dataclass, made by `option`, are the flags of a command: `add_options` adds them to its parser, and
`read_options` makes the dataclass of what was parsed. It judges itself in ``__post_init__``, by `check_options` and
its own rules, so options that were made in Python are judged, too.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_odc.arguments import allows, examples
from lightning_odc.files import check_directory

PROGRAM = "lightning-odc"
EXTRA_PACKAGES = ("transformers", "matplotlib", "rich")

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
        parser.add_argument(
            flag(entry.name),
            type=next((kind for kind in (int, float, Path) if kind in inner), str),
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


def did_you_mean(word: str, known: Iterable[str], program: str = "") -> str:
    """The end of a message: the closest name that is known; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    if not close:
        return ""
    return f": did you mean {program}{close[0]}?"


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def check_extra_packages(command: str) -> None:
    """If packages for a command are missing, raise `OptionError` with the line that installs them."""
    missing = [name for name in EXTRA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f'the {command} needs {" and ".join(missing)}: pip install "lightning-odc[demo]"')


def prepare_output(folder: Path) -> None:
    """Create the output folder and write to it once, so that a long run does not end in an error."""
    trouble = check_directory(folder)
    if trouble:
        raise OptionError(f"--output {folder}: {trouble}")


@dataclass(frozen=True)
class Form:
    """The form of a command's output."""

    json: bool = False  # one JSON document on stdout instead of text
    quiet: bool = False  # no first line, no progress, and no text beyond what the command's ``--quiet`` names


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table, one line per row; every cell is written with ``str``."""
    lines = []
    for row in [head, ["---"] * len(head), *rows]:
        cells = " | ".join(map(str, row))
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)


def say_first(form: Form) -> None:
    """Say that imports take a moment, before they do."""
    if not form.quiet and "torch" not in sys.modules:
        print(f"{PROGRAM}: loading torch ...", file=sys.stderr, flush=True)


def run_written(form: Form, run: Callable[[], int], document: Callable[[], str]) -> int:
    """Run a command that prints text and has a JSON document, or none, and show what is asked for; its exit code."""
    text = io.StringIO()
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        if form.json or form.quiet:
            stack.enter_context(contextlib.redirect_stdout(text))
        if form.quiet:
            stack.enter_context(contextlib.redirect_stderr(errors))
        code = run()
    if code and form.quiet:
        sys.stderr.write(errors.getvalue())
    if form.json:
        answer = document().rstrip()
        if not answer:
            answer = json.dumps({"error": text.getvalue(), "exit_code": code})
        print(answer)
    return code
