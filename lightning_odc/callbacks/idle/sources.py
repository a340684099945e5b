"""The sources of idle time: which watch sees the waiting under each strategy, and what waits for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler, PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc._compat import comms_of
from lightning_odc._compat_lightning import FETCH_ACTION
from lightning_odc.callbacks.idle.sampling import sampled_watch
from lightning_odc.callbacks.idle.stream_waits import StreamWaits, StreamWatch
from lightning_odc.callbacks.idle.summary import IdleCause
from lightning_odc.callbacks.idle.watch import Watch
from lightning_odc.callbacks.timeline.clocks import Passage
from lightning_odc.callbacks.timeline.spans import COLLECTIVES
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Tracer
from lightning_odc.strategy.odc import ODCStrategy


class GradientWatch(Watch):
    """DDP: where data parallel ranks wait. Enters by the public hook after a parameter's gradient."""

    # DDP reduces gradients bucket by bucket beside the backward pass, and only the end of ``backward`` waits
    # for all of them. A rank hands in its last bucket when its last gradient is there; no rank leaves before
    # all have done so. So from its own last gradient to the last rank's last gradient a rank waits, and what
    # follows is moving bytes. It is one collective per backward pass in the sense of Note [Waiting inside a
    # collective], entered with the last gradient and left with the end of ``backward``. Backward passes of
    # batches that only accumulate do not meet and do not count.
    # On CUDA devices moments are events on the compute stream, read when they have passed, without waiting for
    # them; as events of different devices have no common clock, meetings are given as ``(-duration, 0)``.

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(complete=True)
        self._stamp = _CudaStamps() if device.type == "cuda" else _HostStamps()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: self._stamp.enter())
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def begin_batch(self) -> None:
        self._meetings.clear()

    def before_backward(self) -> None:
        self._stamp.enter()

    def after_backward(self) -> None:
        self._meetings.append(self._stamp.leave())

    def read(self, taken: list[Any], wait: bool) -> list[Passage] | None:
        return self._stamp.read(taken, wait)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _HostStamps:
    """Moments of the host's monotonic clock; a later `enter` replaces an earlier one."""

    def __init__(self) -> None:
        self._entered = 0

    def enter(self) -> None:
        self._entered = time.monotonic_ns()

    def leave(self) -> Any:
        return Passage(self._entered, time.monotonic_ns())

    def read(self, taken: list[Any], wait: bool) -> list[Passage] | None:
        return taken


class _CudaStamps(_HostStamps):
    """Moments of the device's current stream."""

    def __init__(self, new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        super().__init__()
        self._new_event = new_event
        self._event = new_event()

    def enter(self) -> None:
        self._event.record()

    def leave(self) -> Any:
        entered, self._event = self._event, self._new_event()
        left = self._new_event()
        left.record()
        return entered, left

    def read(self, taken: list[Any], wait: bool) -> list[Passage] | None:
        for _, left in taken:
            if wait:
                left.synchronize()
            elif not left.query():
                return None
        return [Passage(-round(entered.elapsed_time(left) * 1e6), 0) for entered, left in taken]


class MeetingTracer(Tracer):
    """Tells when this rank entered and left each collective, and nothing else."""

    def __init__(self, meet: Callable[[Passage], None]) -> None:
        super().__init__(capacity=0)
        self._meet = meet

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind in COLLECTIVES:
            self._meet(Passage(begin, time.monotonic_ns()))


class CollectiveWatch(Watch):
    """``ODCStrategy(communication="collective")``: the engine traces every collective of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(complete=True)
        self._traced = engine
        self._tracer = MeetingTracer(lambda passage: self._meetings.append(passage))
        engine.listen(self._tracer)

    def release(self) -> None:
        self._traced.unlisten(self._tracer)


class TimedComm:
    """A comm object of ``fully_shard`` with its calls timed; what it does is untouched."""

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
    """``ModelParallelStrategy`` on CPUs: the comm objects of the modules that the user gave to ``fully_shard``."""

    # Each is put behind a `TimedComm` by the public setter and put back by `release`. A collective among some
    # ranks only (tensor parallel, hybrid sharding) cannot be compared over all: then ``complete`` turns false.

    def __init__(self, model: Any) -> None:
        super().__init__(complete=True)
        self._originals: list[tuple[FSDPModule, Any, Any]] = []
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            comms = comms_of(module)
            if comms is None:
                self.complete = False
                continue
            module.set_custom_all_gather(cast(Any, TimedComm(comms[0], self._meet)))
            module.set_custom_reduce_scatter(cast(Any, TimedComm(comms[1], self._meet)))
            self._originals.append((module, *comms))
        self.complete = self.complete and bool(self._originals)

    def release(self) -> None:
        for module, gather, reduce_scatter in self._originals:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        self._originals.clear()

    def _meet(self, begin: int, end: int, group: Any) -> None:
        if dist.get_world_size(group) == dist.get_world_size():
            self._meetings.append(Passage(begin, end))
        else:
            self.complete = False


def watch_for(trainer: pl.Trainer, module: pl.LightningModule, waits: StreamWaits | None) -> Watch:
    """What can be seen under the trainer's strategy, on its devices. All ranks together."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return Watch(complete=True)  # one device waits for nothing but data
    if isinstance(strategy, DDPStrategy) and module.automatic_optimization:
        return GradientWatch(module, strategy.root_device)
    on_demand = isinstance(strategy, ODCStrategy) and strategy.communication != "collective"
    if waits is None:
        return _watch_by_host(strategy, on_demand)
    if on_demand:
        return StreamWatch(cast(ODCStrategy, strategy).engine, waits)
    if isinstance(cast(Any, trainer).profiler, PyTorchProfiler):
        return Watch(complete=False, why="the trainer's own profiler runs, and there can be one at a time")
    # Collectives of gloo are copies and waits of the host, not kernels.
    comparable = _meets_all(strategy) and "cuda:nccl" in dist.get_backend_config()
    return sampled_watch(strategy.root_device, waits, comparable)


def _watch_by_host(strategy: Any, on_demand: bool) -> Watch:
    """Choose a watch for CPU ranks, where the host's time is the device's."""
    on_cpu = strategy.root_device.type == "cpu"
    if isinstance(strategy, ODCStrategy) and (on_demand or on_cpu):
        return Watch(complete=True, engine=strategy.engine) if on_demand else CollectiveWatch(strategy.engine)
    if isinstance(strategy, ModelParallelStrategy) and on_cpu and _meets_all(strategy):
        return ShardedWatch(strategy.model)
    return Watch(complete=False)


def _meets_all(strategy: Any) -> bool:
    """Whether every collective is one of all ranks: no tensor parallelism, no hybrid sharding."""
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].size() == dist.get_world_size()
    return not (isinstance(strategy, FSDPStrategy) and "HYBRID" in strategy.sharding_strategy.name)


class DataClock(Profiler):
    """Wraps the trainer's profiler, passes everything on, and times the gap between two batches."""

    # Lightning tells its profiler about every hook it calls, and when the training loop asks the loader for a
    # batch and has got it. The fetching is waiting for data, and nothing else lies in it.
    # Right before it fetches a batch, Lightning's training loop (2.6) broadcasts from rank 0 whether the job
    # was told to end. A rank that comes before rank 0 waits there, which no hook shows. The wait lies in the
    # gap between the last profiled hook of a batch and the next fetching, and beside it the gap has only what
    # the rank logs. So a rank waits for rank 0 from its own begin of the gap to rank 0's begin, up to the time
    # that it takes to log.

    def __init__(
        self,
        inner: Profiler,  # the trainer's own profiler
        # Called before a batch is fetched, with that gap: the end of the last profiled action, and the present.
        on_fetch: Callable[[int, int], None],
        # Seconds of waiting for other ranks so far. A loader that plans with them does so while it fetches.
        waited: Callable[[], float],
        waits: StreamWaits | None = None,  # for a device that runs ahead of its host
    ) -> None:
        super().__init__()
        self.seconds = 0.0  # seconds spent fetching so far, without what ``waited`` counts
        self.seen = False  # whether a batch was ever fetched
        self._inner = inner
        self._on_fetch = on_fetch
        self._waited = waited
        self._waited_before = 0.0
        self._waits = waits
        self._last = self._began = 0

    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._began, self._waited_before = time.monotonic_ns(), self._waited()
            self._on_fetch(self._last, self._began)
            if self._waits is not None:
                self._waits.enter(IdleCause.DATA)

    def stop(self, action_name: str) -> None:
        self._last = time.monotonic_ns()
        if self._began and action_name.endswith(FETCH_ACTION):
            self.seconds += (self._last - self._began) / 1e9 - (self._waited() - self._waited_before)
            self._began, self.seen = 0, True
            if self._waits is not None:
                self._waits.causes.add(IdleCause.DATA)
                self._waits.leave()
        self._inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        with self._inner.profile(action_name):
            yield action_name
        self._last = time.monotonic_ns()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self._inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        return self._inner.summary()

    def describe(self) -> None:
        self._inner.describe()

    def __del__(self) -> None:
        """Nothing to release: the inner profiler releases what is its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def remove(self, trainer: Any) -> None:
        """Give the place back. Idempotent."""
        if trainer.profiler is self:
            trainer.profiler = self._inner
