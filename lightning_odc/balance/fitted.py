"""A cost that is learnt while training: seconds per microbatch, for each rank.

Note [Fitting a cost]
~~~~~~~~~~~~~~~~~~~~~
A microbatch of segments ``s_i`` on rank ``r`` takes ``a_r sum s_i^2 + b_r sum s_i + c_r`` seconds. If samples have
rows of numbers, ``s_i`` are the first numbers, and the sum of each other number has its own ``b_r``. Each rank keeps
the sums of a least-squares problem in *relative* errors: rows are divided by the measured seconds, so that long and
short microbatches count alike. Old measurements fade. Three rules make it safe to plan with:

- *Few or similar microbatches* do not determine three coefficients. So all ranks together are fitted first, near a
  prior shape. Then each rank is fitted near that result times its own slowness, which one measurement already shows.
- *Outliers* (a pause, a first compilation) have a small weight: it falls with the error beyond the usual one. Three in
  a row on the same side are not outliers: the device has changed, and earlier measurements hardly count from then on.
- *Negative coefficients* are excluded, by trying all choices of the ones that are zero.

The arithmetic is that of single Python floats in a fixed order, see Note [The same plan everywhere]: equal
observations in equal order give equal coefficients on every rank.

Whether attention is dense (Note [Dense attention]) is learnt, too. Both kinds are fitted, and the better one is used:
it predicts microbatches of several samples clearly better before it sees them. It begins with dense attention, because
that tries microbatches of many kinds. The other assumption fills all of them to the cap, and a fit to microbatches
of one size does not show that it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, as_lengths, check_count
from lightning_odc.balance.costs import MICROBATCH, PolynomialCost, quadratic
from lightning_odc.balance.numbers import first_and_rest
from lightning_odc.balance.regression import AllRanksFit, features, widened


@dataclass(frozen=True)
class LearntCost:
    """Seconds of a microbatch for each rank, as a `FittedCost` had learnt them; it stays as it is.

    Attributes:
        coefficients: Seconds per squared token, per token, and per microbatch, for every rank. If samples have rows of
            numbers, there is one for each number in the place of the one per token.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].
    """

    coefficients: tuple[tuple[float, ...], ...]
    dense: bool

    def samples(self, lengths: Floats) -> Floats:
        """Seconds ``[num_ranks, n]`` of samples, without the constant."""
        terms = np.array(self.coefficients)
        first, rest = first_and_rest(lengths)
        linear = terms[:, 1:-1]
        _check_width(linear.shape[1], lengths, is_fitted=linear.shape[1] > 1)
        costs = (terms[:, :1] * first + linear[:, :1]) * first
        if lengths.ndim == 1:
            return costs
        if linear.shape[1] == 1:  # nothing was learnt from rows of numbers so far
            return costs + linear * rest
        for number in range(1, lengths.shape[1]):
            costs = costs + linear[:, number : number + 1] * lengths[:, number]
        return costs

    @property
    def overhead(self) -> Floats:
        return np.array(self.coefficients)[:, -1]

    @property
    def pair(self) -> Floats:
        """What every two tokens of different samples in one microbatch cost."""
        return 2 * np.array(self.coefficients)[:, 0] * self.dense


def _check_width(known: int, lengths: Ints | Floats, is_fitted: bool) -> None:
    """Refuse samples of another number of numbers than a cost has learnt from."""
    found = 1 if lengths.ndim == 1 else lengths.shape[1]
    if known != found and is_fitted:
        raise ValueError(
            f"this cost has learnt from samples of {known} numbers each, and these have {found}: begin with a new one, "
            'cost="fitted", or FittedCost(num_ranks).'
        )


Observation = tuple[int, Sequence[Any], float]
"""Rank, the lengths of a microbatch's segments in tokens (or rows of numbers), and the seconds it took."""

_CLEARLY_BETTER = 0.8  # times the error of the other one


class FittedCost:
    """Seconds of a microbatch, fitted online for each rank; a `Cost` for the planner.

    Until the first observation all ranks are alike and the cost is the prior's. `BalancedDataLoader(cost="fitted")`
    makes one, and `ODCStrategy` feeds it. To feed it by hand, call :meth:`observe` once per minibatch with the
    measurements of *all* ranks, in the same order on every rank.

    Args:
        num_ranks: how many ranks are fitted.
        prior: the shape to start from; its unit does not matter.
        forgetting: how much a measurement counts after one more of the same rank, between 0 and 1; 0.98 remembers
            about 50 microbatches.
        dense: attention runs over all tokens of a microbatch: it takes ``a_r (sum s_i)^2``, see Note [Dense attention].
            By default that is learnt, see Note [Fitting a cost].

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        num_ranks: int,
        prior: PolynomialCost | None = None,
        forgetting: float = 0.98,
        dense: bool | None = None,
    ) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(
                f"forgetting must be above 0 and at most 1, got {forgetting}: FittedCost(8, forgetting=0.98)."
            )
        prior = quadratic(constant=MICROBATCH) if prior is None else prior
        self.num_ranks = check_count("num_ranks", num_ranks)
        self.forgetting = forgetting
        kinds = (True, False) if dense is None else (dense,)
        self._fits = [AllRanksFit.near(prior, self.num_ranks, kind) for kind in kinds]
        self._used = 0

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch and fit again.

        Raises:
            ValueError: a rank that does not exist, seconds that are not positive and finite, or invalid lengths.
        """
        checked = [
            (rank, self._checked(rank, lengths, seconds), seconds) for rank, lengths, seconds in observations
        ]
        for fit in self._fits:
            fit.observe(checked, self.forgetting)
        errors = [fit.packed_error for fit in self._fits]
        if min(errors) < _CLEARLY_BETTER * errors[self._used]:
            self._used = errors.index(min(errors))

    def _checked(self, rank: int, lengths: Sequence[Any], seconds: float) -> Ints:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} was observed, but FittedCost({self.num_ranks}) fits that many ranks."
            )
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"a microbatch of rank {rank} took {seconds} s; measured seconds are positive and finite."
            )
        return self._as_wide(lengths)

    def _as_wide(self, lengths: Sequence[Any]) -> Ints:
        """Lengths with as many numbers as the fit knows, once it knows any."""
        array = as_lengths(lengths)
        _check_width(len(self._fit.prior) - 2, array, self.is_fitted)
        return array

    @property
    def _fit(self) -> AllRanksFit:
        return self._fits[self._used]

    @property
    def is_fitted(self) -> bool:
        """Whether there was a measurement."""
        return self._fit.is_fitted

    @property
    def dense(self) -> bool:
        """Whether attention is taken to run over all tokens of a microbatch."""
        return self._fit.dense

    @property
    def coefficients(self) -> Floats:
        """``[num_ranks, 3]``: seconds per squared token, per token, and per microbatch.

        From rows of ``d`` numbers: ``[num_ranks, 2 + d]``, one for each number instead of the one per token.
        """
        return np.array(self._fit.coefficients)

    def predict(self, rank: int, lengths: Sequence[Any]) -> float:
        """Seconds that a microbatch of these segments will take on ``rank``."""
        terms = features(self._as_wide(lengths), self.dense)
        fit = self._fit.ranks[rank].fit
        return math.fsum(map(mul, fit if len(fit) == len(terms) else widened(fit, len(terms)), terms))

    def samples(self, lengths: Floats) -> Floats:
        """Seconds ``[num_ranks, n]`` of samples, without the constant."""
        return self.snapshot().samples(lengths)

    @property
    def overhead(self) -> Floats:
        return self.snapshot().overhead

    @property
    def pair(self) -> Floats:
        """What every two tokens of different samples in one microbatch cost."""
        return self.snapshot().pair

    def snapshot(self) -> LearntCost:
        """What is known now, for plans that are made ahead, by as much on every rank."""
        return LearntCost(self._fit.coefficients, self.dense)

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers, lists and dicts of them."""
        fits = [fit.state_dict() for fit in self._fits]
        return {"forgetting": self.forgetting, "used": self._used, "fits": fits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks.
        """
        if "fits" not in state:
            raise ValueError('it is of cost="auto".')
        ranks = len(state["fits"][0]["ranks"])
        if ranks != self.num_ranks:
            raise ValueError(
                f"the saved FittedCost has {ranks} ranks, this one {self.num_ranks}; the speeds of other ranks say "
                f"nothing: write FittedCost({self.num_ranks})."
            )
        state = deepcopy(state)
        self.forgetting, self._used = state["forgetting"], state["used"]
        self._fits = [AllRanksFit.of_state(fit) for fit in state["fits"]]
