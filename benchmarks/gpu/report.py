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
    "plain copy GiB/s": "{:.0f}",
    "read / plain copy": "{:.0%}",
    "add GiB/s": "{:.0f}",
    "add / add in place": "{:.0%}",
    "add bf16 / add bf16 in place": "{:.0%}",
    "add bf16 to all GiB/s": "{:.0f}",
    "kernel / roofline": "{:.0%}",
}
_SHARED = (
    "The ranks share a GPU: peers are the same memory. This says what the transport itself costs, and nothing about "
    "links; a plain copy is one within that memory, which the driver does by a kernel, so the product beside reads is "
    "slower, too."
)
_LINKED = "One GPU per rank: the plain copy comes over the same link, from a tensor of this process on the peer's GPU."


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
    tests = result["tests"]
    counts = Counter(test["outcome"] for test in tests.values())
    failed = counts["failed"] + counts["error"]
    seconds = sum(test["seconds"] for test in tests.values())
    first = f"{_line(result['machine'])}: {counts['passed']} passed, {failed} failed in {seconds:.0f} s."
    if not result["finished"]:
        first += " The run was ended before all tests had run."
    others = [
        f"- {test['outcome']}: `{name}`" + (f": {test['error']}" if test["error"] else "")
        for name, test in tests.items()
        if test["outcome"] != "passed"
    ]
    return "\n".join([first, "", *others]).strip()


def bench_tables(results: dict[str, Any]) -> str:
    """Bandwidths beside those of plain operations, what reading does, how often the host waits, the kernel's sweep."""
    parts = [f"{_line(results['machine'])}."]
    if not results["finished"]:
        parts.append("The run was ended before everything was measured.")
    for run in results["runs"]:
        parts += [_SHARED if run["shared GPU"] else _LINKED, _size_table(run), _profile_lines(run)]
    if "sweep" in results:
        parts += _sweep_tables(results["sweep"])
    return "\n\n".join(parts)


def _line(machine: dict[str, Any]) -> str:
    devices = ", ".join(f"{count} x {name}" for name, count in Counter(machine["devices"]).items())
    return f"{devices}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}"


def _size_table(run: dict[str, Any]) -> str:
    rows = [
        [f"{size['mib']} MiB, {how}", *(form.format(size[how][name]) for name, form in _FRACTIONS.items())]
        for size in run["sizes"]
        for how in ("alone", "together")
        if how in size
    ]
    return markdown([f"{run['ranks']} ranks", *_FRACTIONS], rows)


def _profile_lines(run: dict[str, Any]) -> str:
    reading, waits = run["reading"], run["waits"]
    slower = reading["product milliseconds beside reads"] / reading["product milliseconds"] - 1
    return (
        f"- {reading['reads']:.0f} reads were {reading['copies']:.0f} copies "
        f"({reading['copy milliseconds']:.2f} ms) and {reading['kernels']:.0f} kernels "
        f"({reading['kernel milliseconds']:.2f} ms) by the profiler, which gives all copies this name; a matrix "
        f"product beside reads took {slower:+.1%}.\n"
        f"- The host waited for its device {waits['waits per minibatch']:g} times per minibatch. Calls of CUDA that "
        f"synchronize: {waits['synchronizing calls per minibatch']:g} in the thread that trains, "
        f"{waits['synchronizing calls of other threads per minibatch']:g} in others (the announcer: one per unit)."
    )


def _sweep_tables(sweep: dict[str, Any]) -> list[str]:
    if "missing" in sweep:
        return [f"The kernel was not swept: {sweep['missing']}."]
    alone, default = sweep["alone"], sweep["default"]
    blocks = sorted({entry["block"] for entry in alone})
    rows = []
    for key in dict.fromkeys((e["dtype"], e["aligned"], e["programs"]) for e in alone):
        of_key = {e["block"]: e for e in alone if (e["dtype"], e["aligned"], e["programs"]) == key}
        dtype, is_aligned, programs = key
        speeds = [f"{of_key[block]['bytes per second'] / 1e9:.0f}" for block in blocks]
        plain = f"{next(iter(of_key.values()))['add_ bytes per second'] / 1e9:.0f}"
        rows.append(
            [f"{dtype}{'' if is_aligned else ', rows anywhere'}", _programs(programs), *speeds, plain]
        )
    heads = ["gradients", "programs", *(f"GB/s, block {block}" for block in blocks), "GB/s, `add_`"]
    beside = [
        [
            _programs(entry["programs"]),
            f"{entry['bytes per second'] / 1e9:.0f}",
            f"{entry['product milliseconds']:.2f}",
            f"{entry['product milliseconds beside']:.2f}",
            f"{entry['product milliseconds beside'] / entry['product milliseconds'] - 1:+.1%}",
        ]
        for entry in sweep["beside"]
    ]
    return [
        "The adding kernel on one GPU, to accumulators in its own memory (default: "
        f"{default['programs']} programs, block {default['block']}):",
        markdown(heads, rows),
        "And on a stream of high priority beside a product of two bf16 matrices of 8192 x 8192:",
        markdown(["programs", "GB/s alone", "product ms", "beside additions ms", "slower"], beside),
    ]


def _programs(count: int) -> str:
    return "one per block" if count >= 2**30 else str(count)
