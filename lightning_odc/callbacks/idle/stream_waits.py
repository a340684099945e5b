"""Waits of the host on a device that runs ahead of it: how long the device had nothing to do meanwhile.

Note [Idle on a stream]
~~~~~~~~~~~~~~~~~~~~~~~
On GPUs the host launches work, and the device does it later. While the host waits for 7 ms, the device may have 7 ms of
kernels to run. So one event is recorded on the compute stream where a wait begins (A), and another one where it ends
(B). A passes when all earlier kernels are done. B passes right after it, but not before the host has recorded it. So
from A to B the stream had nothing to do, because the host waited:

    ms       0    1    2    3    4    5    6    7    8    9   10
    host     launches .... |waits for a peer .................|launches
    device   |kernels ..................|. nothing to do .....|kernels
                                        A                     B        5 ms idle, while the host waited for 7

Recording the events does not wait. They are read when they have passed, sometimes a step later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from lightning_odc.callbacks.idle.summary import IdleCause
from lightning_odc.callbacks.idle.watch import Watch
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Tracer
from lightning_odc.engine.waiting import Cause


class ComputeStream:
    """The stream on which the model of this rank computes, to mark moments on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.follow()

    def follow(self) -> None:
        """Follow the stream that is current now. The training thread calls this."""
        self._stream = torch.cuda.current_stream(self._device)

    def mark(self) -> torch.cuda.Event:
        """The moment at which the stream has done all work so far. Any thread, any current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def compute_stream(device: torch.device) -> ComputeStream | None:
    """The stream of a device that runs ahead of its host; ``None`` for a processor, whose host is the device."""
    return ComputeStream(device) if device.type == "cuda" else None


class StreamWaits:
    """Seconds in which a stream had nothing to do because its host waited. See Note [Idle on a stream]."""

    def __init__(self, stream: ComputeStream) -> None:
        self.stream = stream
        self.counting = False  # whether waits that begin now count
        # What can be waited for here. A cause without a wait is zero, not unknown.
        self.causes: set[IdleCause] = set()
        self._begun: list[tuple[IdleCause, torch.cuda.Event] | None] = []
        self._ended: deque[tuple[IdleCause, torch.cuda.Event, torch.cuda.Event]] = deque()

    def enter(self, cause: IdleCause) -> None:
        """The host begins to wait. Waits may nest."""
        self._begun.append((cause, self.stream.mark()) if self.counting else None)

    def leave(self) -> None:
        """The host has waited."""
        begun = self._begun.pop() if self._begun else None
        if begun is not None:
            self._ended.append((*begun, self.stream.mark()))

    def take(self) -> dict[IdleCause, float]:
        """Seconds by cause of the waits that the stream has passed since the last call. Does not wait."""
        # What it has not passed yet counts in the step after: every step of every rank has its numbers at once.
        seconds = dict.fromkeys(self.causes, 0.0)
        while self._ended and self._ended[0][-1].query():
            cause, begin, end = self._ended.popleft()
            seconds[cause] = seconds.get(cause, 0.0) + begin.elapsed_time(end) / 1e3
        return seconds

    def forget(self) -> None:
        """Waits that have ended so far count no more."""
        self._ended.clear()


class WaitTracer(Tracer):
    """Reports the waits of an engine, and nothing else."""

    def __init__(self, waits: StreamWaits) -> None:
        super().__init__(capacity=0)
        self._waits = waits

    def begin_wait(self, cause: str) -> None:
        self._waits.enter(IdleCause(cause))

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind == "wait":
            self._waits.leave()


class StreamWatch(Watch):
    """``ODCStrategy`` on demand and in lockstep on GPUs, where ranks wait for each other on the host."""

    def __init__(self, engine: Engine, waits: StreamWaits) -> None:
        super().__init__(complete=True)
        waits.causes.update(IdleCause(cause) for cause in Cause)
        self._traced = engine
        self._tracer = WaitTracer(waits)
        engine.listen(self._tracer)

    def release(self) -> None:
        self._traced.unlisten(self._tracer)
