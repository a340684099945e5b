"""Work stealing, simulated greedily: a device that has finished takes microbatches from others.

Note [Simulated stealing]
~~~~~~~~~~~~~~~~~~~~~~~~~
As in `lightning_odc.engine.stealing`: an owner takes from the front of its list; a device that has finished takes the
last microbatch of the one with the most left, if it would end there before its owner ends everything. Devices steal
inside their node. Two alike devices, seconds ``[[1], [5, 4, 3, 2]]``::

    time  device 0                          device 1, and what it has left
    0     runs its only one until 1         runs 5 until 5: 4, 3, 2
    1     takes the 2 from it, until 3      4, 3
    3     takes the 3, until 6              4
    5                                       runs 4 until 9: none
    6     finds nothing

All are done at 9 instead of 14.
"""

from __future__ import annotations

import heapq

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints

_LEAST_GAIN = 0.02  # as in the engine


def steal(seconds: Floats, counts: Ints, slowness: Floats, row: int) -> tuple[Floats, Ints, int]:
    """Move microbatches of one minibatch to devices that have finished.

    Args:
        seconds: ``[M, D]`` of microbatches where they were planned.
        counts: ``[D]`` of them.
        slowness: ``[D]`` how many times as long devices take.
        row: Devices of a node.

    Returns:
        ``[M', D]`` seconds and ``[D]`` counts as they are run, and how many were stolen.
    """
    ran: list[list[float]] = [[] for _ in counts]
    stolen = 0
    for first in range(0, len(counts), row):
        own = range(first, first + row)
        queues = [_Queue(seconds[: counts[d], d].tolist()) for d in own]
        stolen += _run_node(queues, slowness[first : first + row], ran[first : first + row])
    most = max(map(len, ran))
    found = np.zeros((max(most, 1), len(counts)))
    for device, times in enumerate(ran):
        found[: len(times), device] = times
    return found, np.array([len(times) for times in ran]), stolen


class _Queue:
    """What a device has not begun."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds
        self._front = 0
        self.left = sum(seconds)

    def __len__(self) -> int:
        return len(self._seconds) - self._front

    def take(self) -> float:
        self._front += 1
        self.left -= self._seconds[self._front - 1]
        return self._seconds[self._front - 1]

    def last(self) -> float:
        return self._seconds[-1]

    def give(self) -> float:
        self.left -= self._seconds[-1]
        return self._seconds.pop()


def _run_node(queues: list[_Queue], slowness: Floats, ran: list[list[float]]) -> int:
    """Run all microbatches of a node, in the order of time; fills ``ran``, returns how many were stolen."""
    free = [(0.0, device) for device in range(len(queues))]
    until, stolen = [0.0] * len(queues), 0
    loaded = {device for device, queue in enumerate(queues) if len(queue)}
    while free and loaded:
        now, device = heapq.heappop(free)
        if len(queues[device]):
            seconds = queues[device].take()
        else:
            found = _best(queues, loaded, slowness, until, now, device)
            if found is None:
                continue
            seconds = queues[found].give() * float(slowness[device] / slowness[found])
            stolen += 1
            if not len(queues[found]):
                loaded.discard(found)
        if not len(queues[device]):
            loaded.discard(device)
        ran[device].append(seconds)
        until[device] = now + seconds
        heapq.heappush(free, (until[device], device))
    return stolen


def _best(
    queues: list[_Queue], loaded: set[int], slowness: Floats, until: list[float], now: float, thief: int
) -> int | None:
    """The most loaded device whose last microbatch is better run by the thief."""

    def pays(victim: int) -> bool:
        remaining = until[victim] - now + queues[victim].left
        here = queues[victim].last() * float(slowness[thief] / slowness[victim])
        return here < remaining * (1 - _LEAST_GAIN)

    ends = [(until[victim] + queues[victim].left, victim) for victim in loaded if pays(victim)]
    return max(ends)[1] if ends else None
