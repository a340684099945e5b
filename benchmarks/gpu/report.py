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
    sizes = []
    for index, entry in enumerate(by_rank[0]["primitives"]):
        size = {
            "mib": entry["mib"],
            **{
                how: fractions(entry, [rank["primitives"][index] for rank in by_rank], how)
                for how in ("alone", "together")
                if how in entry
            },
        }
        sizes.append(size)
    seconds = [rank["primitives"] for rank in by_rank]
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
    read_gib_per_s = size / slowest["read from a peer"] / 2**30
    plain_copy_gib_per_s = size / plain / 2**30
    add_gib_per_s = world * size / slowest["add to all"] / 2**30
    own_add = world * slowest["add in place"] / slowest["add to all"]
    add_bf16_gib_per_s = world * size / slowest["add bf16 to all"] / 2**30
    own_add_bf16 = world * slowest["add bf16 in place"] / slowest["add bf16 to all"]
    return {
        "read GiB/s": read_gib_per_s,
        "plain copy GiB/s": plain_copy_gib_per_s,
        "read / plain copy": plain / slowest["read from a peer"],
        "add GiB/s": add_gib_per_s,
        "add / add in place": own_add,
        "add bf16 GiB/s": add_bf16_gib_per_s,
        "add bf16 / add bf16 in place": own_add_bf16,
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
    others = [
        f"- {test['outcome']}: `{name}`" + (f": {test['error']}" if test["error"] else "")
        for name, test in tests.items()
        if test["outcome"] != "passed"
    ]
    return "\n".join([first, "", *others]).strip()


def bench_tables(results: dict[str, Any]) -> str:
    """All tables of a benchmark, in the order in which its parts ran."""
    parts = [f"{_line(results['machine'])}."]
    if not results["finished"]:
        parts.append("The run was ended before everything was measured.")
    parts += [f"Not measured, {name}: {reason}." for name, reason in results["failed"].items()]
    parts += [table(entry) for kind, table in TABLES.items() for entry in results[kind]]
    return "\n\n".join(parts)


def _line(machine: dict[str, Any]) -> str:
    devices = ", ".join(f"{count} x {name}" for name, count in Counter(machine["devices"]).items())
    return f"{devices}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}"


def run_tables(run: dict[str, Any]) -> str:
    """Bandwidths beside those of plain operations, what reading does, and how often the host waits."""
    return "\n\n".join([_SHARED if run["shared GPU"] else _LINKED, _size_table(run), _profile_lines(run)])


def _size_table(run: dict[str, Any]) -> str:
    rows = [
        [f"{size['mib']} MiB, {how}", *(form.format(size[how][name]) for name, form in _FRACTIONS.items())]
        for size in run["sizes"]
        for how in ("alone", "together")
        if how in size
    ]
    return markdown([f"{run['ranks']} ranks", *_FRACTIONS], rows)


def _profile_lines(run: dict[str, Any]) -> str:
    reading = run["reading"]
    waits = run["waits"]
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


def sweep_tables(sweep: dict[str, Any]) -> str:
    """The kernel's sweep: alone, and beside a matrix product."""
    if "missing" in sweep:
        return f"The kernel was not swept: {sweep['missing']}."
    alone = sweep["alone"]
    default = sweep["default"]
    blocks = sorted({entry["block"] for entry in alone})
    rows = []
    for key in dict.fromkeys((e["dtype"], e["aligned"], e["programs"]) for e in alone):
        of_key = {e["block"]: e for e in alone if (e["dtype"], e["aligned"], e["programs"]) == key}
        dtype, is_aligned, programs = key
        speeds = [f"{of_key[block]['bytes per second'] / 1e9:.0f}" for block in blocks]
        plain = f"{next(iter(of_key.values()))['add_ bytes per second'] / 1e9:.0f}"
        row = [f"{dtype}{'' if is_aligned else ', rows anywhere'}", _programs(programs), *speeds, plain]
        rows.append(row)
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
    parts = [
        "The adding kernel on one GPU, to accumulators in its own memory (default: "
        f"{default['programs']} programs, block {default['block']}):",
        markdown(heads, rows),
        "And on a stream of high priority beside a product of two bf16 matrices of 8192 x 8192:",
        markdown(["programs", "GB/s alone", "product ms", "beside additions ms", "slower"], beside),
    ]
    return "\n\n".join(parts)


def _programs(count: int) -> str:
    if count >= 2**30:
        return "one per block"
    return str(count)


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
    parts = [text, markdown(heads, [_host_row(row, len(heads)) for row in entry["rows"]])]
    kernels = [
        f"- {row['way']}: {row['gather kernels']:g} kernels of NCCL gather, per unit and microbatch"
        for row in entry["rows"]
        if "NCCL" in row["way"] and "gather kernels" in row and entry["device"] == "cuda"
    ]
    if kernels:
        parts.append("By the profiler (copy engines gather without a kernel):\n\n" + "\n".join(kernels))
    return "\n\n".join(parts)


def _host_row(row: dict[str, Any], columns: int) -> list[str]:
    named = [row["way"], str(row["world"])]
    if "missing" in row:
        return [*named, f"not measured: {row['missing']}", *[""] * (columns - 3)]
    micro = "{1:.1f} us [{0:.1f}, {2:.1f}]"
    milli = "{1:.2f} ms [{0:.2f}, {2:.2f}]"
    forms = {"host us": micro, "comm us": micro, "minibatch us": micro, "host ms": milli, "device ms": milli}
    return [*named, *(form.format(*row[name]) for name, form in forms.items())]


#: What makes the tables of an entry, by the kind of the part that measured it, in the order of parts.
TABLES = {"sweep": sweep_tables, "host": host_tables, "transport": run_tables}
