"""What the host spends per unit and microbatch: on demand, beside ``fully_shard`` in several settings.

A device computes only as fast as its host asks it to. So the Python of the engine limits the speed of small units, and
one GPU is enough to measure it. A microbatch is timed from its forward pass until ``backward()`` returns, with no wait
for the device; gathers, accumulates and reduce-scatters in it are timed once more by themselves. A second time ends
when the device is idle. Where both are alike, the host was the limit.

NCCL refuses two ranks on one GPU, and in a world of one ``fully_shard`` communicates nothing. So a single GPU shows
``fully_shard`` alone. Several GPUs show it over NCCL, and with the gathers by copy engine that torch has since 2.13:
these two are the baselines of a speed claim.

All settings take turns, each in processes of its own. Where on-demand ranks share a device, they take turns, too.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.harness.processes import Placement, RankFailedError, RankProcesses, place
from benchmarks.harness.results import median_interval
from lightning_odc._compat import comms_of
from lightning_odc.engine.comm import set_comms
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.transports import make_transport
from lightning_odc.protocol.transports.base import process_group_rendezvous, single_process
from lightning_odc.sharding.wrapping import mesh_for, shard_model

ROUNDS = 15
MICROBATCHES = 4
SECONDS = 90.0  # the longest a round may take; in the first one, which is not counted, models are made


@dataclass(frozen=True)
class Shape:
    """A transformer and its microbatch.

    Attributes:
        name: What tables call it.
        layers: The number of layers; each is a unit.
        width: The width of the model.
        batch: Sequences in a microbatch.
        length: Tokens in a sequence.
    """

    name: str
    layers: int
    width: int
    batch: int
    length: int

    def model(self, device: torch.device) -> nn.Module:
        """Layers of 12 parameters each, and a norm, which is the root unit."""
        with device:
            layers = []
            for _ in range(self.layers):
                layer = nn.TransformerEncoderLayer(
                    self.width,
                    max(self.width // 128, 1),
                    4 * self.width,
                    0.0,
                    batch_first=True,
                    norm_first=True,
                )
                layers.append(layer)
            return nn.Sequential(*layers, nn.LayerNorm(self.width))


SHAPES = (Shape("tiny layers", 24, 64, 1, 8), Shape("1 billion parameters", 20, 2048, 4, 128))
#: It keeps GPUs busy, so on several of them it compares speed. Ranks that share one would only compare their turns.
BUSY = Shape("1 billion parameters, busy GPUs", 20, 2048, 4, 2048)


class Way(StrEnum):
    """A way to move parameters and gradients."""

    ON_DEMAND = "on demand"
    KEPT = "on demand, units stay gathered"
    ALONE = "`fully_shard`, one rank: communicates nothing"
    STOCK = "`fully_shard` over NCCL"
    COPY_ENGINE = "`fully_shard` over NCCL, gathers by copy engine"

    @property
    def is_on_demand(self) -> bool:
        """Whether our engine moves them."""
        return self in (Way.ON_DEMAND, Way.KEPT)


@dataclass(frozen=True)
class Setting:
    """One way to run one shape.

    Attributes:
        way: The way.
        shape: The model and its microbatch.
        placement: The devices of its processes.
        world: The number of ranks among which units are sharded.
    """

    way: Way
    shape: Shape
    placement: Placement
    world: int

    @property
    def takes_turns(self) -> bool:
        """Whether one rank runs at a time. Ranks of collectives wait for each other, so they cannot."""
        return self.way.is_on_demand and self.placement.gpus < self.placement.ranks

    def why_not(self) -> str:
        """Why it cannot be measured on this machine; empty if it can."""
        if self.way is Way.COPY_ENGINE and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
            return f"needs torch 2.13 or newer, this is {torch.__version__}"
        if self.way is Way.COPY_ENGINE and not self.placement.gpus:
            return "needs GPUs"
        if self.way in (Way.STOCK, Way.COPY_ENGINE) and self.placement.shares:
            return "needs two GPUs: NCCL refuses ranks that share one"
        return ""

    def start(self) -> RankProcesses:
        """Its processes."""
        backend = "gloo"
        if self.way in (Way.ALONE, Way.STOCK, Way.COPY_ENGINE):
            backend = self.placement.backend
        return RankProcesses(self.placement.ranks, [__name__], partial(_prepare, self), backend)


def settings(shape: Shape, device: str = "cuda") -> list[Setting]:
    """All settings for this machine; some of them have a reason why they cannot run here.

    Args:
        shape: The model and its microbatch.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal, in which gloo takes the place of NCCL.
    """
    gpus = 0
    if device == "cuda":
        gpus = torch.cuda.device_count()
    several = place(device, max(gpus, 2))
    found = []
    for way in Way:
        placement = several
        if way is Way.ALONE:
            placement = place(device, 1)
        setting = Setting(way, shape, placement, placement.ranks)
        found.append(setting)
    return found


def compare(shape: Shape, device: str = "cuda") -> dict[str, Any]:
    """One entry of the results: medians of all settings, or why one has none. Settings take turns in every round.

    Args:
        shape: The model and its microbatch.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal.
    """
    everything = settings(shape, device)
    missing = {}
    for setting in everything:
        reason = setting.why_not()
        if reason:
            missing[setting] = reason
    with ExitStack() as stack:
        running = {}
        for setting in everything:
            if setting not in missing:
                running[setting] = stack.enter_context(setting.start())
        rounds = [_round(number, running, missing) for number in range(ROUNDS + 1)]
        for setting, ranks in running.items():
            with suppress(RankFailedError):  # all times are known
                _call(ranks, finish, setting)
    rows = []
    for setting in everything:
        timed = [one[setting] for one in rounds[1:] if setting in one]
        row = _row(setting, timed, missing.get(setting, ""))
        rows.append(row)
    return {"shape": asdict(shape), "device": device, "rounds": ROUNDS, "rows": rows}


def _round(
    number: int, running: dict[Setting, RankProcesses], missing: dict[Setting, str]
) -> dict[Setting, dict[str, float]]:
    """The times of every setting, in another order in every round. One that fails leaves ``running``."""
    begin = number % max(len(running), 1)
    order = [*running]
    order = order[begin:] + order[:begin]
    found = {}
    for setting in order:
        try:
            found[setting] = _call(running[setting], time_block, setting)
        except RankFailedError as error:
            print(f"{setting.way}: {error}\n{error.details}", file=sys.stderr, flush=True)
            missing[setting] = str(error)
            running.pop(setting).kill()
    return found


def _call(ranks: RankProcesses, function: Callable[..., Any], setting: Setting) -> dict[str, float]:
    """The means over the ranks of what they return. Ranks that take too long are ended."""
    late = threading.Event()

    def end() -> None:
        late.set()
        for pid in ranks.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(SECONDS, end)
    timer.start()
    try:
        by_rank: list[dict[str, float]] = ranks.call(function, setting)
    except RankFailedError as error:
        if late.is_set():
            reason = f"no answer within {SECONDS:.0f} s"
        else:
            reason = str(error)
        raise RankFailedError(reason, error.details) from error
    finally:
        timer.cancel()
    return {name: statistics.fmean(one[name] for one in by_rank) for name in by_rank[0]}


def _row(setting: Setting, rounds: list[dict[str, float]], missing: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "way": str(setting.way),
        "processes": setting.placement.ranks,
        "world": setting.world,
    }
    if missing:
        return {**row, "missing": missing}
    for name in rounds[0]:
        row[name] = median_interval([times[name] for times in rounds])
    return row


# -- on the ranks ---------------------------------------------------------------------------------------------


def _prepare(setting: Setting, rank: int) -> None:
    """Before the process group is made."""
    setting.placement.enter(rank)
    if setting.way is Way.COPY_ENGINE:
        os.environ["NCCL_CTA_POLICY"] = "2"  # no multiprocessor works for NCCL where a copy engine can


def time_block(rank: int, world_size: int, setting: Setting) -> dict[str, float]:
    """What one minibatch of some microbatches took on this rank.

    Returns:
        ``"host us"``, ``"comm us"``, ``"calls"``: per unit and microbatch, until the host was done, of which in calls
        that communicate, and the number of these calls; ``"minibatch us"``: per unit, for what the engine does at the
        end of the minibatch; ``"host ms"``, ``"device ms"``: per microbatch, until the host and the device were done.
    """
    subject = _subject(setting, rank)
    times = {}
    if setting.takes_turns:
        for turn in range(world_size):
            subject.meet(None)
            if turn == rank:
                times = subject.run()
    else:
        subject.meet(None)
        times = subject.run()
    subject.meet(None)
    return {**times, "minibatch us": subject.end_minibatch()}


def finish(rank: int, _: int, setting: Setting) -> dict[str, float]:
    """Close what `time_block` has opened."""
    subject = _subject(setting, rank)
    subject.meet(None)
    subject.close()
    return {}


@cache
def _subject(setting: Setting, rank: int) -> Subject:
    """What this process times in every round."""
    return Subject(setting, rank)


class Subject:
    """A sharded model and a microbatch for it, in one process of a setting.

    Attributes:
        meet: Waits for the other processes of the setting.

    Args:
        setting: The setting.
        rank: The rank of this process.
    """

    def __init__(self, setting: Setting, rank: int) -> None:
        way = setting.way
        shape = setting.shape
        world = setting.world
        torch.set_num_threads(1)  # in a rehearsal; on a GPU the host computes nothing
        self._device = setting.placement.devices[rank]
        single = setting.placement.ranks == 1
        self.meet = process_group_rendezvous(dist.group.WORLD)
        if single:
            self.meet = single_process
        self._model = shape.model(self._device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        units = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        mesh = mesh_for(self._device.type, world)
        shard_model(self._model, mesh, wrap_policy=units, mixed_precision=policy)
        if way is Way.COPY_ENGINE:
            for module in _units(self._model):
                module.set_symm_mem_for_comm()
        self._engine = None
        if way.is_on_demand:
            self._engine = _attached(setting, rank, self.meet, self._model, self._device)
        self._clock = Clock()
        for module in _units(self._model):
            comms = comms_of(module)
            assert comms is not None
            gather = Timed(comms[0], self._clock)
            reduce = Timed(comms[1], self._clock)
            set_comms([module], gather, reduce)
        self._batch = torch.randn(shape.batch, shape.length, shape.width, device=self._device)
        self._parts = len(_units(self._model)) * MICROBATCHES

    def run(self) -> dict[str, float]:
        """Run the microbatches of a minibatch; returns times, as `time_block` names them."""
        self._synchronize()
        self._clock.seconds = 0.0
        self._clock.calls = 0
        begin = time.perf_counter()
        for index in range(MICROBATCHES):
            output = self._model(self._batch)
            loss = output.float().square().mean()
            with self._backward(more=index + 1 < MICROBATCHES):
                loss.backward()
        host = time.perf_counter() - begin
        self._synchronize()
        device = time.perf_counter() - begin
        host_us = 1e6 * host / self._parts
        comm_us = 1e6 * self._clock.seconds / self._parts
        calls = self._clock.calls / self._parts
        host_ms = 1e3 * host / MICROBATCHES
        device_ms = 1e3 * device / MICROBATCHES
        return {
            "host us": host_us,
            "comm us": comm_us,
            "calls": calls,
            "host ms": host_ms,
            "device ms": device_ms,
        }

    @contextmanager
    def _backward(self, more: bool) -> Iterator[None]:
        if self._engine is None:
            yield
            return
        self._engine.ledger.add(1.0)
        with self._engine.backward(more=more):
            yield

    def end_minibatch(self) -> float:
        """Throw the gradients away; returns the microseconds per unit of settling and publishing."""
        begin = time.perf_counter()
        if self._engine is not None:
            assert self._engine.traffic.reads, "the one-sided path was not taken"
            self._engine.settle([])
        settled = time.perf_counter()
        self._model.zero_grad()
        emptied = time.perf_counter()
        if self._engine is not None:
            self._engine.publish()
        seconds = time.perf_counter() - emptied + settled - begin
        return 1e6 * seconds / len(_units(self._model))

    def close(self) -> None:
        """Give the windows back."""
        if self._engine is not None:
            self._engine.exchange("end", None)
            self._engine.close()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _attached(
    setting: Setting, rank: int, meet: Callable[[Any], list[Any]], model: nn.Module, device: torch.device
) -> OnDemandEngine:
    budget = 0
    if setting.way is Way.KEPT:
        budget = 2**62
    gather_cache = GatherCache(budget, HostMemory(setting.world))
    engine = OnDemandEngine(
        lambda: make_transport(device, rank, setting.world, meet, dist.group.WORLD),
        meet,
        timeout=SECONDS,
        gather_cache=gather_cache,
    )
    engine.attach(model)
    return engine


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Clock:
    """Adds up seconds and calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0


class Timed:
    """A comm object whose calls are timed.

    Args:
        comm: The comm object.
        clock: Where the times go.
    """

    def __init__(self, comm: Any, clock: Clock) -> None:
        self.allocate = comm.allocate  # copy engines need memory of their own
        self._comm = comm
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the comm object."""
        begin = time.perf_counter()
        try:
            return self._comm(*args, **kwargs)
        finally:
            self._clock.seconds += time.perf_counter() - begin
            self._clock.calls += 1
