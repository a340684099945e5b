"""Where idle time comes from under each strategy.

Note [Where data parallel ranks wait]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
DDP reduces gradients bucket by bucket beside the backward pass, and only the end of ``backward`` waits for all of
them. A rank hands in its last bucket when its last gradient is there; no rank leaves before all have done so. So from
its own last gradient to the last rank's last gradient a rank waits, and what follows is moving bytes. It is one
collective per backward pass in the sense of Note [Waiting inside a collective], entered with the last gradient and
left with the end of ``backward``. Backward passes of batches that only accumulate do not meet and do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc._compat import comms_of
from lightning_odc.callbacks.idle.summary import IdleCause, Meeting
from lightning_odc.callbacks.timeline.spans import COLLECTIVES
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Tracer
from lightning_odc.strategy.odc import ODCStrategy


class Watch:
    """Sees nothing: what is left where a strategy has no door to look in by.

    Attributes:
        complete: whether all the waiting for other ranks that the documentation lists is seen. Without it nothing
            can be said about idle time as a whole.
    """

    complete = False

    def begin_batch(self) -> None:
        """A Lightning batch begins."""

    def before_backward(self) -> None:
        """Lightning's backward pass begins."""

    def after_backward(self) -> None:
        """Lightning's backward pass is over."""

    def waits(self) -> dict[IdleCause, float]:
        """Seconds of waiting since the start that this rank knows alone."""
        return {}

    def take_meetings(self) -> list[Any]:
        """What is known of the collectives of the step that has just ended, for `read`."""
        return []

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        """When this rank entered and left these collectives, in order.

        Args:
            taken: by `take_meetings`.
            wait: for a device that has not come so far; else the answer may be ``None``, not yet.
        """
        return taken

    def release(self) -> None:
        """Leave everything as it was found. Idempotent."""


class GradientWatch(Watch):
    """See Note [Where data parallel ranks wait]. Enters by the public hook after a parameter's gradient.

    On CUDA devices moments are events on the compute stream, read when they have passed, without waiting for them;
    as events of different devices have no common clock, meetings are given as ``(-duration, 0)``.

    Args:
        module: whose parameters.
        device: of this rank.
    """

    complete = True

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._stamp = _CudaStamps() if device.type == "cuda" else _HostStamps()
        self._batch: list[Any] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._see_gradient)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def begin_batch(self) -> None:
        self._batch.clear()

    def before_backward(self) -> None:
        self._stamp.enter()

    def after_backward(self) -> None:
        self._batch.append(self._stamp.leave())

    def take_meetings(self) -> list[Any]:
        batch, self._batch = self._batch, []
        return batch

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        return self._stamp.read(taken, wait)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see_gradient(self, _: Any) -> None:
        self._stamp.enter()


class _HostStamps:
    """Moments of the host's monotonic clock; a later `enter` replaces an earlier one."""

    def __init__(self) -> None:
        self._entered = 0

    def enter(self) -> None:
        self._entered = time.monotonic_ns()

    def leave(self) -> Any:
        return self._entered, time.monotonic_ns()

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        return taken


class _CudaStamps(_HostStamps):
    """Moments of the device's current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._event = torch.cuda.Event(enable_timing=True)

    def enter(self) -> None:
        self._event.record()

    def leave(self) -> Any:
        entered, self._event = self._event, torch.cuda.Event(enable_timing=True)
        left = torch.cuda.Event(enable_timing=True)
        left.record()
        return entered, left

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        for _, left in taken:
            if wait:
                left.synchronize()
            elif not left.query():
                return None
        return [(-round(entered.elapsed_time(left) * 1e6), 0) for entered, left in taken]


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
