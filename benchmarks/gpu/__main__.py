"""What the CUDA transport costs on GPUs: ``python -m benchmarks.gpu``, or ``make bench-gpu``.

Prints tables; ``make`` also writes them to ``docs/data``, from where the documentation takes them. Where there are
fewer GPUs than ranks, ranks share one: then a "peer" is the same memory, and bandwidths say what the transport itself
costs, not what a link between GPUs can do.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import MIB, measure
from benchmarks.gpu.report import bench_tables, machine, write
from lightning_odc.bench.processes import run_ranks
from lightning_odc.engine.transports.preflight import OVERLAP_VARIABLE


def summarize(world_size: int, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of the results: fractions by size, and the profile of rank 0."""
    sizes = [
        {
            "mib": entry["mib"],
            **{
                how: fractions(entry, [rank["primitives"][index] for rank in by_rank], how)
                for how in ("alone", "together")
            },
        }
        for index, entry in enumerate(by_rank[0]["primitives"])
    ]
    return {
        "ranks": world_size,
        "sizes": sizes,
        "reading": by_rank[0]["reading"],
        "waits": by_rank[0]["waits"],
        "seconds": [rank["primitives"] for rank in by_rank],
    }


def fractions(entry: dict[str, Any], by_rank: list[dict[str, Any]], how: str) -> dict[str, float]:
    """What is compared with the targets, from the slowest rank of each job.

    Args:
        entry: of one size, of any rank.
        by_rank: the entries of all ranks for that size.
        how: ``"together"`` or ``"alone"``.
    """
    slowest = {name: max(one[how][name] for one in by_rank) for name in entry[how]}
    size = entry["mib"] * MIB
    memory = 2 * size / slowest["copy"]  # bytes read and written per second
    return {
        "read GiB/s": size / slowest["read from a peer"] / 2**30,
        "read / copy": slowest["copy"] / slowest["read from a peer"],
        "add GiB/s": size / slowest["add to a peer"] / 2**30,
        "add / add in place": slowest["add in place"] / slowest["add to a peer"],
        "add bf16 / add bf16 in place": slowest["add bf16 in place"] / slowest["add bf16 to a peer"],
        # The kernel reads the values, and reads and writes the accumulator.
        "kernel / roofline": 3 * size / slowest["add to own"] / memory,
    }


def run(world_size: int, mib: list[int]) -> dict[str, Any]:
    """Start the ranks, several per GPU where there are too few, and return the summary."""
    before = os.environ.get(OVERLAP_VARIABLE)
    if world_size > torch.cuda.device_count():
        os.environ[OVERLAP_VARIABLE] = "1"
    try:
        by_rank = run_ranks(measure, world_size, mib)
    finally:
        os.environ.pop(OVERLAP_VARIABLE, None)
        if before is not None:
            os.environ[OVERLAP_VARIABLE] = before
    return summarize(world_size, by_rank)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.gpu``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--mib", type=int, metavar="N", nargs="+", default=[16, 64, 256], help="sizes in MiB")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write results here, and tables beside it"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so there is nothing to measure.")
    results = {"machine": machine(), "runs": [run(ranks, options.mib) for ranks in options.ranks]}
    text = bench_tables(results)
    print(text)
    if options.json:
        write(options.json, results, text)


if __name__ == "__main__":
    main()
