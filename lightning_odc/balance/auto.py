"""The cost that is used where none is given: what the model says, until measured times say otherwise.

Note [When times overrule the model]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cost that comes from the model alone (the *prior*) gives the same plans in every run. It can be wrong: a rank is slow,
a kernel is not the expected one, most of the time goes into launches. So a `FittedCost` learns beside it, and both
predict every microbatch before its time is known. The prior predicts in its own unit, and one factor for all ranks
turns it into seconds. Plans change once, when the errors of the prior are larger than those of the fit by more than
chance: the two are compared microbatch by microbatch, so that a pause hits both alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.costs import MICROBATCH, Cost, PolynomialCost, pair_of, quadratic
from lightning_odc.balance.fitted import FittedCost, LearntCost, Observation
from lightning_odc.balance.transformer import TransformerCost

_KEPT = 256  # predictions that are compared, the latest ones
_ENOUGH = 16
_GAIN = 0.02  # the error that the fit must save, relative to a microbatch's seconds
_SURE = 3.0  # standard errors


def default_prior() -> PolynomialCost:
    """The prior where the model says nothing: attention over the whole microbatch, which packs with care."""
    return quadratic(constant=MICROBATCH, dense=True)


class AutoCost:
    """A cost that stays as it is until measurements refute it; see Note [When times overrule the model].

    Args:
        num_ranks: The number of ranks that are measured.
        prior: The cost to begin with, in any unit.
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
        # Of the latest microbatches: seconds over what the prior says, and the error of the fit relative to its seconds.
        self._predictions: list[tuple[float, float]] = []

    @property
    def num_ranks(self) -> int:
        return self.fitted.num_ranks

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch, those of all ranks in the same order on every rank.

        Raises:
            ValueError: a rank that does not exist, seconds that are not positive and finite, or lengths that are none.
        """
        measured = list(observations)
        if not self.is_refuted and self.fitted.is_fitted:
            self._predictions += [self._compared(*one) for one in measured]
            del self._predictions[:-_KEPT]
        self.fitted.observe(measured)
        self.is_refuted = self.is_refuted or self._fit_is_clearly_better()

    def _compared(self, rank: int, lengths: Sequence[int], seconds: float) -> tuple[float, float]:
        ratio = seconds / self._prior_of(rank, lengths)
        return ratio, seconds / self.fitted.predict(rank, lengths) - 1

    def _prior_of(self, rank: int, lengths: Sequence[int]) -> float:
        sizes = np.array(lengths, dtype=np.float64)
        rows = np.atleast_2d(self.prior.samples(sizes))
        alone = math.fsum(rows[rank % len(rows)].tolist())
        overhead, pair = (np.atleast_1d(term) for term in (self.prior.overhead, pair_of(self.prior)))
        total = sum(lengths)
        across = (total * total - sum(size * size for size in lengths)) / 2
        return alone + float(overhead[rank % len(overhead)]) + float(pair[rank % len(pair)]) * across

    def _fit_is_clearly_better(self) -> bool:
        """Whether the prior errs by more than the fit, on average over the same microbatches, and not by chance."""
        if len(self._predictions) < _ENOUGH:
            return False
        ratios = sorted(ratio for ratio, _ in self._predictions)
        factor = ratios[len(ratios) // 2]
        gains = [_size(ratio / factor - 1) - _size(error) for ratio, error in self._predictions]
        mean = math.fsum(gains) / len(gains)
        variance = math.fsum((gain - mean) * (gain - mean) for gain in gains) / (len(gains) - 1)
        return mean > _GAIN and mean * mean * len(gains) > _SURE * _SURE * variance

    def snapshot(self) -> LearntCost | None:
        """What was learnt, for plans that are made ahead; ``None`` while the prior holds."""
        return self.fitted.snapshot() if self.is_refuted else None

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers, lists and dicts of them."""
        predictions = [list(pair) for pair in self._predictions]
        return {"refuted": self.is_refuted, "predictions": predictions, "fitted": self.fitted.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of another number of ranks.
        """
        self.fitted.load_state_dict(state["fitted"])
        self.is_refuted = state["refuted"]
        self._predictions = [(ratio, error) for ratio, error in state["predictions"]]


def _size(error: float) -> float:
    """How large an error is; an outlier's size does not matter."""
    return min(abs(error), 1.0)


def _polynomial(prior: Cost) -> PolynomialCost | None:
    """The shape from which the fit starts; ``None``: its own."""
    return prior.polynomial if isinstance(prior, TransformerCost) else prior if isinstance(prior, PolynomialCost) else None
