"""The page of the command line, from the parsers, and the advice of get-started: ``python -m tests.docs.cli``."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ADVICE = PAGE.parent / "data" / "advise.txt"

COMMANDS = {
    "": "All commands",
    "doctor": "Checking a machine",
    "advise": "Planning the gain",
    "demo": "The demo",
    "bench": "Training under every communication and policy",
}

_HEAD = """---
description: Every command of lightning-odc and its options, as the program itself prints them.
---

# Command line

`lightning-odc` and `python -m lightning_odc` are the same. This page shows what each command prints with `--help`.
For a misspelt word, the error suggests the closest one. Every command takes `--json` and `--quiet`.

The experiments behind other figures of this documentation are in `benchmarks/` of the repository, not in the package:
`make bench NAME=comm ARGS="--help"`.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, title in COMMANDS.items():
        parts.append(_section(f"lightning-odc {name}".strip(), title, "lightning_odc.cli", name.split()))
    return "\n".join(parts)


def advice() -> str:
    """What the command of docs/get-started.md prints."""
    out, line = io.StringIO(), "--lengths longalign --model 1.5b --device H200 --devices 8"
    with contextlib.redirect_stdout(out):
        assert importlib.import_module("lightning_odc.cli").main(["advise", *line.split()]) == 0
    return out.getvalue()


def _section(command: str, title: str, module: str, arguments: list[str]) -> str:
    return f"## {title}\n\n`{command}`\n\n```text\n{help_of(module, arguments).strip()}\n```\n"


def help_of(module: str, arguments: list[str]) -> str:
    """What a command prints with ``--help``, 82 characters wide."""
    out = io.StringIO()
    with _wide(), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*arguments, "--help"])
    return out.getvalue()


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "82"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


if __name__ == "__main__":
    PAGE.write_text(page())
    ADVICE.write_text(advice())
