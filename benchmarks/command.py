"""The command line of an experiment whose options stand once, in a dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lightning_odc.console import OptionError, Options, add_options, read_options

#: What trainers of experiments leave out.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``, described by the first line of a docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(text or "").splitlines()[0]
    )


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
