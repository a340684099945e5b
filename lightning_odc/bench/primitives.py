"""How fast shards are read and gradients added, beside gloo's collectives and beside a plain copy.

``python -m lightning_odc.bench.primitives`` prints a Markdown table. Every round times, right after a barrier and in
changing order, the same exchange done four ways on all ranks at once; a round's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_odc.bench.processes import run_ranks
from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.comm import all_gather, reduce_scatter
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Segment, UnitSpec
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport

MIB = 2**20


def time_unit(rank: int, world_size: int, unit_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by what was timed; the process group is up.

    Args:
        rank: this rank.
        world_size: number of ranks.
        unit_bytes: size of the whole (unsharded) fp32 unit.
        rounds: how often.
    """
    numel = unit_bytes // 4 // world_size
    spec = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    protocol = Protocol(SharedMemoryTransport(rank, world_size, rendezvous), [spec], timeout=60)
    protocol.open()
    protocol.own_shard(0).fill_(rank)
    protocol.publish(0)
    jobs = _jobs(protocol, rank, world_size, numel)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for round_index in range(rounds + 2):  # the first two warm up
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            dist.barrier()
            begin = time.perf_counter()
            jobs[name]()
            if round_index >= 2:
                seconds[name].append(time.perf_counter() - begin)
    protocol.clear(0)
    dist.barrier()
    jobs.clear()
    protocol.close()
    return seconds


def _jobs(protocol: Protocol, rank: int, world_size: int, numel: int) -> dict[str, Callable[[], Any]]:
    gathered, chunks = torch.zeros(world_size, numel), torch.ones(world_size, numel)
    reduced, source = torch.zeros(numel), torch.ones(world_size, numel)
    flat, own = gathered.view(-1), gathered[rank]
    peers = [peer for peer in range(world_size) if peer != rank]

    def copy() -> None:
        for peer in peers:
            gathered[peer].copy_(source[peer])

    def add() -> None:
        for peer in range(world_size):
            source[peer].add_(chunks[peer])

    whole = [Segment(0, 0, numel)]
    return {
        "gather": lambda: protocol.gather(0, gathered),
        "gloo all-gather": lambda: all_gather(flat, own),
        "copy_": copy,
        "accumulate": lambda: protocol.accumulate(0, chunks, whole),
        "gloo reduce-scatter": lambda: reduce_scatter(reduced, chunks.view(-1)),
        "add_": add,
    }


def summarize(by_rank: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians and quartiles of the slowest rank per round, and of the ratios round by round."""
    slowest = {
        name: [max(times) for times in zip(*(r[name] for r in by_rank), strict=True)] for name in by_rank[0]
    }

    def ratio(over: str, under: str) -> list[float]:
        return [a / b for a, b in zip(slowest[over], slowest[under], strict=True)]

    return {
        "milliseconds": {name: [1e3 * q for q in _quartiles(times)] for name, times in slowest.items()},
        "gather_over_gloo": _quartiles(ratio("gloo all-gather", "gather")),
        "gather_over_copy": _quartiles(ratio("gather", "copy_")),
        "accumulate_over_gloo": _quartiles(ratio("gloo reduce-scatter", "accumulate")),
        "accumulate_over_add": _quartiles(ratio("accumulate", "add_")),
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| ranks | unit | gather | faster than gloo | times a `copy_` "
        "| accumulate | faster than gloo | times an `add_` |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        ms = r["milliseconds"]
        lines.append(
            f"| {r['ranks']} | {r['mib']} MiB | {ms['gather'][1]:.2f} ms | {_show(r['gather_over_gloo'])} "
            f"| {_show(r['gather_over_copy'])} | {ms['accumulate'][1]:.2f} ms | {_show(r['accumulate_over_gloo'])} "
            f"| {_show(r['accumulate_over_add'])} |"
        )
    return "\n".join(lines)


def _show(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.2f}x [{low:.2f}, {high:.2f}]"


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def time_units(rank: int, world_size: int, sizes: list[int], rounds: int) -> list[dict[str, list[float]]]:
    """`time_unit` for several sizes, on one rank."""
    return [time_unit(rank, world_size, size, rounds) for size in sizes]


def run(world_size: int, mib: list[int], rounds: int) -> list[dict[str, Any]]:
    """Start the ranks, time every size, return one summary per size."""
    by_rank = run_ranks(time_units, world_size, [size * MIB for size in mib], rounds)
    return [
        {"ranks": world_size, "mib": size, **summarize([times[index] for times in by_rank])}
        for index, size in enumerate(mib)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m lightning_odc.bench.primitives``."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_odc.bench.primitives", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes, one rank each"
    )
    parser.add_argument(
        "--mib", type=int, metavar="N", nargs="+", default=[1, 16, 64], help="sizes of a unit in MiB"
    )
    parser.add_argument("--rounds", type=int, metavar="N", default=30, help="timed rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    results = [result for ranks in options.ranks for result in run(ranks, options.mib, options.rounds)]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
