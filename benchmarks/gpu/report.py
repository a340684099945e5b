"""What GPU tests and benchmarks found, as Markdown for ``docs/gpus.md``."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lightning_odc.bench.tables import markdown

_FRACTIONS = {
    "read GiB/s": "{:.0f}",
    "read / copy": "{:.0%}",
    "add GiB/s": "{:.0f}",
    "add / add in place": "{:.0%}",
    "add bf16 / add bf16 in place": "{:.0%}",
    "kernel / roofline": "{:.0%}",
}


def machine() -> dict[str, Any]:
    """What was measured on."""
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(file: Path, result: dict[str, Any], text: str) -> None:
    """Write the result as JSON, and its text beside it, with the ending ``.md``; the page includes the text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(text + "\n")


def test_summary(result: dict[str, Any]) -> str:
    """How many tests passed on which machine, and which did not."""
    counts = Counter(result["tests"].values())
    lines = [f"{_line(result['machine'])}: {counts['passed']} passed, {counts['failed']} failed."]
    others = [f"- {outcome}: `{name}`" for name, outcome in result["tests"].items() if outcome != "passed"]
    return "\n".join([*lines, "", *others]).strip()


def bench_tables(results: dict[str, Any]) -> str:
    """Bandwidths as fractions of plain operations, what reading does, and how often the host waits."""
    parts = [f"{_line(results['machine'])}."]
    for run in results["runs"]:
        parts += [_size_table(run), _profile_lines(run)]
    return "\n\n".join(parts)


def _line(machine: dict[str, Any]) -> str:
    devices = ", ".join(f"{count} x {name}" for name, count in Counter(machine["devices"]).items())
    return f"{devices}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}"


def _size_table(run: dict[str, Any]) -> str:
    rows = [
        [f"{size['mib']} MiB, {how}", *(form.format(size[how][name]) for name, form in _FRACTIONS.items())]
        for size in run["sizes"]
        for how in ("alone", "together")
    ]
    return markdown([f"{run['ranks']} ranks", *_FRACTIONS], rows)


def _profile_lines(run: dict[str, Any]) -> str:
    reading, waits = run["reading"], run["waits"]
    slower = reading["product milliseconds beside reads"] / reading["product milliseconds"] - 1
    return (
        f"- {reading['reads']:.0f} reads were {reading['copies']:.0f} copies "
        f"({reading['copy milliseconds']:.2f} ms) and {reading['kernels']:.0f} kernels "
        f"({reading['kernel milliseconds']:.2f} ms); a matrix product beside reads took {slower:+.1%}.\n"
        f"- The host waited for its device {waits['waits per minibatch']:g} times per minibatch (all calls of CUDA "
        f"that synchronize: {waits['synchronizing calls per minibatch']:g})."
    )
