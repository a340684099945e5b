"""What every command of ``lightning-odc`` prints: text, one JSON document, or nothing but errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "lightning-odc"


@dataclass(frozen=True)
class Form:
    """The form of a command's output.

    Attributes:
        json: One JSON document on stdout instead of text.
        quiet: No first line, no progress, and no text beyond what the command's ``--quiet`` names.
    """

    json: bool = False
    quiet: bool = False


def add_form(parser: argparse.ArgumentParser, quiet: str = "print errors only") -> None:
    """Add ``--json`` and ``--quiet``.

    Args:
        parser: The parser of a command.
        quiet: The effect of ``--quiet``, for its help.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--quiet", action="store_true", help=quiet)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)


def say_first(form: Form) -> None:
    """Say that imports take a moment, before they do."""
    if not form.quiet and "torch" not in sys.modules:
        print(f"{PROGRAM}: loading torch ...", file=sys.stderr, flush=True)


def run_written(form: Form, run: Callable[[], int], document: Path) -> int:
    """Run a command that prints text and writes a JSON document, and show what the form asks for.

    Args:
        form: The form of the output.
        run: The command; returns the exit code.
        document: The file that it writes if it measures anything.

    Returns:
        The exit code.
    """
    before = _stamp(document)
    text, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        if form.json or form.quiet:
            stack.enter_context(contextlib.redirect_stdout(text))
        if form.quiet:
            stack.enter_context(contextlib.redirect_stderr(errors))
        code = run()
    if code and form.quiet:
        sys.stderr.write(errors.getvalue())
    if form.json:
        is_new = _stamp(document) not in (before, None)
        nothing = json.dumps({"error": text.getvalue(), "exit_code": code})
        print(document.read_text().rstrip() if is_new else nothing)
    return code


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that differs once a file has been written again; ``None`` without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
