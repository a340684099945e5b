"""What on-demand communication adds to a rank's memory: by formula, and measured beside collectives.

``python -m benchmarks.memory`` prints a Markdown table. The model is a stack of linear blocks. Measured are
the window (its pages, as the kernel counts them) and the peak of private memory, sampled every millisecond.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.command import markdown, parser_of
from benchmarks.harness.processes import run_ranks
from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.wrapping import mesh_for, precision_policy, shard_model

MIB = 2**20
RUNS: dict[str, dict[str, Any]] = {
    "collective": {},
    "on_demand": {},
    "on_demand, kept and summed": {},
    "on_demand, deterministic": {"deterministic": True},
}


class Block(nn.Module):
    """Two square layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Linear(width, width)
        second = nn.Linear(width, width)
        self.layers = nn.Sequential(first, nn.Tanh(), second)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Sampler(threading.Thread):
    """Samples the private memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, status_bytes("RssAnon"))
            time.sleep(0.001)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak


def status_bytes(field: str) -> int:
    """A memory field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def window_pages() -> int:
    """Bytes of this process's window that the kernel backs with pages (each mapping has its owner's name once)."""
    total = 0
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "memfd:lightning-odc" in line:
            name = line
        elif line.startswith("Rss:") and name:
            total += int(line.split()[1]) * 1024
            name = ""
    return total


def formula(parameters: int, world_size: int, shard_itemsize: int, deterministic: bool) -> int:
    """Bytes per rank: a shard in the compute dtype, and fp32 accumulators (one per source if deterministic)."""
    sources = 1
    if deterministic:
        sources = world_size
    return parameters // world_size * (shard_itemsize + 4 * sources)


def measure(rank: int, world_size: int, run: str, width: int, depth: int, bf16: bool) -> dict[str, int]:
    """Train three steps of two microbatches; returns bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    on_demand = run != "collective"
    policy = precision_policy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None, on_demand)
    shard_model(model, mesh_for("cpu", world_size), mixed_precision=policy)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    cache = GatherCache("auto" if "kept" in run else 0, HostMemory(world_size))
    if on_demand:
        engine: Engine = OnDemandEngine(
            lambda: SharedMemoryTransport(rank, world_size, rendezvous),
            rendezvous,
            timeout=60,
            gather_cache=cache,
            **RUNS[run],
        )
    else:
        engine = CollectiveEngine(world_size, rendezvous)
    engine.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = Sampler()
    sampler.start()
    for _ in range(3):
        optimizer.zero_grad()
        for index in range(2):
            engine.begin_microbatch(index)
            engine.ledger.add(1)
            loss = model(torch.ones(8, width)).square().mean()
            with engine.backward(more=index == 0):
                loss.backward()
        engine.settle([])
        optimizer.step()
        engine.publish()
    peak = sampler.stop()
    sharded = parameters // world_size * 16
    expected = 0
    if on_demand:
        width = 4
        if bf16:
            width = 2
        expected = formula(parameters, world_size, width, "deterministic" in run)
    result = {
        "formula": expected,
        "window": engine.window_bytes,
        "pages": window_pages() // world_size,
        "kept": cache.bytes,
        "peak": peak,
        "sharded": sharded,
    }
    engine.close()
    return result


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.memory``."""
    parser = parser_of("memory", __doc__)
    parser.add_argument(
        "--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes, one rank each"
    )
    parser.add_argument("--width", type=int, metavar="N", default=1024, help="width of the model")
    parser.add_argument("--depth", type=int, metavar="N", default=8, help="layers of the model")
    options = parser.parse_args(arguments)
    head = (
        "ranks",
        "dtype",
        "run",
        "formula",
        "window",
        "its pages",
        "kept and summed",
        "private peak",
        "sharded state",
    )
    rows = []
    for ranks in options.ranks:
        for bf16 in (False, True):
            for run in RUNS:
                r = run_ranks(measure, ranks, run, options.width, options.depth, bf16)[0]
                sizes = [r[key] for key in ("formula", "window", "pages", "kept", "peak", "sharded")]
                dtype = "fp32"
                if bf16:
                    dtype = "bf16"
                row = [ranks, dtype, run]
                row += [f"{size / MIB:.1f} MiB" for size in sizes]
                rows.append(row)
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
