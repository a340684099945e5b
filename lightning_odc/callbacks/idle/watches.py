"""What each strategy lets us see of its waiting, and through which door. One body per kind of strategy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule

from lightning_odc._compat import comms_of
from lightning_odc.callbacks.idle.gradients import GradientWatch
from lightning_odc.callbacks.idle.step_numbers import IdleCause, Meeting
from lightning_odc.callbacks.idle.watch import Watch
from lightning_odc.callbacks.timeline.spans import COLLECTIVES
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Tracer
from lightning_odc.strategy.odc import ODCStrategy


class AloneWatch(Watch):
    """One device waits for nobody."""

    complete = True


class EngineWatch(Watch):
    """On demand and in lockstep: the engine's own books, which are always kept.

    Args:
        engine: whose books.
    """

    complete = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def waits(self) -> dict[IdleCause, float]:
        return {IdleCause(cause): seconds for cause, seconds in self._engine.waits.items()}


class MeetingTracer(Tracer):
    """Remembers when this rank entered and left each collective, and nothing else.

    Attributes:
        meetings: since they were last taken.
    """

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.meetings: list[Meeting] = []

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind in COLLECTIVES:
            self.meetings.append((begin, time.monotonic_ns()))

    def take_meetings(self) -> list[Meeting]:
        """The meetings so far; then start anew."""
        meetings, self.meetings = self.meetings, []
        return meetings


class CollectiveWatch(Watch):
    """``ODCStrategy(communication="collective")``: the engine traces every collective of its own.

    Args:
        engine: which traces.
    """

    complete = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tracer = MeetingTracer()
        engine.listen(self._tracer)

    def take_meetings(self) -> list[Meeting]:
        return self._tracer.take_meetings()

    def release(self) -> None:
        self._engine.unlisten(self._tracer)


class TimedComm:
    """A comm object of ``fully_shard`` with its calls timed; what it does is untouched.

    Args:
        comm: does the work.
        meet: told when a call began and ended, and in which process group.
    """

    def __init__(self, comm: Any, meet: Callable[[int, int, Any], None]) -> None:
        self.comm = comm
        self._meet = meet

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.comm.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic_ns()
        try:
            return self.comm(output_tensor, input_tensor, group, *args, **kwargs)
        finally:
            self._meet(begin, time.monotonic_ns(), group)


class ShardedWatch(Watch):
    """``ModelParallelStrategy`` on CPUs: the comm objects of the modules that the user gave to ``fully_shard``.

    Each is put behind a `TimedComm` by the public setter and put back by `release`. A collective among some ranks
    only (tensor parallel, hybrid sharding) cannot be compared over all: then ``complete`` turns false.

    Args:
        model: with the sharded modules.
    """

    def __init__(self, model: Any) -> None:
        self._meetings: list[Meeting] = []
        self._originals: list[tuple[FSDPModule, Any, Any]] = []
        self.complete = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._wrap(module)
        self.complete = self.complete and bool(self._originals)

    def take_meetings(self) -> list[Meeting]:
        meetings, self._meetings = self._meetings, []
        return meetings

    def release(self) -> None:
        for module, gather, reduce_scatter in self._originals:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        self._originals.clear()

    def _wrap(self, module: FSDPModule) -> None:
        comms = comms_of(module)
        if comms is None:
            self.complete = False
            return
        module.set_custom_all_gather(cast(Any, TimedComm(comms[0], self._meet)))
        module.set_custom_reduce_scatter(cast(Any, TimedComm(comms[1], self._meet)))
        self._originals.append((module, *comms))

    def _meet(self, begin: int, end: int, group: Any) -> None:
        if dist.get_world_size(group) == dist.get_world_size():
            self._meetings.append((begin, end))
        else:
            self.complete = False


def watch_for(trainer: pl.Trainer, module: pl.LightningModule) -> Watch:
    """What can be seen under the trainer's strategy, on its devices."""
    strategy, on_cpu = trainer.strategy, trainer.strategy.root_device.type == "cpu"
    if trainer.world_size == 1:
        return AloneWatch()
    if isinstance(strategy, ODCStrategy):
        if strategy.communication != "collective":
            return EngineWatch(strategy.engine)
        return CollectiveWatch(strategy.engine) if on_cpu else Watch()
    if isinstance(strategy, DDPStrategy) and module.automatic_optimization:
        return GradientWatch(module, strategy.root_device)
    if isinstance(strategy, ModelParallelStrategy) and on_cpu and _shards_over_all(strategy):
        return ShardedWatch(strategy.model)
    return Watch()


def _shards_over_all(strategy: ModelParallelStrategy) -> bool:
    """Without tensor parallelism, whose collectives nobody shows."""
    return strategy.device_mesh["data_parallel"].size() == dist.get_world_size()
