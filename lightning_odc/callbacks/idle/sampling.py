"""Profiles single steps, for collectives on GPUs: only the records of kernels show which rank waits.

Note [A step under the profiler]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Collectives wait on private streams of ``FSDP``, ``fully_shard`` and NCCL, where events cannot be recorded. The
profiler sees the kernels, but it must be started and stopped, which makes the device wait. So two steps are profiled,
and the second one counts. At the ends of four steps in a row:

1. Every rank waits for its device and starts its profiler, and all go on when all have. Otherwise early ranks would
   wait for the others inside the first collective, and only some ranks would record the collectives under way.
2. The first step lets the host get ahead of its device again, as in every other step. An event A is recorded.
3. The step that counts ends here. An event B is recorded, and one kernel is launched after it. Then the host waits for
   the device and stops the profiler. The last record is that kernel. The step ends where this kernel begins, and its
   length is the time from A to B.
4. From here on, steps are no longer profiled.

The host never waits for the device inside a step. All ranks measure the time of 1 and 3. The next sample comes when
that time is less than a hundredth of the time since.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lightning_odc._compat import profiler_is_running
from lightning_odc.callbacks.idle.channels import Channel, SideChannel
from lightning_odc.callbacks.idle.kernels import (
    KernelRecord,
    Window,
    durations,
    kernel_records,
    parts_of,
    transfers,
    waited,
)
from lightning_odc.callbacks.idle.stream_waits import StreamWaits
from lightning_odc.callbacks.idle.summary import IdleCause, StepNumbers
from lightning_odc.callbacks.idle.watch import Watch

_COST = 0.01  # of the time, for samples
_FIRST = 2  # steps before the first sample, in which kernels are compiled and memory is found
_PATIENCE = 2.0  # seconds after an error for the device to come to its end
_TIMEOUT = timedelta(minutes=30)  # of ranks that agree


class CudaProfile:
    """``torch.profiler`` on the activity of a device alone, used again and again."""

    def __init__(self, device: torch.device, mark: Callable[[], torch.cuda.Event]) -> None:
        self._device = device
        self._mark = mark
        self._profile: Any = None

    def start(self) -> None:
        """Record from now on. Waits for the device."""
        if profiler_is_running():
            raise RuntimeError("another torch.profiler is running")
        torch.cuda.synchronize(self._device)
        profile = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
        profile.start()
        self._profile = profile

    def stop(self) -> list[KernelRecord]:
        """What ran since the start; the last record is of something that was launched now. Waits for the device."""
        profile, self._profile = self._profile, None
        torch.ones(1, device=self._device)
        torch.cuda.synchronize(self._device)
        profile.stop()
        records = kernel_records(profile.events())
        if not records:
            raise RuntimeError("the profiler has seen no kernel: CUPTI is missing, or not permitted")
        return records

    def abandon(self) -> None:
        """Stop recording after an error, and drop what was recorded."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        # To stop it is to wait for the device, which after an error may wait for a peer that will never come.
        end, deadline = self._mark(), time.monotonic() + _PATIENCE
        while not end.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        if end.query():
            profile.stop()


class StepSampler:
    """Profiles one step in many. See Note [A step under the profiler]. All ranks do everything together."""

    def __init__(
        self,
        mark: Callable[[], torch.cuda.Event],  # marks a moment on the compute stream
        profile: CudaProfile,
        agree: Callable[[Any], list[Any]],  # returns every rank's item, in rank order
        comparable: bool = True,  # every collective is one of all ranks
    ) -> None:
        self.trouble = ""  # why there are no samples, or no more, the same on all ranks
        self.comparable = comparable  # and all ranks have run the same collectives so far
        self._mark = mark
        self._profile = profile
        self._agree = agree
        self._steps, self._due, self._discarded = 0, _FIRST, 0
        self._running = False
        self._begin: torch.cuda.Event | None = None
        self._cost = 0.0

    @property
    def measuring(self) -> bool:
        """The step that runs now is the one that counts."""
        return self._begin is not None

    def try_out(self) -> None:
        """Find out before the first step whether there is a profiler, and prepare it."""
        if self._together(self._start):
            self._together(self._stop)

    def end_step(self, numbers: StepNumbers) -> None:
        """A step has ended. Begins a sample if one is due; completes the numbers of the step that counts."""
        # That one gets its time on the device, the parts of it, and the waiting inside collectives if it is known.
        self._steps += 1
        if self._begin is not None:
            self._finish(numbers, self._begin)
        elif self._running:
            self._begin = self._mark()
        elif not self.trouble and self._steps >= self._due:
            began = time.monotonic()
            self._together(self._start)
            self._cost = time.monotonic() - began

    def discard(self) -> None:
        """The steps that are profiled now are not like others. Later ones are looked at, each time later."""
        if self._running:
            self._discarded += 1
            self._due = self._steps + 2**self._discarded
            self._together(self._stop)

    def release(self) -> None:
        """Profile no longer. Idempotent. Of this rank alone: another one may have failed."""
        self._running, self._begin = False, None
        _attempt(self._profile.abandon)

    def _finish(self, numbers: StepNumbers, begin: torch.cuda.Event) -> None:
        began, end = time.monotonic(), self._mark()
        records: list[KernelRecord] = []
        error = _attempt(lambda: records.extend(self._stop()))
        seconds = 0.0 if error else begin.elapsed_time(end) / 1e3
        cost = self._cost + time.monotonic() - began
        errors, by_rank, costs, lengths = zip(
            *self._agree([error, durations(records), cost, seconds]), strict=True
        )
        if not self._all_well(errors):
            return
        # Of steps of 0.5 s, a sample that took 2 s is one in 400.
        self._due = self._steps + max(math.ceil(max(costs) / max(_COST * max(lengths), 1e-6)), 1)
        window = Window(records[-1].begin - round(seconds * 1e9), records[-1].begin)
        numbers.seconds, numbers.parts, numbers.seen = seconds, parts_of(records, window), True
        transfer = transfers(by_rank) if self.comparable else None
        self.comparable = transfer is not None
        if transfer is not None:
            numbers.waits[IdleCause.COLLECTIVE] = waited(records, window, transfer)

    def _start(self) -> None:
        self._profile.start()
        self._running = True

    def _stop(self) -> list[KernelRecord]:
        self._running, self._begin = False, None
        return self._profile.stop()

    def _together(self, act: Callable[[], Any]) -> bool:
        """All ranks do this, and go on when all have. Returns whether it went well on all of them."""
        return self._all_well(self._agree(_attempt(act)))

    def _all_well(self, errors: Sequence[str]) -> bool:
        self.trouble = next((error for error in errors if error), "")
        if self.trouble:
            self.release()
        return not self.trouble


def _attempt(act: Callable[[], Any]) -> str:
    """The error of a call, in one line; empty if there is none. A profiler's error must not stop training."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


class SampledWatch(Watch):
    """Any strategy on GPUs whose collectives show in the records of kernels alone."""

    samples = True

    def __init__(self, sampler: StepSampler, waits: StreamWaits, channel: Channel) -> None:
        super().__init__(complete=True)
        self._sampler = sampler
        self._waits = waits
        self._channel = channel
        sampler.try_out()
        self._look()

    def end_step(self, numbers: StepNumbers) -> None:
        self._sampler.end_step(numbers)
        if self._sampler.measuring:
            self._waits.forget()  # those of the steps before, which the device has not passed yet
        if numbers.seen:  # the device has passed all of them
            for cause, seconds in self._waits.take().items():
                numbers.waits[cause] = numbers.waits.get(cause, 0.0) + seconds
        self._look()

    def interrupt(self) -> None:
        self._sampler.discard()
        self._look()

    def release(self) -> None:
        self._sampler.release()
        self._channel.close()

    def _look(self) -> None:
        self.complete = self._sampler.comparable and not self._sampler.trouble
        self.why = self._sampler.trouble


def sampled_watch(device: torch.device, waits: StreamWaits, comparable: bool) -> SampledWatch:
    """All ranks together."""
    channel, mark = SideChannel(capacity=1, timeout=_TIMEOUT), waits.stream.mark
    sampler = StepSampler(mark, CudaProfile(device, mark), channel.agree, comparable)
    return SampledWatch(sampler, waits, channel)
