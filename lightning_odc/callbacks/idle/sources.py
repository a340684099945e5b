"""The sources of idle time: what sees the waiting for other ranks, and the waiting for data.

Note [Idle on a stream]
~~~~~~~~~~~~~~~~~~~~~~~
On GPUs the host launches work, and the device does it later. So one event is recorded on the compute stream where a
wait begins (A), and another one where it ends (B). A passes when all earlier kernels are done. B passes right after it,
but not before the host has recorded it. So from A to B the stream had nothing to do, because the host waited:

    ms       0    1    2    3    4    5    6    7    8    9   10
    host     launches .... |waits for a peer .................|launches
    device   |kernels ..................|. nothing to do .....|kernels
                                        A                     B        5 ms idle, while the host waited for 7

Recording the events does not wait. A thread reads them when the device has passed the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from torch.cuda import Event as CudaEvent
from torch.distributed.fsdp import FSDPModule

from lightning_odc import _compat
from lightning_odc._compat_lightning import FETCH_ACTION
from lightning_odc.callbacks.idle.summary import IdleCause, StepNumbers
from lightning_odc.callbacks.timeline.spans import COLLECTIVES, Passage
from lightning_odc.engine.base import Engine
from lightning_odc.engine.unit_calls import tensors_in
from lightning_odc.engine.units import fsdp_modules
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.protocol.tracing import Tracer
from lightning_odc.protocol.waiting import Cause


class ComputeStream:
    """The stream on which the model of this rank computes, to mark moments on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.follow()

    def follow(self) -> None:
        """Follow the stream that is current now. The training thread calls this."""
        self._stream = torch.cuda.current_stream(self._device)

    def mark(self) -> CudaEvent:
        """The moment at which the stream has done all work so far. Any thread, any current stream."""
        event = CudaEvent(enable_timing=True)
        event.record(self._stream)
        return event


def compute_stream(device: torch.device) -> ComputeStream | None:
    """The stream of a device that runs ahead of its host; ``None`` for a processor, whose host is the device."""
    if device.type != "cuda":
        return None
    return ComputeStream(device)


class StreamWait(NamedTuple):
    """A wait of the host: between these events the stream had nothing to do."""

    cause: IdleCause
    begin: CudaEvent
    end: CudaEvent


class StreamWaits:
    """Notes when a stream had nothing to do because its host waited. See Note [Idle on a stream]."""

    def __init__(self, stream: ComputeStream) -> None:
        self.stream = stream
        self.counting = False  # whether waits that begin now count
        self.causes: set[IdleCause] = set()  # what can be waited for: without a wait it is zero, not unknown
        self._begun: list[tuple[IdleCause, CudaEvent] | None] = []
        self._ended: list[StreamWait] = []

    def enter(self, cause: IdleCause) -> None:
        """The host begins to wait. Waits may nest."""
        begun = None
        if self.counting:
            begun = (cause, self.stream.mark())
        self._begun.append(begun)

    def leave(self) -> None:
        """The host has waited."""
        if not self._begun:
            return
        begun = self._begun.pop()
        if begun is not None:
            self._ended.append(StreamWait(*begun, self.stream.mark()))

    def take(self) -> list[StreamWait]:
        """The waits that have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended


class Watch:
    """Sees waiting for other ranks: what the engine has counted, which under some strategies is nothing."""

    counting = False  # whether collectives count now: those of training
    samples = False  # it sees single steps only, those in whose numbers `end_step` sets ``seen``

    def __init__(self, complete: bool, engine: Engine | None = None, why: str = "") -> None:
        # All waiting for other ranks that the documentation lists is seen. Else nothing is said of idle as a whole.
        self.complete = complete
        self.why = why  # why it is not complete, if there is more to say than the name of the strategy
        self._engine = engine  # counts its waits, on demand
        self._meetings: list[Any] = []

    def begin_batch(self) -> None:
        """A Lightning batch begins."""

    def end_batch(self) -> None:
        """A Lightning batch has ended."""

    def before_backward(self) -> None:
        """Lightning's backward pass begins."""

    def after_backward(self) -> None:
        """Lightning's backward pass is over."""

    def waits(self) -> dict[IdleCause, float]:
        """Seconds of waiting since the start that this rank knows alone."""
        if self._engine is None:
            return {}
        return {IdleCause(cause): seconds for cause, seconds in self._engine.waits.items()}

    def take_meetings(self) -> list[Any]:
        """What is known of the collectives of the step that has just ended, for `read`."""
        meetings = self._meetings
        self._meetings = []
        return meetings

    def read(self, taken: list[Any]) -> list[Passage]:
        """When this rank entered and left these collectives, in order. The device has passed them."""
        return taken

    def end_step(self, numbers: StepNumbers) -> None:
        """An optimizer step has ended, and the next one has not begun: the time now counts in neither."""

    def interrupt(self) -> None:
        """What comes now is not training: a step that is being looked at will not be a step like others."""

    def release(self) -> None:
        """Leave everything as it was found. Idempotent."""


class GradientWatch(Watch):
    """DDP: where data parallel ranks wait. Enters by the public hook after a parameter's gradient."""

    # DDP reduces gradients bucket by bucket beside the backward pass, and only the end of ``backward`` waits
    # for all of them. A rank hands in its last bucket when its last gradient is there; no rank leaves before
    # all have done so. So from its own last gradient to the last rank's last gradient a rank waits, and what
    # follows is moving bytes. It is one collective per backward pass in the sense of Note [Waiting inside a
    # collective], entered with the last gradient and left with the end of ``backward``. Backward passes of
    # batches that only accumulate do not meet and do not count.

    def __init__(self, module: nn.Module, stream: ComputeStream | None) -> None:
        super().__init__(complete=True)
        self._stream = stream
        self._entered: int | CudaEvent = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._enter)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def begin_batch(self) -> None:
        self._meetings.clear()

    def before_backward(self) -> None:
        self._enter()

    def after_backward(self) -> None:
        self._meetings.append((self._entered, self._moment()))

    def read(self, taken: list[Any]) -> list[Passage]:
        if self._stream is None:
            return [Passage(*moments) for moments in taken]
        # Events of different devices have no common clock, so a meeting is given by its duration alone.
        return [Passage(-round(entered.elapsed_time(left) * 1e6), 0) for entered, left in taken]

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: object) -> None:
        self._entered = self._moment()

    def _moment(self) -> int | CudaEvent:
        """The present, of the host or of its device."""
        if self._stream is None:
            return time.monotonic_ns()
        return self._stream.mark()


class _ListeningWatch(Watch, Tracer):
    """A watch that hears what an engine traces."""

    def __init__(self, engine: Engine) -> None:
        Watch.__init__(self, complete=True)
        Tracer.__init__(self, capacity=0)
        self._traced = engine
        engine.listen(self)

    def release(self) -> None:
        self._traced.unlisten(self)


class CollectiveWatch(_ListeningWatch):
    """``ODCStrategy(communication="collective")``: the engine traces every collective of its own."""

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind in COLLECTIVES and self.counting:
            self._meetings.append(Passage(begin, time.monotonic_ns()))


class StreamWatch(_ListeningWatch):
    """``ODCStrategy`` on demand on GPUs, where ranks wait for each other on the host."""

    def __init__(self, engine: Engine, waits: StreamWaits) -> None:
        waits.causes.update(IdleCause(cause) for cause in Cause)
        self._waits = waits
        super().__init__(engine)

    def begin_wait(self, cause: str) -> None:
        self._waits.enter(IdleCause(cause))

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind == "wait":
            self._waits.leave()


@dataclass
class Meeting:
    """The moments of a rank in a collective of its group, in nanoseconds of its own clock."""

    begun: int  # it handed in its part
    entered: int  # it began to wait for the result; before that it did other work
    left: int  # it had the result


class GroupWatch(Watch, _compat.TorchDispatchMode):
    """``ODCStrategy`` with groups, on CPUs: the engine counts waits between groups, and operators show those within."""

    # A rank has come when it begins a collective. It waits in ``wait_tensor``, which may be later; of the functions of
    # ``torch.distributed``, at once. How long it waits after ``async_op=True``, or for a message, no operator shows.

    supports_higher_order_operators = True  # passes them on

    def __init__(self, engine: Engine, sample_group: SampleGroup) -> None:
        Watch.__init__(self, complete=True, engine=engine)
        _compat.TorchDispatchMode.__init__(self)
        self._sample_group = sample_group
        self._batch = ExitStack()
        # Those that were not waited for yet, by the memory of their result.
        self._begun: dict[int, Meeting] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without this mode."""
        return True

    def begin_batch(self) -> None:
        self._batch.enter_context(self)

    def end_batch(self) -> None:
        self._batch.close()

    interrupt = release = end_batch  # a batch that is left out has no end

    def read(self, taken: list[Any]) -> list[Passage]:
        if not self.complete:
            return []
        return [Passage(met.entered, met.left, met.entered - met.begun) for met in taken]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # around a tensor, as DTensor: it calls collectives itself
        begin = time.monotonic_ns()
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            meeting = self._begun.pop(args[0].untyped_storage().data_ptr(), None)
            if meeting is not None:
                meeting.entered = begin
                meeting.left = time.monotonic_ns()
        elif func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._meet(begin, dict(zip(names, args, strict=False)), result)
        return result

    def _meet(self, begin: int, given: dict[str, Any], result: Any) -> None:
        """Note a collective of the group."""
        name = given.get("group_name")
        boxed = given.get("process_group")
        if boxed is not None:
            group = dist.ProcessGroup.unbox(boxed)
        elif name is not None:
            group = _compat.group_named(name)
        else:
            return
        if dist.get_process_group_ranks(group) != self._sample_group.ranks:
            return
        meeting = Meeting(begin, begin, begin)
        self._meetings.append(meeting)
        if name is not None:  # a functional one, with a result or several
            first = next(tensors_in(result))
            self._begun[first.untyped_storage().data_ptr()] = meeting
        elif not given.get("async_op", True):
            work = result
            if isinstance(result, tuple):
                work = result[-1]
            dist.Work.unbox(work).wait()
            meeting.left = time.monotonic_ns()
        elif group.group_name != self._sample_group.name:
            self.complete = False
            self.why = "asynchronous collectives within a group"


class ShardedWatch(Watch):
    """``ModelParallelStrategy`` on CPUs: the comm objects of the modules that the user gave to ``fully_shard``."""

    # Each is put behind a `TimedComm` by the public setter and put back by `release`. A collective among some
    # ranks only (tensor parallel, hybrid sharding) cannot be compared over all: then ``complete`` turns false.

    def __init__(self, model: nn.Module) -> None:
        super().__init__(complete=True)
        self._originals: list[tuple[FSDPModule, Any, Any]] = []
        for module in fsdp_modules(model):
            comms = _compat.comms_of(module)
            if comms is None:
                self.complete = False
                continue
            gather, reduce_scatter = comms
            module.set_custom_all_gather(cast(Any, TimedComm(gather, self._meet)))
            module.set_custom_reduce_scatter(cast(Any, TimedComm(reduce_scatter, self._meet)))
            self._originals.append((module, gather, reduce_scatter))
        self.complete &= bool(self._originals)

    def release(self) -> None:
        for module, gather, reduce_scatter in self._originals:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        self._originals.clear()

    def _meet(self, passage: Passage, group: dist.ProcessGroup) -> None:
        if dist.get_world_size(group) != dist.get_world_size():
            self.complete = False
        elif self.counting:
            self._meetings.append(passage)


class TimedComm:
    """A comm object of ``fully_shard`` with its calls timed; what it does is untouched."""

    def __init__(self, comm: Any, meet: Callable[[Passage, dist.ProcessGroup], None]) -> None:
        self.comm = comm
        self._meet = meet

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.comm.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        begin = time.monotonic_ns()
        try:
            return self.comm(output_tensor, input_tensor, group=group, **options)
        finally:
            self._meet(Passage(begin, time.monotonic_ns()), group)


class DataClock:
    """Stands in the place of the trainer's profiler, passes everything on, and times the gap between two batches."""

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
        on_fetch: Callable[[Passage], None],
        # Seconds of waiting for other ranks so far. A loader that plans with them does so while it fetches.
        waited: Callable[[], float],
        waits: StreamWaits | None = None,  # for a device that runs ahead of its host
    ) -> None:
        self.seconds = 0.0  # seconds spent fetching so far, without what ``waited`` counts
        self.seen = False  # whether a batch was ever fetched
        self._inner = inner
        self._on_fetch = on_fetch
        self._waited = waited
        self._waited_before = 0.0
        self._waits = waits
        self._last = self._began = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._began = time.monotonic_ns()
            self._waited_before = self._waited()
            self._on_fetch(Passage(self._last, self._began))
            if self._waits is not None:
                self._waits.enter(IdleCause.DATA)

    def stop(self, action_name: str) -> None:
        self._last = time.monotonic_ns()
        if self._began and action_name.endswith(FETCH_ACTION):
            waited = self._waited() - self._waited_before
            self.seconds += (self._last - self._began) / 1e9 - waited
            self._began = 0
            self.seen = True
            if self._waits is not None:
                self._waits.causes.add(IdleCause.DATA)
                self._waits.leave()
        self._inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        with self._inner.profile(action_name):
            yield action_name
        self._last = time.monotonic_ns()

    def remove(self, trainer: Any) -> None:
        """Give the place back. Idempotent."""
        if trainer.profiler is self:
            trainer.profiler = self._inner
