"""How fast one rank reads and adds over the CUDA transport, beside a plain copy and a plain addition on its GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import Transport, UnitSpec, WindowSpec

MIB = 2**20
_WARM_UP, _ROUNDS = 3, 15

#: Seconds that a job takes on the device, one entry per round.
TimeOf = Callable[[Callable[[], Any]], list[float]]


def device_seconds(job: Callable[[], Any]) -> list[float]:
    """Seconds of a job on the current stream, measured by events of the device; the first rounds are left out."""
    seconds = []
    for _ in range(_WARM_UP + _ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        job()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds[_WARM_UP:]


def time_primitives(
    fresh: Callable[[], Transport],
    meet: Callable[[Any], list[Any]],
    mib: Iterable[int],
    time_of: TimeOf = device_seconds,
) -> list[dict[str, Any]]:
    """One entry per size: median seconds of what this rank did, all ranks at once and this rank alone.

    Args:
        fresh: makes a transport, one for every size.
        meet: gives every rank's object to every rank.
        mib: sizes of what is read from one owner, and of the accumulator that is added to, in MiB.
        time_of: measures a job.
    """
    return [_time_size(fresh(), meet, size, time_of) for size in mib]


def _time_size(
    transport: Transport, meet: Callable[[Any], list[Any]], mib: int, time_of: TimeOf
) -> dict[str, Any]:
    numel = mib * MIB // 4
    spec = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    transport.open(WindowSpec(units=(spec,), words=1))
    jobs = _jobs(transport)
    result: dict[str, Any] = {"mib": mib, "together": {}, "alone": {}}
    for name, job in jobs.items():
        meet(None)
        result["together"][name] = statistics.median(time_of(job))
        for rank in range(transport.world_size):
            meet(None)
            if rank == transport.rank:
                result["alone"][name] = statistics.median(time_of(job))
    jobs.clear()
    meet(None)
    transport.close()
    meet(None)
    return result


def _jobs(transport: Transport) -> dict[str, Callable[[], Any]]:
    """Every job moves or adds one whole fp32 shard."""
    peer = (transport.rank + 1) % transport.world_size
    like = transport.shard(transport.rank, 0)
    here, there = torch.zeros_like(like), torch.zeros_like(like)
    narrow = torch.ones_like(like, dtype=torch.bfloat16)
    shard = transport.shard(peer, 0)

    def add(owner: int, values: Tensor) -> Callable[[], Any]:
        accumulator = transport.accumulator(owner, 0)
        return lambda: transport.add(accumulator, values)

    return {
        "copy": lambda: here.copy_(there),
        "read from a peer": lambda: transport.read([shard], here),
        "add in place": lambda: there.add_(here),
        "add to a peer": add(peer, here),
        "add bf16 in place": lambda: there.add_(narrow),
        "add bf16 to a peer": add(peer, narrow),
        "add to own": add(transport.rank, here),
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
