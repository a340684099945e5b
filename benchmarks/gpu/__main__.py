"""What the CUDA transport costs on GPUs: ``python -m benchmarks.gpu``, or ``make bench-gpu``.

Prints tables and writes them to ``docs/data/gpu-bench.json``, from where the documentation takes them. Where there are
fewer GPUs than ranks, ranks share one: then a "peer" is the same memory, and bandwidths say what the transport itself
costs, not what a link between GPUs can do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import profile as gpu_profile
from benchmarks.gpu.primitives import fractions, time_primitives
from benchmarks.gpu.report import bench_tables
from lightning_odc.bench.processes import run_ranks
from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.base import Transport
from lightning_odc.engine.transports.choice import make_transport
from lightning_odc.engine.transports.preflight import OVERLAP_VARIABLE


def measure(rank: int, world_size: int, mib: list[int]) -> dict[str, Any]:
    """Everything about one rank; the process group is up."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    meet = process_group_rendezvous(dist.group.WORLD)

    def fresh() -> Transport:
        return make_transport(device, rank, world_size, meet, dist.group.WORLD)

    primitives = time_primitives(fresh, meet, mib)
    reading = gpu_profile.reading(fresh(), meet, max(mib))
    waits = gpu_profile.host_waits(OnDemandEngine(fresh, meet, timeout=120), device, world_size)
    return {"primitives": primitives, "reading": reading, "waits": waits}


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


def machine() -> dict[str, Any]:
    """What was measured on."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": names,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d"),
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so there is nothing to measure.")
    results = {"machine": machine(), "runs": [run(ranks, options.mib) for ranks in options.ranks]}
    print(bench_tables(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
