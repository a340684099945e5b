"""Records which gradients of a microbatch are in the accumulators, in case it breaks off and has to run again.

Note [Added once]
~~~~~~~~~~~~~~~~~
A backward pass adds the gradient of a unit as soon as it has gone through it. If it breaks off later, these gradients
cannot be separated from those of other microbatches: they are parts of the same sums. So they stay. The microbatch runs
again in parts, and these units add nothing for the parts. That is exact if the loss is a sum over samples, because then
the gradient of the whole is the sum of those of its parts, unit by unit. A unit that ran several times adds several
times, the last call first. Its n-th addition in a part stands for a part of the n-th addition of the whole.

Three units, a microbatch of the samples ``x y``. Its backward pass goes through the head and block 1, and breaks off in
block 0. The second part breaks off once more, after the head. ``g`` stands for a gradient::

    pass            head             block 1          block 0          times
    x y             adds g(x y)      adds g(x y)      breaks off       head 1, block 1 1
    x               is left out      is left out      adds g(x)
    y               is left out      is left out      breaks off       head 1, block 1 1
    y once more     is left out      is left out      adds g(y)
    in the sums     g(x y)           g(x y)           g(x) + g(y)

If a sample has to be left out after all, it is *taken back*: it runs once more with the negative of its loss, and
exactly the units that have added something add again. After the last one of them the pass is broken off on purpose.
Floating point numbers are symmetric about zero, so the negative number is exact to the last bit.

All this needs a unit to run as often in a part as in the whole, or not at all. A part compares that before it adds. If
a sample does not run a unit, nothing is taken back there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


class TakenBackError(Exception):
    """Everything that a microbatch had added is taken back; the rest of its backward pass is of no use."""


@dataclass(frozen=True)
class Added:
    """What a backward pass has added before it broke off, by the number of the unit.

    Attributes:
        times: How many times the unit has added.
        calls: How many times it ran in the forward pass.
    """

    times: Mapping[int, int] = field(default_factory=dict)
    calls: Mapping[int, int] = field(default_factory=dict)

    def differs(self, calls: Mapping[int, int]) -> list[int]:
        """The units that have added, and run another number of times in a part (which may do without a unit).

        Args:
            calls: How many times each unit ran in the forward pass of the part.
        """
        return [unit for unit in self.times if calls.get(unit, 0) not in (0, self.calls.get(unit, 0))]

    def within(self, calls: Mapping[int, int]) -> Added:
        """The additions of units that a part runs.

        Args:
            calls: How many times each unit ran in the forward pass of the part.
        """
        times = {unit: count for unit, count in self.times.items() if calls.get(unit, 0)}
        return Added(times, self.calls)


class Additions:
    """The additions of one backward pass after the other.

    Attributes:
        is_open: A pass has begun and not ended.
        adding: The unit that is adding right now; after a pass that broke off, the one that has added a part.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.adding: int | None = None
        self._before = Added()
        self._now: Counter[int] = Counter()
        self._left: int | None = None  # additions to take back

    def begin(self, before: Added, takes_back: bool = False) -> None:
        """A backward pass begins.

        Args:
            before: What the microbatch, of which this is a part, has added before.
            takes_back: The pass is there to take that back.

        Raises:
            TakenBackError: there is nothing to take back.
        """
        left = sum(before.times.values())
        if takes_back and not left:
            raise TakenBackError
        self.is_open, self.adding = True, None
        self._before, self._now = before, Counter()
        self._left = left if takes_back else None

    def end(self) -> None:
        """The pass has come to its end."""
        self.is_open, self._left = False, None
        self._before, self._now = Added(), Counter()

    @property
    def is_torn(self) -> bool:
        """A pass has begun and not ended, and a part of its gradient is in the accumulators."""
        return self.is_open and bool(self._now or self._before.times)

    def begin_adding(self, unit: int) -> bool:
        """A unit has a gradient; returns whether it is to be added."""
        self._now[unit] += 1
        is_old = self._now[unit] <= self._before.times.get(unit, 0)
        if is_old == (self._left is None):
            return False
        self.adding = unit
        return True

    def end_adding(self) -> None:
        """Record that the gradient is added.

        Raises:
            TakenBackError: this was the last one to take back.
        """
        self.adding = None
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise TakenBackError

    def broken_off(self, calls: Mapping[int, int]) -> Added:
        """The pass has broken off: what is in the accumulators of the microbatch of which it was a part.

        Args:
            calls: How many times each unit ran in the forward pass before.
        """
        done = Counter(self._now)
        if self.adding is not None:
            done[self.adding] -= 1
        before = self._before
        self.end()
        times = done | Counter(before.times)  # the larger one of both
        # What a unit has added before stands for its calls then.
        return Added(dict(times), {**calls, **{unit: before.calls.get(unit, 0) for unit in before.times}})
