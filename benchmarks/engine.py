"""Time the engine's own Python, in units that are almost empty.

*The engine's own Python.* A stack of tiny layers, each layer a unit, runs microbatches. What ``fully_shard`` calls in
every unit (two gathers and one accumulate) and the context of the backward pass are timed one by one, between all
that ``fully_shard`` does itself, so caches are as cold as in a training. A clock that times nothing is subtracted. Once
as by default, where units stay gathered and sums of gradients wait for the last microbatch; once with nothing kept.
The shards have a few bytes, so that copying them takes almost no time. Ranks take turns, so that no rank waits for
another's lock. Processor time counts, which other programs do not enter. The hooks that note gradients are not in it:
each is one call in C.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks import command
from benchmarks.command import check_options, markdown, option, prepare_output
from benchmarks.harness.processes import CutShort, RankProcesses
from benchmarks.harness.report import machine
from benchmarks.harness.results import median_interval
from lightning_odc._compat import comms_of
from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.comm import StockComm, set_comms
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport
from lightning_odc.engine.units import find_units
from lightning_odc.files import write_json
from lightning_odc.sharding.wrapping import mesh_for, precision_policy, shard_model

_UNITS = 16
_BLOCK = 10
_RANKS = (2, 4)
_PARAMETERS = (1, 12)
_PARTS = {"reads": 2, "adds": 1, "backward": 0}  # what is timed, and how often per unit and microbatch


@dataclass(frozen=True)
class EngineOptions:
    """What to time.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path = option(Path("odc-bench"), "folder for JSON", letter="DIR")
    rounds: int = option(15, "timed rounds", least=1)

    def __post_init__(self) -> None:
        check_options(self)


class Scales(nn.Module):
    """A small unit of several parameters: one product for each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


class _Clock:
    """Adds up the processor time of this thread in what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, comm: Any) -> StockComm:
        """A comm object that is timed."""
        return StockComm(comm, self.running)

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds += time.thread_time() - begin

    @contextmanager
    def around(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """A context of which the beginning and the end are timed, and not what is done in it."""
        with self.running():
            inner.__enter__()
        yield
        with self.running():
            inner.__exit__(None, None, None)


def engine_python(
    rank: int, world_size: int, parameters: int, keeps: bool, blocks: int
) -> dict[str, list[float]]:
    """Microseconds of every block of microbatches, each block a minibatch, by what is timed.

    Per unit and microbatch, ``"all"`` with ``fully_shard`` and autograd. ``"settle"`` is per unit and minibatch: it
    compares, settles and publishes. ``keeps``: there is memory to keep units gathered, and sums of gradients.
    """
    torch.set_num_threads(1)
    model = _sharded(parameters, world_size)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    gather_cache = GatherCache(2**30 if keeps else 0, HostMemory(world_size))
    engine = OnDemandEngine(
        lambda: SharedMemoryTransport(rank, world_size, rendezvous),
        rendezvous,
        timeout=60,
        gather_cache=gather_cache,
    )
    engine.attach(model)
    clocks = {part: _Clock() for part in _PARTS}
    for unit in find_units(model):
        comms = comms_of(unit.modules[0])
        assert comms is not None
        set_comms(unit.modules, clocks["reads"].wrap(comms[0]), clocks["adds"].wrap(comms[1]))
    taken: dict[str, list[float]] = {name: [] for name in (*_PARTS, "all", "settle")}
    for number in range(blocks + 1):
        for turn in range(world_size):  # one at a time: no rank wants a lock that another one holds
            dist.barrier()
            if turn == rank:
                for clock in clocks.values():
                    clock.seconds = 0.0
                everything = _run_block(model, lambda: clocks["backward"].around(engine.backward(more=True)))
                if number:
                    for part, calls in _PARTS.items():
                        spent = 1e6 * clocks[part].seconds / (_BLOCK * _UNITS)
                        taken[part].append(spent - calls * _nothing())
                    taken["all"].append(1e6 * everything / (_BLOCK * _UNITS))
        dist.barrier()
        begin = time.thread_time()
        with engine.backward():  # as the last of a minibatch, after which shards are compared
            pass
        engine.settle([])
        engine.publish()
        if number:
            seconds = time.thread_time() - begin
            taken["settle"].append(1e6 * seconds / _UNITS)
    reads = blocks * _UNITS * (1 if keeps else _BLOCK)
    assert engine.traffic.reads > reads, "the one-sided path was not taken"
    engine.exchange("end", None)
    engine.close()
    return taken


def _nothing() -> float:
    """Microseconds that the clock sees when nothing is done."""
    clock = _Clock()
    for _ in range(1000):
        with clock.running():
            pass
    return 1e6 * clock.seconds / 1000


def _sharded(parameters: int, world_size: int) -> nn.Module:
    model = nn.Sequential(*(Scales(parameters) for _ in range(_UNITS)))
    policy = precision_policy(None, None, True)
    mesh = mesh_for("cpu", world_size)
    shard_model(model, mesh, wrap_policy=ModuleWrapPolicy({Scales}), mixed_precision=policy)
    return model


def _run_block(model: nn.Module, around_backward: Callable[[], AbstractContextManager[None]]) -> float:
    """Seconds of processor time of some microbatches."""
    begin = time.thread_time()
    for _ in range(_BLOCK):
        loss = model(torch.ones(8)).sum()
        with around_backward():
            loss.backward()
    return time.thread_time() - begin


def run_engine(options: EngineOptions) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C.

    Raises:
        OptionError: the output folder cannot be written to.
    """
    prepare_output(options.output)
    load = os.getloadavg()[0]
    found: dict[str, Any] = {"python": []}
    with CutShort() as cut:
        for world_size in _RANKS:
            with RankProcesses(world_size, ["benchmarks.engine"]) as ranks:
                for parameters, keeps in itertools.product(_PARAMETERS, (True, False)):
                    taken = ranks.call(engine_python, parameters, keeps, options.rounds)
                    found["python"].append(_python_row(world_size, parameters, keeps, taken))
    print(python_table(found["python"]))
    if found["python"]:
        write_json(options.output / "engine.json", {**found, "machine": machine(load)})
        print(f"files in {options.output}/: engine.json")
    return cut.code


def _python_row(
    ranks: int, parameters: int, keeps: bool, by_rank: Sequence[dict[str, list[float]]]
) -> dict[str, Any]:
    """Microseconds, means over ranks."""
    blocks = zip(*(taken[part] for taken in by_rank for part in _PARTS), strict=True)
    medians = {}
    for name in by_rank[0]:
        median = statistics.median(one for taken in by_rank for one in taken[name])
        medians[name] = median
    whole = median_interval([sum(parts) / ranks for parts in blocks])
    return {"ranks": ranks, "parameters": parameters, "kept": keeps, "microbatch": whole, **medians}


def python_table(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds of the engine's own Python, as Markdown."""
    head = ["ranks", "parameters", "kept", *_PARTS, "per unit and microbatch", "with `fully_shard`"]
    found = []
    for row in rows:
        kept = "no"
        if row["kept"]:
            kept = "yes"
        one = [row["ranks"], row["parameters"], kept]
        one += [f"{row[part]:.1f}" for part in _PARTS]
        low, middle, high = row["microbatch"]
        one.append(f"{middle:.1f} us [{low:.1f}, {high:.1f}]")
        one.append(f"{row['all']:.0f} us")
        one.append(f"{row['settle']:.0f} us")
        found.append(one)
    return markdown([*head, "once per unit and minibatch"], found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.engine``."""
    return command.run("engine", __doc__, EngineOptions, run_engine, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
