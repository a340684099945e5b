"""Profiles single steps, for collectives on GPUs: only the records of kernels show which rank waits.

Note [Waiting inside a kernel]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On GPUs a collective is a kernel, which waits inside for the other ranks, and ends on all of them together. All ranks
run the same collectives in the same order, so the n-th kernel of a name on one rank is the n-th on the others. The rank
that comes last does not wait, so the shortest of these kernels is the transfer. In the other kernels, the time before
the transfer is waiting, and idle where none of the own kernels runs. ``docs/data/idle-sources.md`` draws an example.

Note [A step under the profiler]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Collectives wait on private streams of ``FSDP``, ``fully_shard`` and NCCL, where events cannot be recorded. The
profiler sees the kernels, but it must be started and stopped, which makes the device wait. So two steps are profiled,
and the second one counts. At the ends of four steps in a row:

1. Every rank waits for its device and starts its profiler, and all continue when all have. Otherwise early ranks would
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.cuda import Event as CudaEvent
from torch.profiler import ProfilerActivity

from lightning_odc._compat import profiler_is_running
from lightning_odc.callbacks.idle.sources import Watch
from lightning_odc.callbacks.idle.summary import DevicePart, IdleCause, StepNumbers
from lightning_odc.callbacks.timeline.spans import covered

_COST = 0.01  # of the time, for samples
_FIRST = 2  # steps before the first sample, in which kernels are compiled and memory is found
_PATIENCE = 2.0  # seconds after an error for the device to come to its end

# -- records of kernels; a window is a range of nanoseconds of their clock -------------------------------------


class KernelRecord(NamedTuple):
    """Something that a device did: a kernel, a copy, a filling of memory."""

    name: str  # what the profiler calls it
    begin: int  # nanoseconds of a clock that is this device's alone
    end: int  # nanoseconds of the same clock

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part: kernels of NCCL, and of RCCL, which have the same names."""
        return self.name.startswith("nccl")


def kernel_records(events: Iterable[Any]) -> list[KernelRecord]:
    """What ran on the device, in the order in which it began."""
    # The host's events are left out, and so are the ranges of ``record_function``, which the profiler also
    # draws beside the kernels that were launched inside.
    found = []
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            begin = round(event.time_range.start * 1e3)
            end = round(event.time_range.end * 1e3)
            found.append(KernelRecord(event.name, begin, end))
    return sorted(found, key=lambda record: (record.begin, record.end))


def parts_of(records: Sequence[KernelRecord], window: range) -> dict[DevicePart, float]:
    """Seconds of a window in which own kernels ran, nothing but collectives, and nothing: they add up to all of it."""
    own = _covered((record for record in records if not record.is_collective), window)
    busy = _covered(records, window)
    whole = (window.stop - window.start) / 1e9
    return {
        DevicePart.KERNEL: own,
        DevicePart.COLLECTIVE: busy - own,
        DevicePart.EMPTY: whole - busy,
    }


def durations(records: Iterable[KernelRecord]) -> dict[str, list[int]]:
    """Nanoseconds of every collective, by name, in order."""
    found: dict[str, list[int]] = {}
    for record in records:
        if record.is_collective:
            found.setdefault(record.name, []).append(record.end - record.begin)
    return found


def transfers(by_rank: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]] | None:
    """Nanoseconds that every collective takes when all have come: those of the rank that came last."""
    # ``None`` if the ranks ran different collectives, so that it is unknown which belong together.
    counts = [{name: len(of_name) for name, of_name in one.items()} for one in by_rank]
    if any(one != counts[0] for one in counts):
        return None
    shortest = {}
    for name in by_rank[0]:
        of_ranks = [one[name] for one in by_rank]
        shortest[name] = list(map(min, zip(*of_ranks, strict=True)))
    return shortest


def waited(records: Sequence[KernelRecord], window: range, transfer: Mapping[str, Sequence[int]]) -> float:
    """Seconds of a window in which this device was idle inside collectives. See Note [Waiting inside a kernel]."""
    left = {name: iter(of_name) for name, of_name in transfer.items()}
    before_transfers: list[KernelRecord] = []
    for record in records:
        if record.is_collective:
            record = record._replace(end=record.end - next(left[record.name]))
        before_transfers.append(record)
    return parts_of(before_transfers, window)[DevicePart.COLLECTIVE]


def _covered(records: Iterable[KernelRecord], window: range) -> float:
    """Seconds of a window that at least one record covers."""
    inside = ((max(record.begin, window.start), min(record.end, window.stop)) for record in records)
    return covered(inside) / 1e9


# -- samples --------------------------------------------------------------------------------------------------


class CudaProfile:
    """``torch.profiler`` on the activity of a device alone, used again and again."""

    def __init__(self, device: torch.device, mark: Callable[[], CudaEvent]) -> None:
        self._device = device
        self._mark = mark
        self._profile: torch.profiler.profile | None = None

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
        assert profile is not None, "it was not started"
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
        end = self._mark()
        deadline = time.monotonic() + _PATIENCE
        while not end.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        if end.query():
            profile.stop()


class SampledWatch(Watch):
    """Profiles one step in many, under any strategy. See Note [A step under the profiler]."""

    # All ranks do everything together, except `release`.

    samples = True

    def __init__(
        self,
        mark: Callable[[], CudaEvent],  # the moment at which the device has done all work so far
        profile: CudaProfile,
        agree: Callable[[Any], list[Any]],  # returns every rank's item, in rank order
        comparable: bool = True,  # every collective is one of all ranks
    ) -> None:
        # It stays complete while all ranks run the same collectives, and their profilers work: ``why`` not.
        super().__init__(complete=comparable)
        self._mark = mark
        self._profile = profile
        self._agree = agree
        self._steps = 0  # that have ended
        self._due = _FIRST  # the step after which the next sample begins
        self._discarded = 0  # samples that an interruption has ended
        self._running = False
        self._begin: CudaEvent | None = None  # the begin of the step that counts, if that runs now
        self._cost = 0.0
        # Before the first step: is there a profiler? This also prepares it.
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
        elif not self.why and self._steps >= self._due:
            began = time.monotonic()
            self._together(self._start)
            self._cost = time.monotonic() - began

    def interrupt(self) -> None:
        """The steps that are profiled now are not like others. Later ones are looked at, each time later."""
        if self._running:
            self._discarded += 1
            self._due = self._steps + 2**self._discarded
            self._together(self._stop)

    def release(self) -> None:
        """Profile no longer. Idempotent. Of this rank alone: another one may have failed."""
        self._running = False
        self._begin = None
        _attempt(self._profile.abandon)

    def _finish(self, numbers: StepNumbers, begin: CudaEvent) -> None:
        began = time.monotonic()
        end = self._mark()
        records = []
        error = _attempt(lambda: records.extend(self._stop()))
        seconds = 0.0
        if not error:
            seconds = begin.elapsed_time(end) / 1e3
        cost = self._cost + time.monotonic() - began
        answers = self._agree([error, durations(records), cost, seconds])
        errors, by_rank, costs, lengths = zip(*answers, strict=True)
        if not self._all_well(errors):
            return
        # Of steps of 0.5 s, a sample that took 2 s is one in 400.
        affordable = max(_COST * max(lengths), 1e-6)  # seconds per step
        pause = math.ceil(max(costs) / affordable)
        self._due = self._steps + max(pause, 1)
        last = records[-1].begin
        window = range(last - round(seconds * 1e9), last)
        numbers.seconds = seconds
        numbers.parts = parts_of(records, window)
        numbers.seen = True
        if not self.complete:
            return
        transfer = transfers(by_rank)
        if transfer is None:
            self.complete = False
        else:
            numbers.waits[IdleCause.COLLECTIVE] = waited(records, window, transfer)

    def _start(self) -> None:
        self._profile.start()
        self._running = True

    def _stop(self) -> list[KernelRecord]:
        self._running = False
        self._begin = None
        return self._profile.stop()

    def _together(self, act: Callable[[], object]) -> bool:
        """All ranks do this, and continue when all have. Returns whether it went well on all of them."""
        return self._all_well(self._agree(_attempt(act)))

    def _all_well(self, errors: Sequence[str]) -> bool:
        self.why = next((error for error in errors if error), "")
        if self.why:
            self.complete = False
            self.release()
        return not self.why


def _attempt(act: Callable[[], object]) -> str:
    """The error of a call, in one line; empty if there is none. A profiler's error must not stop training."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
