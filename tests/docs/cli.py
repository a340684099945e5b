"""The page of the command line, from the parsers: ``python -m tests.docs.cli`` writes ``docs/cli.md`` anew."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

MEASURES = {
    "train": "Training under every communication and policy",
    "sweep": "The paper's parametric study on emulated devices",
    "comm": "Gather, accumulate and settle, beside the process group",
    "engine": "The engine's own Python, and a busy owner",
}

_HEAD = """---
description: Every command of lightning-odc and its options, as the program itself prints them.
---

# Command line

`lightning-odc` and `python -m lightning_odc` are the same. This page is what each command prints with `--help`.

The experiments behind other figures of this documentation are in `benchmarks/` of the repository, not in the package:
`make bench NAME=planner ARGS="--help"`.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _section("lightning-odc demo", "The demo", "lightning_odc.cli", ["demo"])]
    for name, title in MEASURES.items():
        parts.append(_section(f"lightning-odc bench {name}", title, "lightning_odc.cli", ["bench", name]))
    return "\n".join(parts)


def _section(command: str, title: str, module: str, arguments: list[str]) -> str:
    return f"## {title}\n\n`{command}`\n\n```text\n{help_of(module, arguments).strip()}\n```\n"


def help_of(module: str, arguments: list[str]) -> str:
    """What a command prints with ``--help``, 100 characters wide."""
    out = io.StringIO()
    with _wide(), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*arguments, "--help"])
    return out.getvalue()


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


if __name__ == "__main__":
    PAGE.write_text(page())
