"""A cost that learns while its loader plans ahead.

Note [Plans of what everybody knows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank plans alone, so equal plans need equal costs. Measured times reach all ranks with the meeting that ends an
optimizer step, but a plan may be needed sooner: workers read minibatches ahead, and accumulated minibatches meet once.
So minibatch ``k``, counted from the beginning of training, is planned with the measurements of those up to ``k - lag``.
The lag is the number of minibatches read ahead plus those of an optimizer step. Whenever it is planned, these
measurements are known to all ranks, and later ones do not count. The knowledge after each of the last ``lag``
minibatches is saved with the loader, so a resumed run makes the plans of an uninterrupted one.

The sampler plans in the process that trains; workers only read assigned samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_odc.balance import FittedCost, LearntCost
from lightning_odc.balance.auto import AutoCost
from lightning_odc.data.history import History

Measurement = tuple[int, Sequence[Any], float]
"""Number of the minibatch, lengths of a microbatch's samples, and the seconds of own work that it took."""


_ALL_UP_TO = 32
_THEN_EACH = 4


class LaggedCost(History[LearntCost | None]):
    """A cost that learns, as each plan may use it, ``None`` before it knows more than without measurements.

    See Note [Plans of what everybody knows].

    Args:
        cost: The cost that learns.
    """

    def __init__(self, cost: FittedCost | AutoCost) -> None:
        super().__init__(cost.snapshot())
        self.cost = cost

    @property
    def has_learnt(self) -> bool:
        """Whether a later run can go on from more than the options say."""
        return True

    def keep_apart(self) -> None:
        """See `AutoCost.keep_apart`; a `FittedCost` finds it out."""
        if isinstance(self.cost, AutoCost):
            self.cost.keep_apart()

    def measures(self, number: int) -> bool:
        """Whether minibatch ``number`` is worth the measurement, which makes a GPU finish what it was given."""
        return isinstance(self.cost, FittedCost) or number < _ALL_UP_TO or number % _THEN_EACH == 0

    def observe(self, by_rank: Sequence[Sequence[Measurement]]) -> None:
        """Take in what the ranks measured in an optimizer step; the same, in the same order, on all ranks."""
        numbers = sorted({number for measured in by_rank for number, _, _ in measured})
        for current in numbers:
            self.cost.observe(
                (rank, lengths, seconds)
                for rank, measured in enumerate(by_rank)
                for number, lengths, seconds in measured
                if number == current
            )
            self.learn(current, self.cost.snapshot())
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as numbers, lists and dicts of them."""
        learnt = [
            [last, known and [*map(list, known.coefficients)], known and known.dense]
            for last, known in self.known
        ]
        return {"begun": self.begun, "learnt": learnt, "cost": self.cost.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks.
        """
        self.cost.load_state_dict(state["cost"])
        self.begun = state["begun"]
        self.known = [
            (last, coefficients and LearntCost(tuple(map(tuple, coefficients)), dense))
            for last, coefficients, dense in state["learnt"]
        ]
