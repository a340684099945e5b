"""The default cost: that of the model, until measured times contradict it.

Note [When times overrule the model]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cost that comes from the model alone (the *prior*) gives the same plans in every run. It can be wrong: a rank is slow,
a kernel is not the expected one, most of the time goes into launches. So a `FittedCost` also learns, and both
are compared with the latest measured times. The prior predicts in its own unit, and one factor for all ranks
turns it into seconds. Plans change once: when the prior errs much on one rank, or errs more than the fit, in both cases
by more than chance. The two are compared on the same microbatches, so a pause affects both alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.bins import packing_cost
from lightning_odc.balance.costs import MICROBATCH, Cost, PolynomialCost, pair_of, quadratic
from lightning_odc.balance.fitted import FittedCost, LearntCost, Observation
from lightning_odc.balance.numbers import first_number
from lightning_odc.balance.transformer import TransformerCost

_KEPT = 128  # predictions that are compared, the latest ones
_ENOUGH = 12  # of them, for a judgement
_GAIN = 0.02  # the error that the fit must save, relative to a microbatch's seconds
_SLOW = 0.15  # the error on one rank that is too much, likewise
_SURE = 4.0  # standard errors


def default_prior() -> PolynomialCost:
    """The prior where the model says nothing: attention over the whole microbatch, which packs with care."""
    return quadratic(constant=MICROBATCH, dense=True)


class AutoCost:
    """A cost that stays as it is until measurements refute it; see Note [When times overrule the model].

    Args:
        num_ranks: The number of ranks that are measured.
        prior: The cost to begin with, in any unit; the same on all ranks.
        dense: Whether attention runs over all tokens of a microbatch; ``None``: that is learnt.

    Attributes:
        prior: The cost to begin with.
        fitted: The cost that learns beside it.
        is_refuted: Whether ``fitted`` is in use.
    """

    def __init__(self, num_ranks: int, prior: Cost, dense: bool | None = None) -> None:
        self.prior = prior
        self.fitted = FittedCost(num_ranks, _polynomial(prior), dense=dense)
        self.is_refuted = False
        self._overhead, self._pair = float(prior.overhead), 0.0 if dense is False else float(pair_of(prior))
        self._latest: list[tuple[Observation, float]] = []  # with the seconds over what the prior says

    @property
    def num_ranks(self) -> int:
        return self.fitted.num_ranks

    def keep_apart(self) -> None:
        """The samples of a microbatch turned out not to attend to each other, as in the rows of a padded one."""
        self._pair = 0.0
        if not self.fitted.is_fitted:
            self.fitted = FittedCost(self.num_ranks, _polynomial(self.prior), dense=False)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch, those of all ranks in the same order on every rank.

        Raises:
            ValueError: a rank that does not exist, seconds that are not positive and finite, or invalid lengths.
        """
        measured = list(observations)
        self.fitted.observe(measured)
        if self.is_refuted:
            return
        self._latest += [(one, one[2] / self._prior_of(one[1])) for one in measured]
        del self._latest[: -max(_KEPT, 2 * _ENOUGH * self.num_ranks)]
        if len(self._latest) >= _ENOUGH:
            ratios = sorted(ratio for _, ratio in self._latest)
            factor = ratios[len(ratios) // 2]
            self.is_refuted = self._errs_by_rank(factor) or self._errs_by_microbatch(factor)

    def _prior_of(self, lengths: Sequence[Any]) -> float:
        """What the prior says of a microbatch, in its unit."""
        array = np.array(lengths)
        alone = math.fsum(self.prior.samples(array.astype(np.float64)).tolist())
        sizes = first_number(array).tolist()
        return alone + packing_cost([list(range(len(sizes)))], sizes, self._overhead, self._pair)

    def _errs_by_rank(self, factor: float) -> bool:
        """Whether the prior errs by much on one rank: then that rank is late in every minibatch."""
        errors: list[list[float]] = [[] for _ in range(self.num_ranks)]
        for (rank, _, _), ratio in self._latest:
            errors[rank].append(_within(ratio / factor - 1))
        return any(_is_beyond(_SLOW, of_rank, absolute=True) for of_rank in errors)

    def _errs_by_microbatch(self, factor: float) -> bool:
        """Whether the prior errs by more than the fit on the same microbatches."""
        gains = [
            abs(_within(ratio / factor - 1)) - abs(_within(seconds / self.fitted.predict(rank, lengths) - 1))
            for (rank, lengths, seconds), ratio in self._latest
        ]
        return _is_beyond(_GAIN, gains)

    def snapshot(self) -> LearntCost | None:
        """What was learnt, for plans that are made ahead; ``None`` while the prior holds."""
        return self.fitted.snapshot() if self.is_refuted else None

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers, lists and dicts of them."""
        latest = [[rank, list(lengths), seconds, ratio] for (rank, lengths, seconds), ratio in self._latest]
        return {"refuted": self.is_refuted, "latest": latest, "fitted": self.fitted.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks.
        """
        if "fitted" not in state:
            raise ValueError('it is of cost="fitted".')
        self.fitted.load_state_dict(state["fitted"])
        self.is_refuted = state["refuted"]
        self._latest = [
            ((rank, lengths, seconds), ratio) for rank, lengths, seconds, ratio in state["latest"]
        ]


def _within(error: float) -> float:
    """An error without its outliers."""
    return min(max(error, -1.0), 1.0)


def _is_beyond(limit: float, values: Sequence[float], absolute: bool = False) -> bool:
    """Whether the mean is above a limit, and above zero by more than chance."""
    if len(values) < _ENOUGH:
        return False
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1)
    is_sure = mean * mean * len(values) > _SURE * _SURE * variance
    return is_sure and (abs(mean) if absolute else mean) > limit


def _polynomial(prior: Cost) -> PolynomialCost | None:
    """The shape from which the fit starts; ``None``: its own."""
    if isinstance(prior, TransformerCost):
        return prior.polynomial
    return prior if isinstance(prior, PolynomialCost) else None
