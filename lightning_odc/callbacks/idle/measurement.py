"""Turn waits and batches into the idle time of every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.idle.channels import Channel, Round
from lightning_odc.callbacks.idle.sampling import CudaProfile, SampledWatch
from lightning_odc.callbacks.idle.sources import (
    CollectiveWatch,
    DataClock,
    GradientWatch,
    GroupWatch,
    ShardedWatch,
    StreamWaits,
    StreamWatch,
    Watch,
    compute_stream,
)
from lightning_odc.callbacks.idle.summary import (
    UNKNOWN,
    IdleCause,
    IdleSummary,
    StepNumbers,
    add_seconds,
    resolve,
)
from lightning_odc.callbacks.timeline.spans import Passage, machine
from lightning_odc.data.minibatch import microbatches_of, real_token_count, sample_count, token_count
from lightning_odc.strategy.odc import ODCStrategy

_FEW = 64  # numbers that a rank can send per step
_MANY = 12288  # the same, where every single collective is sent
_PER_BATCH = 3  # more of them for every batch of a step: Lightning's broadcast before it


def watch_for(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    waits: StreamWaits | None,  # those of a device that runs ahead of its host
    channel: Channel | None = None,  # by which ranks agree; needed with ``waits``
) -> Watch:
    """What can be seen under the trainer's strategy, on its devices. All ranks together."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return Watch(complete=True)  # one device waits for nothing but data
    if isinstance(strategy, DDPStrategy) and module.automatic_optimization:
        return GradientWatch(module, strategy.root_device)
    if _on_demand(strategy):
        return _watch_on_demand(strategy, waits)
    if waits is None:  # where the host's time is the device's
        if _on_cpu(strategy) and _meets_all(strategy):
            if isinstance(strategy, ODCStrategy):
                return CollectiveWatch(strategy.engine)
            if isinstance(strategy, ModelParallelStrategy):
                assert strategy.model is not None
                return ShardedWatch(strategy.model)
        return Watch(complete=False)
    if isinstance(cast(Any, trainer).profiler, PyTorchProfiler):
        return Watch(complete=False, why="the trainer's own profiler runs, and there can be one at a time")
    # Collectives of gloo are copies and waits of the host, not kernels.
    comparable = _meets_all(strategy) and "cuda:nccl" in dist.get_backend_config()
    assert channel is not None
    profile = CudaProfile(strategy.root_device, waits.stream.mark)
    return SampledWatch(waits, profile, channel.agree, comparable)


def _watch_on_demand(strategy: ODCStrategy, waits: StreamWaits | None) -> Watch:
    engine = strategy.engine
    sample_group = strategy.attached.sample_group
    if sample_group is not None:
        if _on_cpu(strategy):
            return GroupWatch(engine, sample_group)
        return Watch(complete=False, engine=engine, why="waits within a group are measured on CPUs")
    if waits is None:
        return Watch(complete=True, engine=engine)
    return StreamWatch(engine, waits)


def _on_cpu(strategy: Strategy) -> bool:
    return strategy.root_device.type == "cpu"


def _on_demand(strategy: Strategy) -> TypeGuard[ODCStrategy]:
    """Whether ranks wait for each other in the engine alone: on demand."""
    return isinstance(strategy, ODCStrategy) and strategy.communication != "collective"


def _group_size(strategy: Strategy) -> int:
    """The number of ranks that compute one sample together."""
    if isinstance(strategy, ODCStrategy):
        return strategy.options.group_size
    return 1


def _meets_all(strategy: Strategy) -> bool:
    """Whether every collective is one of all ranks: no tensor parallelism, no hybrid sharding."""
    if isinstance(strategy, ModelParallelStrategy):
        data_parallel = strategy.device_mesh["data_parallel"]
        return data_parallel.size() == dist.get_world_size()
    if isinstance(strategy, FSDPStrategy) and "HYBRID" in strategy.sharding_strategy.name:
        return False
    return _group_size(strategy) == 1


def _channel_for(trainer: pl.Trainer) -> Channel:
    strategy = trainer.strategy
    most_batches = trainer.accumulate_grad_batches
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            most_batches = max([most_batches, *callback.scheduling.values()])
    capacity = _FEW
    # On CPUs, these two have a watch that reports every collective.
    if _on_cpu(strategy) and isinstance(strategy, ODCStrategy | ModelParallelStrategy):
        capacity = _MANY
    return Channel(trainer.world_size, capacity + _PER_BATCH * most_batches)


class StepMeter:
    """Measures from one optimizer step to the next by the monotonic clock. Stands still at first."""

    def __init__(self, waits: Callable[[], dict[IdleCause, float]]) -> None:
        self._waits = waits
        self.running = False  # whether time counts
        self._began = 0.0
        self._waited: dict[IdleCause, float] = {}
        self._step = StepNumbers(0.0)

    def resume(self) -> None:
        """Count time from now on. Idempotent."""
        if not self.running:
            self.running = True
            self._began = time.monotonic()
            self._waited = self._waits()

    def pause(self) -> None:
        """Time does not count until `resume`. Idempotent."""
        if self.running:
            self.running = False
            self._step.seconds += time.monotonic() - self._began
            since = {
                cause: seconds - self._waited.get(cause, 0.0) for cause, seconds in self._waits().items()
            }
            add_seconds(self._step.waits, since)

    def count(self, batch: Any) -> None:
        """A microbatch begins, or all of a rank's minibatch at once; ``None`` is no batch."""
        if self.running and batch is not None:
            self._step.microbatches += len(microbatches_of(batch))
            self._step.samples += _or_unknown(sample_count(batch))
            self._step.tokens += _or_unknown(token_count(batch))
            self._step.real_tokens += _or_unknown(real_token_count(batch))

    def end_step(self) -> StepNumbers:
        """The numbers of the step that ends now; the next one begins."""
        self.pause()
        step, self._step = self._step, StepNumbers(0.0)
        self.resume()
        return step


def _or_unknown(count: Any) -> Any:
    if count is None:
        return UNKNOWN
    return count


def on_outermost_calls(module: nn.Module, seen: Callable[[Any], None]) -> list[RemovableHandle]:
    """Report every outermost call of a module: its first argument, or ``None`` if it has keywords alone."""
    depth = 0  # a ``training_step`` that calls ``self(batch)`` is still one microbatch

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            batch = None
            if inputs:
                batch = inputs[0]
            seen(batch)

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    entering = module.register_forward_pre_hook(enter)
    leaving = module.register_forward_hook(leave, always_call=True)
    return [entering, leaving]


@dataclass
class _Step:
    """An optimizer step of this rank that not all ranks are known to have measured."""

    number: int
    numbers: StepNumbers
    meetings: list[Any]  # those of its watch, which a device may not have passed yet
    counted: Any = None  # the event by which a device has counted its tokens
    sent: Round | None = None  # its numbers, on their way between the ranks


class IdleMeasurement:
    """Measures steps on this rank and learns every other rank's. Begin it on all ranks together."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._channel = _channel_for(trainer)
        self._stream_waits: StreamWaits | None = None
        stream = compute_stream(strategy.root_device)
        if stream is not None:
            self._stream_waits = StreamWaits(stream)
        self.watch = watch_for(trainer, module, self._stream_waits, self._channel)
        self.recent = IdleSummary()  # of the steps since it was last taken
        self.epoch = IdleSummary()
        self._group_size = _group_size(strategy)
        self._comparable = True
        self._global_step = trainer.global_step
        self._steps: deque[_Step] = deque()  # whose numbers have not come from all ranks
        self._broadcasts: list[Passage] = []
        self._in_batch = False
        self._meter = StepMeter(self._waits)
        loop: Any = trainer
        self._data = DataClock(
            loop.profiler,
            on_fetch=self._see_gap,
            waited=lambda: sum(self.watch.waits().values()),
            waits=self._stream_waits,
        )
        loop.profiler = self._data
        self._calls: list[RemovableHandle] = []  # without them, a Lightning batch is a microbatch
        if isinstance(strategy, ODCStrategy):
            assert strategy.model is not None
            self._calls = on_outermost_calls(strategy.model, self._meter.count)
        clock: str | None = None
        if _on_cpu(strategy):
            clock = machine()
        clocks = set(self._channel.agree(clock))
        self._common_clock = len(clocks) == 1 and clock is not None

    @property
    def complete(self) -> bool:
        """Whether all waiting for other ranks has been seen so far."""
        return self.watch.complete and self._comparable

    def begin_batch(self, batch: Any) -> None:
        """A Lightning batch begins."""
        self._in_batch = True
        if self._stream_waits is not None:
            self._stream_waits.stream.follow()
        self._resume()
        self.watch.begin_batch()
        if not self._calls:
            self._meter.count(batch)

    def end_batch(self, global_step: int) -> bool:
        """A Lightning batch ends; returns whether an optimizer step ends with it."""
        self._in_batch = False
        self.watch.end_batch()
        if global_step == self._global_step:
            return False
        self._global_step = global_step
        numbers = self._meter.end_step()
        numbers.seen = not self.watch.samples
        numbers.broadcasts, self._broadcasts = self._broadcasts, []
        if self._stream_waits is not None:
            numbers.waits |= self._stream_waits.take()
        step = _Step(global_step - 1, numbers, self.watch.take_meetings())
        self._steps.append(step)
        if isinstance(numbers.real_tokens, Tensor) and self._stream_waits is not None:
            numbers.real_tokens = numbers.real_tokens.to("cpu", non_blocking=True)
            step.counted = self._stream_waits.stream.mark()
        if self.watch.samples:  # all ranks together; this takes time, which counts in no step
            self._meter.pause()
            self.watch.end_step(numbers)
            self._meter.resume()
        return True

    def pause(self) -> None:
        """What comes now is not training; the next fetching of a training batch is. All ranks together."""
        self._meter.pause()
        self._count_waits(False)
        self.watch.interrupt()

    def receive(self, wait: bool = False) -> Iterator[int]:
        """Send what there is; yields the number of each step that is known of all ranks now.

        With ``wait`` these are all steps. All ranks together.
        """
        for step in self._steps:
            if step.sent is None and not self._send(step, wait):
                break
        while self._steps:
            sent = self._steps[0].sent
            if sent is None or not (wait or sent.has_come):
                break
            ranks = sent.by_rank()
            self._comparable = resolve(ranks, self._common_clock, self._group_size) and self._comparable
            self.recent.add(ranks)
            self.epoch.add(ranks)
            yield self._steps.popleft().number

    def release(self, trainer: pl.Trainer) -> None:
        """Leave everything as it was found."""
        self._data.remove(trainer)
        self.watch.release()
        self._channel.close()
        for handle in self._calls:
            handle.remove()

    def values(self, summary: IdleSummary, per_rank: bool) -> dict[str, float]:
        """What `recent` or `epoch` amounts to."""
        return summary.values(self.complete, per_rank, self._group_size)

    def _send(self, step: _Step, wait: bool) -> bool:
        """Send the numbers of a step, if its device has passed it."""
        if step.counted is not None and not wait and not step.counted.query():
            return False
        meetings = self.watch.read(step.meetings, wait)
        if meetings is None:
            return False
        step.numbers.meetings = meetings
        if len(step.numbers.to_floats()) > self._channel.capacity:
            step.numbers.meetings = []
            step.numbers.broadcasts = []
            self._comparable = False
        step.sent = self._channel.send(step.numbers)
        return True

    def _see_gap(self, gap: Passage) -> None:
        """The next batch is fetched. Between two batches is Lightning's broadcast: see `DataClock`."""
        if self._meter.running and not self._in_batch:
            self._broadcasts.append(gap)
        self._resume()

    def _resume(self) -> None:
        self._meter.resume()
        self._count_waits(True)

    def _count_waits(self, counting: bool) -> None:
        self.watch.counting = counting
        if self._stream_waits is not None:
            self._stream_waits.counting = counting

    def _waits(self) -> dict[IdleCause, float]:
        waits = self.watch.waits()
        if self._data.seen and self._stream_waits is None:
            waits[IdleCause.DATA] = self._data.seconds
        return waits
