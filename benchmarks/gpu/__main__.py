"""What the CUDA transport costs on GPUs: ``python -m benchmarks.gpu``, or ``make bench-gpu``.

Prints tables; ``make`` also writes them to ``docs/data``, from where the documentation takes them. Where there are
fewer GPUs than ranks, ranks share one, and the tables say so: then a "peer" is the same memory, and bandwidths say what
the transport itself costs, not what a link between GPUs can do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import MIB, measure
from benchmarks.gpu.report import bench_tables, machine, write
from benchmarks.gpu.sweep import beside_a_product, sweep
from lightning_odc.bench.processes import run_ranks


def summarize(world_size: int, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of the results: fractions by size, and the profile of rank 0."""
    sizes = [
        {
            "mib": entry["mib"],
            **{
                how: fractions(entry, [rank["primitives"][index] for rank in by_rank], how)
                for how in ("alone", "together")
                if how in entry
            },
        }
        for index, entry in enumerate(by_rank[0]["primitives"])
    ]
    return {
        "ranks": world_size,
        "shared GPU": by_rank[0]["shared GPU"],
        "sizes": sizes,
        "reading": by_rank[0]["reading"],
        "waits": by_rank[0]["waits"],
        "seconds": [rank["primitives"] for rank in by_rank],
    }


def fractions(entry: dict[str, Any], by_rank: list[dict[str, Any]], how: str) -> dict[str, float]:
    """What is compared with the targets, from the slowest rank of each job; bytes are those of the sums, in fp32.

    Args:
        entry: Entry of one size and any rank.
        by_rank: the entries of all ranks for that size.
        how: ``"together"`` or ``"alone"``.
    """
    slowest = {name: max(one[how][name] for one in by_rank) for name in entry[how]}
    size, world = entry["mib"] * MIB, len(by_rank)
    memory = 2 * size / slowest["copy"]  # bytes read and written per second
    plain = slowest.get("copy over the link", slowest["copy"])
    return {
        "read GiB/s": size / slowest["read from a peer"] / 2**30,
        "plain copy GiB/s": size / plain / 2**30,
        "read / plain copy": plain / slowest["read from a peer"],
        "add GiB/s": size / slowest["add to a peer"] / 2**30,
        "add / add in place": slowest["add in place"] / slowest["add to a peer"],
        "add bf16 / add bf16 in place": slowest["add bf16 in place"] / slowest["add bf16 to a peer"],
        "add bf16 to all GiB/s": world * size / slowest["add bf16 to all"] / 2**30,
        # The kernel reads the values, and reads and writes the accumulator.
        "kernel / roofline": 3 * size / slowest["add to own"] / memory,
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.gpu``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes")
    parser.add_argument(
        "--mib", type=int, metavar="N", nargs="+", default=[64, 256, 1024], help="sizes in MiB"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write results here, and tables beside it"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so there is nothing to measure.")
    results: dict[str, Any] = {"machine": machine(), "finished": False, "runs": []}

    def keep() -> None:
        """Write results after every part, so that an early end keeps them."""
        if options.json:
            write(options.json, results, bench_tables(results))

    for ranks in options.ranks:
        results["runs"].append(summarize(ranks, run_ranks(measure, ranks, options.mib)))
        keep()
    results["sweep"] = run_ranks(sweep_kernel, 1)[0]
    results["finished"] = True
    keep()
    print(bench_tables(results))


def sweep_kernel(*_: int) -> dict[str, Any]:
    """The kernel alone and beside a matrix product, on the first GPU."""
    try:
        from lightning_odc.engine.transports import kernels
    except ImportError as error:
        return {"missing": str(error)}

    def launch(programs: int, block: int) -> kernels.Launch:
        return kernels.Launch(programs, block, kernels.DEFAULT_LAUNCH.warps)

    torch.cuda.set_device(0)
    default = kernels.DEFAULT_LAUNCH
    return {
        "default": {"programs": default.programs, "block": default.block},
        "alone": sweep(kernels.add_rows, launch),
        "beside": beside_a_product(kernels.add_rows, launch, default.block),
    }


if __name__ == "__main__":
    main()
