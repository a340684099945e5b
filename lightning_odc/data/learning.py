"""A cost that learns while its loader plans ahead.

Note [Plans of what everybody knows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank plans alone, so equal plans need equal costs. Measured times reach all ranks with the meeting that ends an
optimizer step. Rank 0 fits the cost to them, and its coefficients go with its next record. So all ranks have the same
numbers, whatever their processors round::

    step    the record of every rank    the record of rank 0 besides
    0       times of step 0
    1       times of step 1             coefficients fitted to step 0
    2       times of step 2             coefficients fitted to steps 0 and 1

A plan may be needed before such a meeting: workers read minibatches ahead, and accumulated minibatches meet once. So
minibatch ``k``, counted from the beginning of training, is planned with what came with the records up to minibatch
``k - lag``. The lag is the number of minibatches read ahead plus those of an optimizer step. Whenever it is planned,
these records are known to all ranks, and later ones do not count. What was known after each of the last ``lag``
minibatches is saved with the loader, so a resumed run makes the plans of an uninterrupted one.

The sampler plans in the process that trains; workers only read assigned samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from lightning_odc.balance import FittedCost, LearntCost
from lightning_odc.balance.learnt import AutoCost

Measurement = tuple[Sequence[Any], float]
"""Lengths of a microbatch's samples, and the seconds of own work that it took."""
Known = TypeVar("Known")

_ALL_UP_TO = 32
_THEN_EACH = 4


class History(Generic[Known]):
    """What was known after each of the latest minibatches; see Note [Plans of what everybody knows].

    Args:
        first: What is known before any minibatch.

    Attributes:
        lag: The number of minibatches that a plan is behind.
        begun: The number of minibatches that were handed out so far.
    """

    def __init__(self, first: Known) -> None:
        self.lag = 1
        self.begun = 0
        self.known: list[tuple[int, Known]] = [(-1, first)]

    def at(self, number: int) -> Known:
        """What minibatch ``number`` is planned with."""
        usable = [value for last, value in self.known if last <= number - self.lag]
        return usable[-1] if usable else self.known[0][1]

    def begin(self) -> int:
        """The number of the minibatch that is handed out now."""
        self.begun += 1
        return self.begun - 1

    def learn(self, number: int, value: Known) -> None:
        """Record what is known after minibatch ``number``, and drop what no plan will ask for again."""
        self.known.append((number, value))
        old = [index for index, (last, _) in enumerate(self.known) if last <= self.begun - self.lag]
        del self.known[: old[-1] if old else 0]


class DelayedCost(History[LearntCost | None]):
    """A cost that learns, as each plan may use it, ``None`` before it knows more than without measurements.

    Args:
        cost: The cost that learns.
        fits: Whether this rank is the one that fits it.
    """

    def __init__(self, cost: FittedCost | AutoCost, fits: bool) -> None:
        super().__init__(cost.snapshot())
        self.cost = cost
        self._fits = fits
        self._unfitted: list[
            tuple[int, Sequence[Any], float]
        ] = []  # the latest measurements: rank, lengths, seconds

    def keep_apart(self) -> None:
        """See `AutoCost.keep_apart`; a `FittedCost` finds it out."""
        if isinstance(self.cost, AutoCost):
            self.cost.keep_apart()

    def measures(self, number: int) -> bool:
        """Whether minibatch ``number`` is worth the measurement, which makes a GPU finish what it was given."""
        return isinstance(self.cost, FittedCost) or number < _ALL_UP_TO or number % _THEN_EACH == 0

    def post(self, number: int) -> list[Any] | None:
        """What this rank tells the others at the end of the step with minibatch ``number``, besides its measurements.

        Fits what all ranks had measured up to the step before.
        """
        if not self._fits or not self._unfitted:
            return None
        self.cost.observe(self._unfitted)
        self._unfitted = []
        learnt = self.cost.snapshot()
        return None if learnt is None else [number, learnt.coefficients, learnt.dense]

    def observe(self, by_rank: Sequence[tuple[Sequence[Measurement], list[Any] | None]]) -> None:
        """Take in an optimizer step; the same, in the same order, on all ranks.

        Args:
            by_rank: What each rank measured, and what `post` returned there.
        """
        for _, post in by_rank:
            if post is not None:
                number, coefficients, dense = post
                learnt = LearntCost(tuple(map(tuple, coefficients)), dense)
                if not self._fits:
                    self.cost.take(learnt)
                self.learn(number, learnt)
        self._unfitted = [
            (rank, lengths, seconds)
            for rank, (measured, _) in enumerate(by_rank)
            for lengths, seconds in measured
        ]

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as numbers, lists and dicts of them. Rank 0 alone has the sums of the fit."""
        known = [
            [last, value and [*map(list, value.coefficients)], value and value.dense]
            for last, value in self.known
        ]
        unfitted = [[rank, list(lengths), seconds] for rank, lengths, seconds in self._unfitted]
        return {"begun": self.begun, "learnt": known, "unfitted": unfitted, "cost": self.cost.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks, or of an older version.
        """
        self.cost.load_state_dict(state["cost"])
        self.begun = state["begun"]
        self._unfitted = [(rank, lengths, seconds) for rank, lengths, seconds in state["unfitted"]]
        self.known = [
            (last, coefficients and LearntCost(tuple(map(tuple, coefficients)), dense))
            for last, coefficients, dense in state["learnt"]
        ]
