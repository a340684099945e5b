"""Puts the clocks of several machines on one time axis, with safe bounds.

Note [Bounds of a clock's offset]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
No rank leaves an exchange with all ranks before every rank has entered it. Rank ``r`` reads its clock on entering
and on leaving, and its clock is ``offset`` ahead of rank 0's. Rank 0 left after ``r`` entered:
``entered[r] - offset <= left[0]``. And ``r`` left after rank 0 entered: ``entered[0] <= left[r] - offset``. Hence

    entered[r] - left[0]  <=  offset  <=  left[r] - entered[0]

in every round. The true value is in the intersection. The estimate is its middle, the uncertainty half its width.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROUNDS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Passage(NamedTuple):
    """The moments at which a rank entered and left an exchange or a collective, in nanoseconds of its own clock."""

    entered: int
    left: int


class Clock(NamedTuple):
    """A rank's clock."""

    host: str  # the machine's name
    offset_ns: int = 0  # how far it is ahead of rank 0's clock
    uncertainty_ns: int = 0  # how wrong that can be, at most; ranks on one machine share the clock: 0


def measure_clocks(exchange: Callable[[Any], list[Any]]) -> list[Clock]:
    """Every rank's clock, in rank order. All ranks together; does not depend on the direction of any message."""
    # ``exchange`` gives every rank's object to every rank, in rank order.
    machines: list[tuple[str, str]] = exchange((socket.gethostname(), machine()))
    if len({machine for _, machine in machines}) == 1:
        return [Clock(host) for host, _ in machines]
    passages = []
    for _ in range(_ROUNDS):
        entered = time.monotonic_ns()
        exchange(None)
        passages.append(Passage(entered, time.monotonic_ns()))
    return place_clocks(machines, exchange(passages))


def place_clocks(machines: Sequence[tuple[str, str]], passages: Sequence[Sequence[Passage]]) -> list[Clock]:
    """The arithmetic of `measure_clocks`: see Note [Bounds of a clock's offset]."""
    # ``machines``: the host's name and the machine's identity by rank. ``passages``: by rank, one per round.
    # All ranks of a machine have the same clock, so the bounds of each of them hold for all.
    pairs: dict[str, list[tuple[Passage, Passage]]] = {}
    for (_, machine), mine in zip(machines, passages, strict=True):
        pairs.setdefault(machine, []).extend(zip(mine, passages[0], strict=True))
    clocks = {machines[0][1]: (0, 0)}
    for machine, together in pairs.items():
        low = max(own.entered - reference.left for own, reference in together)
        high = min(own.left - reference.entered for own, reference in together)
        clocks.setdefault(machine, ((low + high) // 2, (high - low + 1) // 2))
    return [Clock(host, *clocks[machine]) for host, machine in machines]


def machine() -> str:
    """An id that all processes share that have the same monotonic clock, containers included."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
