"""The command line of an experiment whose options stand once, in a dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lightning_odc.console import OptionError, Options, add_options, read_options


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
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(text or "").splitlines()[0]
    )
    add_options(parser, options)
    parsed = vars(parser.parse_args(given))
    try:
        return work(read_options(options, parsed))
    except OptionError as error:
        parser.error(str(error))
