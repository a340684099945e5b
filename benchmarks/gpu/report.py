"""What GPU tests and benchmarks found, as Markdown; "not measured yet" where nobody has run them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

PLACE = "<!-- gpu figures -->"
_NOTHING = "**Not measured yet.** Nobody has run `make {target}` on a machine with a GPU; its result would stand here."

_FRACTIONS = {
    "read GiB/s": "{:.0f}",
    "read / copy": "{:.0%}",
    "add GiB/s": "{:.0f}",
    "add / add in place": "{:.0%}",
    "add bf16 / add bf16 in place": "{:.0%}",
    "kernel / roofline": "{:.0%}",
}


def figures(folder: Path) -> str:
    """The part of a page that says what was run on GPUs, from ``gpu-tests.json`` and ``gpu-bench.json``.

    Args:
        folder: where these files are, or are not.
    """
    tests, bench = folder / "gpu-tests.json", folder / "gpu-bench.json"
    return "\n\n".join(
        [
            "### Tests",
            test_summary(json.loads(tests.read_text()))
            if tests.exists()
            else _NOTHING.format(target="test-gpu"),
            "### Measurements",
            bench_tables(json.loads(bench.read_text()))
            if bench.exists()
            else _NOTHING.format(target="bench-gpu"),
        ]
    )


def test_summary(result: dict[str, Any]) -> str:
    """How many tests passed on which machine, and which did not."""
    counts = Counter(result["tests"].values())
    lines = [f"{_machine(result['machine'])}: {counts['passed']} passed, {counts['failed']} failed."]
    others = [f"- {outcome}: `{name}`" for name, outcome in result["tests"].items() if outcome != "passed"]
    return "\n".join([*lines, "", *others]).strip()


def bench_tables(results: dict[str, Any]) -> str:
    """Bandwidths as fractions of plain operations, what reading does, and how often the host waits."""
    parts = [f"{_machine(results['machine'])}."]
    for run in results["runs"]:
        parts += [_size_table(run), _profile_lines(run)]
    return "\n\n".join(parts)


def _size_table(run: dict[str, Any]) -> str:
    lines = [
        f"| {run['ranks']} ranks | " + " | ".join(_FRACTIONS) + " |",
        "| --- |" + " --- |" * len(_FRACTIONS),
    ]
    for size in run["sizes"]:
        for how in ("alone", "together"):
            cells = [form.format(size[how][name]) for name, form in _FRACTIONS.items()]
            lines.append(f"| {size['mib']} MiB, {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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


def _machine(machine: dict[str, Any]) -> str:
    names = Counter(machine["devices"])
    devices = ", ".join(f"{count} x {name}" for name, count in names.items())
    return f"{devices}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}"
