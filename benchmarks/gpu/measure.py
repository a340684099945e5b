"""What one rank measures: reading and adding over the CUDA transport, beside plain copies and additions.

And by a profile: what reads are on the device, and where the host waits. The plain copy that reads are compared with
comes over the same link, from a tensor of this process on the peer's GPU. Where ranks share a GPU there is no link.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness.processes import place
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.transports import make_transport
from lightning_odc.protocol.transports.base import Transport, UnitSpec, WindowSpec, process_group_rendezvous
from lightning_odc.sharding.wrapping import mesh_for, shard_model

MIB = 2**20
_WARM_UP = 3
_ROUNDS = 15
_READS = 20
_STEPS = 5
_MICROBATCHES = 3
_SYNCHRONIZING = "Synchronize"  # cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize
_MARK = "odc minibatch"
#: All shards together, and all accumulators, are larger than the second-level cache of any GPU (60 MB on an H200): no
#: round finds there what an earlier one has left.
ROTATED_MIB = 256

#: Seconds that a job takes on the device, one entry per round.
TimeOf = Callable[[Callable[[], Any]], list[float]]


def measure(rank: int, world_size: int, mib: list[int]) -> dict[str, Any]:
    """Everything about one rank; the process group is up."""
    placement = place("cuda", world_size)
    placement.enter(rank)
    device = placement.devices[rank]
    shared = placement.shares
    meet = process_group_rendezvous(dist.group.WORLD)

    def fresh() -> Transport:
        return make_transport(device, rank, world_size, meet, dist.group.WORLD)

    if shared:
        peer = None
    else:
        peer = torch.device("cuda", (rank + 1) % world_size)
    primitives = time_primitives(fresh, meet, mib, peer=peer, together=not shared)
    waits = host_waits(OnDemandEngine(fresh, meet, timeout=120), device, world_size)
    return {
        "shared GPU": shared,
        "primitives": primitives,
        "reading": reading(fresh(), meet, max(mib)),
        "waits": waits,
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
    *,
    peer: torch.device | None = None,
    together: bool = True,
    rotated_mib: int = ROTATED_MIB,
) -> list[dict[str, Any]]:
    """One entry per size: median seconds of what this rank did, this rank alone and all ranks at once.

    Args:
        fresh: Makes a transport, one for every size.
        meet: Gives every rank's object to every rank.
        mib: Sizes of what is read from one owner, and of the accumulator that is added to, in MiB.
        time_of: Measures a job.
        peer: The next rank's device, if it is another one.
        together: Measure all ranks at once, too. On one GPU that would show how contexts take turns.
        rotated_mib: The size of what all rounds go over, in MiB.
    """
    hows = ["alone"]
    if together:
        hows.append("together")
    return [_time_size(fresh(), meet, size, time_of, peer, hows, rotated_mib) for size in mib]


def _time_size(
    transport: Transport,
    meet: Callable[[Any], list[Any]],
    mib: int,
    time_of: TimeOf,
    peer: torch.device | None,
    hows: Sequence[str],
    rotated_mib: int,
) -> dict[str, Any]:
    numel = mib * MIB // 4
    spec = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    units = (spec,) * max(rotated_mib // mib, 1)
    transport.open(WindowSpec(units=units, words=1))
    jobs = _jobs(transport, max(rotated_mib // mib, 1), peer)
    result: dict[str, Any] = {"mib": mib, **{how: {} for how in hows}}
    for name, job in jobs.items():
        if "together" in hows:
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


def _jobs(transport: Transport, units: int, peer_device: torch.device | None) -> dict[str, Callable[[], Any]]:
    """Every job moves or adds one whole fp32 shard, of another unit in every round; to all, one for each owner."""
    world = transport.world_size
    own = transport.rank
    peer = (own + 1) % world
    like = transport.shard(own, 0)
    here = torch.zeros(units, like.numel(), device=like.device)
    there = torch.zeros_like(here)
    narrow = torch.ones_like(there, dtype=torch.bfloat16)
    rows = torch.ones(world, like.numel(), device=like.device)
    narrow_rows = rows.to(torch.bfloat16)
    counter = itertools.count()

    def each(job: Callable[[int], Any]) -> Callable[[], Any]:
        return lambda: job(next(counter) % units)

    jobs = {
        "copy": each(lambda unit: here[unit].copy_(there[unit])),
        "read from a peer": each(lambda unit: transport.read([transport.shard(peer, unit)], here[unit])),
        "add in place": each(lambda unit: there[unit].add_(here[unit])),
        "add to all": each(lambda unit: transport.add_rows(unit, 0, 0, rows)),
        "add bf16 in place": each(lambda unit: there[unit].add_(narrow[unit])),
        "add bf16 to all": each(lambda unit: transport.add_rows(unit, 0, 0, narrow_rows)),
    }
    if peer_device is not None:
        far = torch.zeros_like(there, device=peer_device)
        jobs["copy over the link"] = each(lambda unit: here[unit].copy_(far[unit], non_blocking=True))
    return jobs


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
    copy_milliseconds = sum(e.device_time for e in copies) / 1e3
    kernel_milliseconds = sum(e.device_time for e in kernels) / 1e3
    return {
        "reads": _READS,
        "copies": len(copies),
        "copy milliseconds": copy_milliseconds,
        "kernels": len(kernels),
        "kernel milliseconds": kernel_milliseconds,
    }


def _beside_a_product(transport: Transport, numel: int) -> dict[str, float]:
    """A copy by the multiprocessors would slow a matrix product down that keeps all of them busy."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(numel, device="cuda")
    side = torch.cuda.Stream()
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
    product_milliseconds = 1e3 * alone[len(alone) // 2]
    return {
        "product milliseconds": product_milliseconds,
        "product milliseconds beside reads": 1e3 * beside[len(beside) // 2],
    }


def host_waits(engine: OnDemandEngine, device: torch.device, world_size: int) -> dict[str, float]:
    """How often the host waited for its device per minibatch, in a small training without a trainer.

    Args:
        engine: not attached.
        device: Device of this rank.
        world_size: number of ranks.
    """
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    shard_model(model, mesh_for(device.type, world_size))
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
            with record_function(_MARK):
                minibatch()
    waits = (engine.protocol.device_waits - before) / _STEPS
    engine.exchange("end", None)
    engine.close()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        record.export_chrome_trace(str(file))
        training, others = synchronizing_calls(json.loads(file.read_text())["traceEvents"])
    return {
        "waits per minibatch": waits,
        "synchronizing calls per minibatch": training / _STEPS,
        "synchronizing calls of other threads per minibatch": others / _STEPS,
    }


def synchronizing_calls(events: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How often the thread that trains waited in a call of CUDA, and how often other threads did.

    The announcer waits once per unit, beside the training. What the profiler itself waits for when it ends is left out.

    Args:
        events: Events of a trace of ``torch.profiler`` in which minibatches are marked.
    """
    end = 0.0
    trains = set()
    for event in events:
        if event.get("name") == _MARK and event.get("cat") == "user_annotation":
            end = max(end, float(event["ts"]) + float(event["dur"]))
            trains.add(event["tid"])
    threads = []
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        if _SYNCHRONIZING in event["name"] and float(event["ts"]) <= end:
            threads.append(event["tid"])
    own = sum(thread in trains for thread in threads)
    return own, len(threads) - own
