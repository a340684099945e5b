"""What one rank measures: reading and adding over the CUDA transport, beside a plain copy and a plain addition.

By a profile: what reading costs the multiprocessors, and how often the host waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.base import Transport, UnitSpec, WindowSpec
from lightning_odc.engine.transports.choice import make_transport
from lightning_odc.sharding.wrapping import mesh_for, shard_model

MIB = 2**20
_WARM_UP, _ROUNDS = 3, 15
_READS = 20
_STEPS, _MICROBATCHES = 5, 3
_SYNCHRONIZING = ("Synchronize",)  # cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize

#: Seconds that a job takes on the device, one entry per round.
TimeOf = Callable[[Callable[[], Any]], list[float]]


def measure(rank: int, world_size: int, mib: list[int]) -> dict[str, Any]:
    """Everything about one rank; the process group is up."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    meet = process_group_rendezvous(dist.group.WORLD)

    def fresh() -> Transport:
        return make_transport(device, rank, world_size, meet, dist.group.WORLD)

    return {
        "primitives": time_primitives(fresh, meet, mib),
        "reading": reading(fresh(), meet, max(mib)),
        "waits": host_waits(OnDemandEngine(fresh, meet, timeout=120), device, world_size),
    }


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


def reading(transport: Transport, meet: Callable[[Any], list[Any]], mib: int) -> dict[str, float]:
    """What the device did while this rank read from a peer, and what a matrix product beside it lost.

    Args:
        transport: fresh; it is opened and closed here.
        meet: gives every rank's object to every rank.
        mib: size of what is read.
    """
    numel = mib * MIB // 4
    spec = UnitSpec("unit", numel, torch.float32, 0, torch.float32)
    transport.open(WindowSpec(units=(spec,), words=1))
    result: dict[str, float] = {}
    for rank in range(transport.world_size):
        meet(None)
        if rank == transport.rank:
            result = _read_profiled(transport, numel) | _beside_a_product(transport, numel)
    meet(None)
    transport.close()
    return result


def _read_profiled(transport: Transport, numel: int) -> dict[str, float]:
    out = torch.empty(numel, device="cuda")
    shards = [transport.shard((transport.rank + 1) % transport.world_size, 0)]
    transport.read(shards, out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        for _ in range(_READS):
            transport.read(shards, out)
        torch.cuda.synchronize()
    on_device = [e for e in record.events() if str(e.device_type).endswith("CUDA")]
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    kernels = [e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]
    return {
        "reads": _READS,
        "copies": len(copies),
        "copy milliseconds": sum(e.device_time for e in copies) / 1e3,
        "kernels": len(kernels),
        "kernel milliseconds": sum(e.device_time for e in kernels) / 1e3,
    }


def _beside_a_product(transport: Transport, numel: int) -> dict[str, float]:
    """A copy by the multiprocessors would slow a matrix product down that keeps all of them busy."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out, side = torch.empty(numel, device="cuda"), torch.cuda.Stream()
    shards = [transport.shard((transport.rank + 1) % transport.world_size, 0)]

    def product() -> None:
        torch.mm(left, left)

    def product_beside_reads() -> None:
        with torch.cuda.stream(side):
            for _ in range(4):
                transport.read(shards, out)
        torch.mm(left, left)

    alone = sorted(device_seconds(product))
    beside = sorted(device_seconds(product_beside_reads))
    torch.cuda.synchronize()
    return {
        "product milliseconds": 1e3 * alone[len(alone) // 2],
        "product milliseconds beside reads": 1e3 * beside[len(beside) // 2],
    }


def host_waits(engine: OnDemandEngine, device: torch.device, world_size: int) -> dict[str, float]:
    """How often the host waited for its device per minibatch, in a small training without a trainer.

    Args:
        engine: not attached.
        device: of this rank.
        world_size: number of ranks.
    """
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]).to(device)
    shard_model(model, mesh_for("cuda", world_size))
    engine.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 512, device=device)

    def minibatch() -> None:
        for _ in range(_MICROBATCHES):
            engine.ledger.add(64.0)
            with engine.backward():
                model(batch).square().sum().backward()
        engine.settle([])
        optimizer.step()
        optimizer.zero_grad()
        engine.publish()

    minibatch()
    torch.cuda.synchronize()
    before = engine.protocol.device_waits
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(_STEPS):
            minibatch()
    waits = (engine.protocol.device_waits - before) / _STEPS
    calls = [e.name for e in record.events() if any(word in e.name for word in _SYNCHRONIZING)]
    engine.exchange("end", None)
    engine.close()
    # The profiler ends with a synchronization of its own.
    return {
        "waits per minibatch": waits,
        "synchronizing calls per minibatch": max(len(calls) - 1, 0) / _STEPS,
    }
