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

from benchmarks.command import markdown

_FRACTIONS = {
    "read GiB/s": "{:.0f}",
    "plain copy GiB/s": "{:.0f}",
    "read / plain copy": "{:.0%}",
    "add GiB/s": "{:.0f}",
    "add / add in place": "{:.0%}",
    "add bf16 GiB/s": "{:.0f}",
    "add bf16 / add bf16 in place": "{:.0%}",
}
_SHARED = (
    "The ranks share a GPU: peers are the same memory. This says what the transport itself costs, and nothing about "
    "links; a plain copy is one within that memory, which the driver does by a kernel, so the product beside reads is "
    "slower, too."
)
_LINKED = "One GPU per rank: the plain copy comes over the same link, from a tensor of this process on the peer's GPU."


def machine() -> dict[str, Any]:
    """What was measured on."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": devices,
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


def summarize(world_size: int, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of the results: fractions by size, and the profile of rank 0."""
    seconds = [rank["primitives"] for rank in by_rank]
    sizes = []
    for entries in zip(*seconds, strict=True):
        first = entries[0]
        size = {"mib": first["mib"]}
        for how in ("alone", "together"):
            if how in first:
                size[how] = fractions(first, list(entries), how)
        sizes.append(size)
    return {
        "ranks": world_size,
        "shared GPU": by_rank[0]["shared GPU"],
        "sizes": sizes,
        "reading": by_rank[0]["reading"],
        "waits": by_rank[0]["waits"],
        "seconds": seconds,
    }


def fractions(entry: dict[str, Any], by_rank: list[dict[str, Any]], how: str) -> dict[str, float]:
    """What is compared with the targets, from the slowest rank of each job; bytes are those of the sums, in fp32.

    A rank adds to all owners at once, so it is compared with as many additions in place as there are owners.

    Args:
        entry: Entry of one size and any rank.
        by_rank: the entries of all ranks for that size.
        how: ``"together"`` or ``"alone"``.
    """
    slowest = {name: max(one[how][name] for one in by_rank) for name in entry[how]}
    size = entry["mib"] * 2**20
    world = len(by_rank)
    plain = slowest.get("copy over the link", slowest["copy"])
    read = slowest["read from a peer"]
    add = slowest["add to all"] / world
    add_bf16 = slowest["add bf16 to all"] / world
    gib = size / 2**30
    return {
        "read GiB/s": gib / read,
        "plain copy GiB/s": gib / plain,
        "read / plain copy": plain / read,
        "add GiB/s": gib / add,
        "add / add in place": slowest["add in place"] / add,
        "add bf16 GiB/s": gib / add_bf16,
        "add bf16 / add bf16 in place": slowest["add bf16 in place"] / add_bf16,
    }


def test_summary(result: dict[str, Any]) -> str:
    """How many tests passed on which machine, and which did not."""
    tests = result["tests"]
    counts = Counter(test["outcome"] for test in tests.values())
    failed = counts["failed"] + counts["error"]
    seconds = sum(test["seconds"] for test in tests.values())
    first = f"{_line(result['machine'])}: {counts['passed']} passed, {failed} failed in {seconds:.0f} s."
    if not result["finished"]:
        first += " The run was ended before all tests had run."
    lines = [first, ""]
    for name, test in tests.items():
        if test["outcome"] == "passed":
            continue
        line = f"- {test['outcome']}: `{name}`"
        if test["error"]:
            line += f": {test['error']}"
        lines.append(line)
    return "\n".join(lines).strip()


def bench_tables(results: dict[str, Any]) -> str:
    """All tables of a benchmark, in the order in which its parts ran."""
    parts = [f"{_line(results['machine'])}."]
    if not results["finished"]:
        parts.append("The run was ended before everything was measured.")
    parts += [f"Not measured, {name}: {reason}." for name, reason in results["failed"].items()]
    for kind, table in TABLES.items():
        parts += map(table, results[kind])
    return "\n\n".join(parts)


def _line(machine: dict[str, Any]) -> str:
    counts = Counter(machine["devices"])
    devices = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return f"{devices}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}"


def run_tables(run: dict[str, Any]) -> str:
    """Bandwidths beside those of plain operations, what reading does, and how often the host waits."""
    head = _LINKED
    if run["shared GPU"]:
        head = _SHARED
    parts = [head, _size_table(run), _profile_lines(run)]
    return "\n\n".join(parts)


def _size_table(run: dict[str, Any]) -> str:
    rows = []
    for size in run["sizes"]:
        for how in ("alone", "together"):
            if how not in size:
                continue
            row = [f"{size['mib']} MiB, {how}"]
            for name, form in _FRACTIONS.items():
                value = size[how][name]
                row.append(form.format(value))
            rows.append(row)
    head = [f"{run['ranks']} ranks", *_FRACTIONS]
    return markdown(head, rows)


def _profile_lines(run: dict[str, Any]) -> str:
    reading = run["reading"]
    waits = run["waits"]
    slower = reading["product milliseconds beside reads"] / reading["product milliseconds"] - 1
    copies = f"{reading['copies']:.0f} copies ({reading['copy milliseconds']:.2f} ms)"
    kernels = f"{reading['kernels']:.0f} kernels ({reading['kernel milliseconds']:.2f} ms)"
    reads = (
        f"- {reading['reads']:.0f} reads were {copies} and {kernels} by the profiler, which gives all copies this "
        f"name; a matrix product beside reads took {slower:+.1%}."
    )
    waited = f"- The host waited for its device {waits['waits per minibatch']:g} times per minibatch."
    calls = (
        f"Calls of CUDA that synchronize: {waits['synchronizing calls per minibatch']:g} in the thread that trains, "
        f"{waits['synchronizing calls of other threads per minibatch']:g} in others (the announcer: one per unit)."
    )
    return f"{reads}\n{waited} {calls}"


def host_tables(entry: dict[str, Any]) -> str:
    """What the host spends per unit, one row per way to move parameters and gradients."""
    shape = entry["shape"]
    text = (
        f"Host time, {shape['name']}: {shape['layers']} layers of width {shape['width']}, microbatches of "
        f"{shape['batch']} x {shape['length']} tokens, bf16; medians of {entry['rounds']} rounds [95 % interval]. The "
        "host was the limit where both times per microbatch are alike."
    )
    if entry["device"] == "cpu":
        text += " A rehearsal on CPU ranks: gloo takes the place of NCCL, and times include all computation."
    heads = [
        "per unit and microbatch",
        "ranks",
        "host",
        "of it gather and accumulate or reduce",
        "more at the end of a minibatch",
        "host per microbatch",
        "until the device is done",
    ]
    rows = [_host_row(row, len(heads)) for row in entry["rows"]]
    table = markdown(heads, rows)
    return f"{text}\n\n{table}"


def _host_row(row: dict[str, Any], columns: int) -> list[str]:
    cells = [row["way"], str(row["world"])]
    if "missing" in row:
        cells.append(f"not measured: {row['missing']}")
        return cells + [""] * (columns - len(cells))
    for name in ("host us", "comm us", "minibatch us"):
        low, middle, high = row[name]
        cells.append(f"{middle:.1f} us [{low:.1f}, {high:.1f}]")
    for name in ("host ms", "device ms"):
        low, middle, high = row[name]
        cells.append(f"{middle:.2f} ms [{low:.2f}, {high:.2f}]")
    return cells


#: What makes the tables of an entry, by the kind of the part that measured it, in the order of parts.
TABLES = {"host": host_tables, "transport": run_tables}
