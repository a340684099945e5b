"""Turn waits and batches into the idle time of every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.cuda import Event as CudaEvent
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.idle.channels import Channel
from lightning_odc.callbacks.idle.sampling import CudaProfile, SampledWatch
from lightning_odc.callbacks.idle.sources import (
    CollectiveWatch,
    DataClock,
    GradientWatch,
    GroupWatch,
    ShardedWatch,
    StreamWait,
    StreamWaits,
    StreamWatch,
    Watch,
    compute_stream,
)
from lightning_odc.callbacks.idle.summary import (
    UNKNOWN,
    IdleCause,
    IdleSummary,
    Logged,
    StepNumbers,
    add_seconds,
    resolve,
)
from lightning_odc.callbacks.timeline.spans import Passage
from lightning_odc.data.minibatch import (
    MicrobatchFacts,
    microbatches_of,
    real_token_count,
    sample_count,
    token_count,
)
from lightning_odc.engine.gather_cache import CudaMemory, HostMemory, Memory
from lightning_odc.protocol.transports.host import boot_id
from lightning_odc.strategy.odc import ODCStrategy


def watch_for(
    trainer: Trainer,
    module: LightningModule,
    waits: StreamWaits | None,
    channel: Channel | None = None,
) -> Watch:
    """What can be seen under the trainer's strategy, on its devices. All ranks together.

    Args:
        trainer: It has been set up.
        module: What it trains.
        waits: Those of a device that runs ahead of its host.
        channel: What ranks agree by; needed with ``waits``.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return Watch(complete=True)  # one device waits for nothing but data
    if isinstance(strategy, DDPStrategy) and module.automatic_optimization:
        stream = None
        if waits is not None:
            stream = waits.stream
        return GradientWatch(module, stream)
    if isinstance(strategy, ODCStrategy) and strategy.communication != "collective":
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
    mark = waits.stream.mark
    profile = CudaProfile(strategy.root_device, mark)
    return SampledWatch(mark, profile, channel.agree, comparable)


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

    def count(self, batch: Any, facts: MicrobatchFacts | None = None) -> None:
        """A microbatch begins, or all of a rank's minibatch at once; ``None`` is no batch."""
        if self.running and batch is not None:
            self._step.microbatches += len(microbatches_of(batch))
            self._step.samples += _or_unknown(sample_count(batch))
            self._step.tokens += _or_unknown(token_count(batch))
            self._step.real_tokens += _or_unknown(real_token_count(batch, facts))

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
            seen(next(iter(inputs), None))

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    entering = module.register_forward_pre_hook(enter)
    leaving = module.register_forward_hook(leave, always_call=True)
    return [entering, leaving]


@dataclass
class _Step:
    """An optimizer step of this rank, of which its device may still have to do a part."""

    numbers: StepNumbers
    waits: list[StreamWait]  # of its host, on the stream of the device
    passed: CudaEvent | None  # the end of the step on that stream


class IdleMeasurement:
    """Measures steps on this rank and learns every other rank's. Begin it on all ranks together."""

    def __init__(self, trainer: Trainer, module: LightningModule, interval: int) -> None:
        strategy = trainer.strategy
        self._channel = Channel(trainer.world_size)
        self._stream_waits: StreamWaits | None = None
        self._memory: Memory = HostMemory(1)
        stream = compute_stream(strategy.root_device)
        if stream is not None:
            self._stream_waits = StreamWaits(stream)
            self._memory = CudaMemory(strategy.root_device)
        self.watch = watch_for(trainer, module, self._stream_waits, self._channel)
        self.recent = IdleSummary()  # of the steps since it was last taken
        self.epoch = IdleSummary()
        self._group_size = _group_size(strategy)
        self._comparable = True
        self._global_step = trainer.global_step
        self._interval = interval  # steps in a message
        self._due = interval  # steps until the next one
        self._steps: list[_Step] = []  # of the next one
        self._sent: deque[Future[list[list[StepNumbers]]]] = deque()
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
            self._calls = on_outermost_calls(
                strategy.model, lambda batch: self._meter.count(batch, strategy.facts_of(batch))
            )
        clocks = set(self._channel.agree(boot_id()))
        self._common_clock = len(clocks) == 1 and _on_cpu(strategy)

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
        numbers.number = global_step - 1
        numbers.peak_memory = self._memory.peak()
        numbers.meetings = self.watch.take_meetings()
        numbers.broadcasts, self._broadcasts = self._broadcasts, []
        numbers.seen = not self.watch.samples
        if self.watch.samples:  # all ranks together; this takes time, which counts in no step
            self._meter.pause()
            self.watch.end_step(numbers)
            self._meter.resume()
        step = _Step(numbers, [], None)
        if self._stream_waits is not None:
            step.waits = self._stream_waits.take()
            step.passed = self._stream_waits.stream.mark()
            numbers.waits |= dict.fromkeys(self._stream_waits.causes, 0.0)
        self._steps.append(step)
        self._due -= 1
        return True

    def pause(self) -> None:
        """What comes now is not training; the next fetching of a training batch is. All ranks together."""
        self._meter.pause()
        self._count_waits(False)
        self.watch.interrupt()

    def receive(self, wait: bool = False) -> Iterator[int]:
        """Send what is due; yields the number of each step that is known of all ranks now.

        With ``wait`` these are all steps. All ranks together.
        """
        if self._steps and (wait or self._due <= 0):
            finished = partial(self._finished, self._steps)
            self._sent.append(self._channel.send(finished))
            self._steps = []
            if self._due <= 0:
                self._due = self._interval
        while self._sent and (wait or self._sent[0].done()):
            by_rank = self._sent.popleft().result()
            for ranks in zip(*by_rank, strict=True):
                self._comparable &= resolve(ranks, self._common_clock, self._group_size)
                self.recent.add(ranks)
                self.epoch.add(ranks)
                yield ranks[0].number

    def release(self, trainer: Trainer) -> None:
        """Leave everything as it was found."""
        self._data.remove(trainer)
        self.watch.release()
        self._channel.close()
        for handle in self._calls:
            handle.remove()

    def values(self, summary: IdleSummary, per_rank: bool) -> Logged:
        """What `recent` or `epoch` amounts to."""
        return summary.values(self.complete, per_rank, self._group_size)

    def _finished(self, steps: list[_Step]) -> list[StepNumbers]:
        """Their numbers, when the device has passed them. The thread of the channel calls this."""
        for step in steps:
            numbers = step.numbers
            if step.passed is not None:
                step.passed.synchronize()
            for cause, begin, end in step.waits:
                numbers.waits[cause] += begin.elapsed_time(end) / 1e3
            numbers.meetings = self.watch.read(numbers.meetings)
            numbers.real_tokens = float(numbers.real_tokens)
        return [step.numbers for step in steps]

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
