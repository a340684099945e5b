"""The page of the command line, from the parsers, and the advice of get-started: ``python -m tests.docs.cli``."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest import mock

from lightning_odc import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ADVICE = PAGE.parent / "data" / "advise.txt"

COMMANDS = {
    "": "All commands",
    "doctor": "Checking a machine",
    "advise": "Planning the gain",
    "demo": "The demo",
}

_HEAD = """---
description: Every command of lightning-odc and its options, as the program itself prints them.
---

# Command line

`lightning-odc` and `python -m lightning_odc` are the same. This page shows what each command prints with `--help`.
The exit code is 1 if `doctor` misses something or the losses of `demo` differ, and 2 for options that cannot work.

The experiments behind other figures of this documentation are in `benchmarks/` of the repository, not in the package:
`make bench NAME=comm ARGS="--help"`.
"""

_ESTIMATE = """
`advise` estimates memory from the sizes of a model. `python -m benchmarks.activations` compares that with the
peaks of two CPU ranks (fp32, random weights, microbatches of 512 and 2,048 tokens; at `3da6af8f`, 2026-11-29).
The error is estimate / measured - 1. It has not been measured on GPUs.
Where it is too low, [the allocator keeps](data/memory.md#the-estimate-of-advise) what was freed.

| model | 512 | 512, checkpointed | 2,048 | 2,048, checkpointed |
|---|---|---|---|---|
| Llama, 58 million parameters | +0% | +0% | -5% | +2% |
| Qwen 2, 108 million | -2% | **-11%** | **-12%** | **-21%** |
| GPT-2, 33 million | -8% | **-26%** | -3% | **-22%** |
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, title in COMMANDS.items():
        out = io.StringIO()
        with mock.patch.dict(os.environ, COLUMNS="82"), redirect_stdout(out), suppress(SystemExit):
            cli.main([*name.split(), "--help"])
        command = f"lightning-odc {name}".strip()
        parts.append(f"## {title}\n\n`{command}`\n\n```text\n{out.getvalue().strip()}\n```\n")
        if name == "advise":
            parts[-1] += _ESTIMATE
    return "\n".join(parts)


def advice() -> str:
    """What the command of docs/get-started.md prints."""
    out = io.StringIO()
    line = "--data longalign --model 1.5b --device H200 --devices 8"
    with redirect_stdout(out):
        assert cli.main(["advise", *line.split()]) == 0
    return out.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page())
    ADVICE.write_text(advice())
