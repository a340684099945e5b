"""The activity of a device in a step, from the records of its kernels. Plain values and arithmetic.

Note [Waiting inside a kernel]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On GPUs a collective is a kernel, like those of the model. It begins when its own rank has come, waits inside for the
others, moves the bytes, and ends on all ranks together. The host does not wait. All ranks run the same collectives
in the same order, so the n-th kernel of a name on one rank is the n-th on the others. The rank that comes last does not
wait, so the shortest of these kernels is the transfer. In the other kernels, the time before the transfer is waiting.
The device is idle while it waits and none of its own kernels runs. In ms, with a gather that rank 0 begins early:

    ms       0    2    4    6    8   10   12   14
    rank 0   |model ...|                   |model ...
             .  |gather ...................|              3 to 12: 9 ms long
    rank 1   |model ...................|   |model ...
             .                         |gat|              10 to 12: 2 ms long, the transfer

Rank 0 waits from 3 to 12 - 2 = 10, and is idle from 4 to 10: 6 ms. From 10 to 12 both ranks move bytes. On rank 0, the
first 12 ms have 4 ms of its own kernels, 8 ms of nothing but a collective (6 of them idle), and no empty time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_odc.callbacks.idle.summary import DevicePart
from lightning_odc.callbacks.timeline.spans import covered


class Window(NamedTuple):
    """A part of the device's time: nanoseconds, begin and end."""

    begin: int
    end: int


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
    found = [
        KernelRecord(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sorted(found, key=lambda record: (record.begin, record.end))


def parts_of(records: Sequence[KernelRecord], window: Window) -> dict[DevicePart, float]:
    """Seconds of a window in which own kernels ran, nothing but collectives, and nothing: they add up to all of it."""
    inside = _clip(records, window)
    own = covered(record for record in inside if not record.is_collective)
    busy = covered(inside)
    parts = {
        DevicePart.KERNEL: own,
        DevicePart.COLLECTIVE: busy - own,
        DevicePart.EMPTY: window.end - window.begin - busy,
    }
    return {part: nanoseconds / 1e9 for part, nanoseconds in parts.items()}


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
    return {
        name: [min(together) for together in zip(*(one[name] for one in by_rank), strict=True)]
        for name in by_rank[0]
    }


def waited(records: Sequence[KernelRecord], window: Window, transfer: Mapping[str, Sequence[int]]) -> float:
    """Seconds of a window in which this device was idle inside collectives. See Note [Waiting inside a kernel]."""
    left = {name: iter(of_name) for name, of_name in transfer.items()}
    waits = [
        record._replace(end=record.end - next(left[record.name]))
        for record in records
        if record.is_collective
    ]
    own = _clip((record for record in records if not record.is_collective), window)
    return (covered([*own, *_clip(waits, window)]) - covered(own)) / 1e9


def _clip(records: Iterable[KernelRecord], window: Window) -> list[KernelRecord]:
    """What lies inside of a window."""
    clipped = (
        record._replace(begin=max(record.begin, window.begin), end=min(record.end, window.end))
        for record in records
    )
    return [record for record in clipped if record.begin < record.end]
