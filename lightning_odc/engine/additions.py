"""Records which gradients of a microbatch are in the accumulators, in case it breaks off and has to run again.

Note [Added once]
~~~~~~~~~~~~~~~~~
*Once per minibatch.* Adding a gradient to its owners moves the whole unit, and only the sum over the minibatch counts.
So where memory is left, a rank takes every gradient from autograd, and sums it in a tensor of its own (`UnitSum`), in
the dtype of the accumulators. ``fully_shard`` finds nothing to reduce. In the backward pass of its last microbatch, the
rank leaves gradients to ``fully_shard``, and adds the sums with them. If it does not know which microbatch is its last
(work stealing), it adds the sums when nothing is left to take. Every rank decides for itself, as in Note [Read once per
minibatch].

*Once per sample.* A backward pass adds the gradient of a unit, to the owners or to that sum, as soon as it has gone
through the unit. If it breaks off later, these gradients are parts of sums already, and stay. The microbatch runs again
in parts, which leave these parameters out. That is exact if the loss is a sum over samples. The n-th gradient of a
parameter in a part belongs to the n-th of the whole: there are several where checkpointed blocks go backward one by
one. So a part that runs a unit another number of times than the whole, but not 0 times, is refused before it adds.

A microbatch of the samples ``x y`` breaks off in block 0, and its second part once more, after the head::

    pass            head             block 1          block 0          times
    x y             adds g(x y)      adds g(x y)      breaks off       head 1, block 1 1
    x               is left out      is left out      adds g(x)
    y               is left out      is left out      breaks off       head 1, block 1 1
    y once more     is left out      is left out      adds g(y)
    in the sums     g(x y)           g(x y)           g(x) + g(y)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_odc.engine.units import ParamSlot, Unit
from lightning_odc.errors import ODCError


class Pass(NamedTuple):
    """A backward pass."""

    is_announced: bool  # it runs within `OnDemandEngine.backward`
    counts: bool = True  # else zeros are added instead of its gradients
    is_last: bool = True  # in the optimizer step, as far as is known


OF_THE_USER = Pass(is_announced=False)  # by itself, such as in `loss.backward()` with manual optimization


@dataclass(frozen=True)
class Added:
    """What a backward pass has added before it broke off."""

    # How many times a parameter's gradient was added, and how many times a unit, by number, ran in the forward pass.
    times: Mapping[ParamSlot, int] = field(default_factory=dict)
    calls: Mapping[int, int] = field(default_factory=dict)


class Additions:
    """The additions of one backward pass after the other."""

    def __init__(self, units: Sequence[Unit], ran: Callable[[], Sequence[int]]) -> None:
        self._units = units
        self._unit_of = {slot: unit.index for unit in units for slot in unit.slots}
        self.running = OF_THE_USER
        self._ran = ran  # returns the numbers of the units in the order in which they ran forward
        # The unit that is being added to its owners; after a pass that broke off, the one that has added a part.
        self.adding: str | None = None
        self._is_open = False  # a backward pass has begun and not ended
        self._before = Added()
        self._arrived: Counter[ParamSlot] = Counter()
        self._added: dict[ParamSlot, int] = {}
        self._next = Added()  # the `_before` of the next pass
        self._mark = 0  # how many runs of units there were before this microbatch

    def begin_forward(self) -> None:
        """The forward pass of a microbatch begins."""
        self._mark = len(self._ran())

    def retry(self, added: Added) -> None:
        """The next backward pass is that of a part of a microbatch that had added this."""
        self._next = added

    def begin_backward(self, running: Pass) -> None:
        """A backward pass begins. Refused if it is of a part that runs units another number of times than the whole."""
        self.check_none_broke_off()
        before, self._next = self._next, Added()
        calls = self._calls()
        for unit in {self._unit_of[slot] for slot in before.times}:
            here = calls[unit]
            there = before.calls[unit]
            if here not in (0, there):
                raise ODCError(
                    f"Unit {self._units[unit].name!r} ran {there} times for a microbatch that did not fit into memory, "
                    f"and {here} times for a part of it. Its gradient was added for the whole, and nothing tells what "
                    'is missing. Write ODCStrategy(on_out_of_memory="raise"), or run the unit equally often for every '
                    "microbatch."
                )
        self.running = running
        self._is_open = True
        self.adding = None
        self._before = before
        self._forget()

    def arrives(self, slot: ParamSlot) -> bool:
        """A parameter has a gradient; returns whether it is to be added."""
        self._arrived[slot] += 1
        return self._arrived[slot] > self._before.times.get(slot, 0)

    def end_adding(self, slots: Iterable[ParamSlot]) -> None:
        """All gradients of some parameters that have arrived are added."""
        self.adding = None
        for slot in slots:
            self._added[slot] = self._arrived[slot]

    def end_backward(self) -> None:
        """The pass has come to its end, and `fully_shard` has forgotten what ran before it."""
        self._is_open = False
        self._mark = 0
        self._before = Added()
        self._forget()

    def check_none_broke_off(self) -> None:
        """Refuse to continue with a part of the gradient of a microbatch, whose error was caught."""
        if self._is_open and (self._added or self.adding or self._before.times):
            raise ODCError(
                "A backward pass broke off and its error was caught, but a part of its gradient has been added before. "
                "Let the error end the run."
            )

    def undo(self) -> Added | None:
        """The microbatch has broken off: what stays in the accumulators; ``None`` before its backward pass."""
        added = None
        if self._is_open:
            before = self._before
            calls = dict(self._calls())
            # What a unit has added before stands for its calls then.
            for slot in before.times:
                unit = self._unit_of[slot]
                calls[unit] = before.calls.get(unit, 0)
            added = Added({**before.times, **self._added}, calls)
        self.end_backward()
        self._next = Added()
        return added

    def _calls(self) -> Counter[int]:
        """How many times each unit ran in the forward pass of this microbatch."""
        return Counter(self._ran()[self._mark :])

    def _forget(self) -> None:
        self._arrived.clear()
        self._added.clear()
