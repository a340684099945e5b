"""A cost that is learnt while training: seconds per microbatch, for each rank.

Note [Fitting a cost]
~~~~~~~~~~~~~~~~~~~~~
A microbatch of segments ``s_i`` on rank ``r`` takes ``a_r sum s_i^2 + b_r sum s_i + c_r`` seconds. Each rank keeps the
sums of a least-squares problem in *relative* errors (rows divided by the measured seconds, so that long and short
microbatches count alike), in which old measurements fade. What makes it safe to plan with:

- *Few or alike microbatches* cannot tell three coefficients apart. So first all ranks together are fitted near a
  prior shape, then each rank near that fit times its own slowness, which one measurement already tells.
- *Outliers* (a pause, a first compilation) have a small weight: it falls with the error beyond the usual one. Three in
  a row on the same side are no outliers but a device that changed: what was known of it hardly counts from then on.
- *Negative coefficients* are excluded, by trying all choices of the ones that are zero.

The arithmetic is that of single Python floats in a fixed order, see Note [The same plan everywhere]: equal
observations in equal order give equal coefficients on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from operator import mul
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Floats, as_lengths, check_count
from lightning_odc.balance.costs import PolynomialCost, quadratic
from lightning_odc.balance.least_squares import Matrix, Vector, fit_near

Observation = tuple[int, Sequence[int], float]
"""Rank, the lengths of a microbatch's segments in tokens, and the seconds it took."""

_UNIT = 4096.0  # tokens; keeps the three columns of the problem at similar size
_PRIOR_WORTH = 0.1  # measurements
_OTHERS_WORTH = 0.5  # what the other ranks say about one counts like this many of its own measurements
_USUAL_ERROR = 0.1  # before anything is known
_LEAST_ERROR = 0.005
_ERRORS_KEPT = 2.5  # times the usual error: the full weight
_ERROR_MEMORY = 0.9
_STRIKES = 3
_SILENT_FADE = 0.9  # so that a rank that was found slow and gets no samples is soon tried again
_KEPT_AFTER_CHANGE = 0.02
_DIMENSIONS = range(3)


@dataclass
class _Sums:
    """The least-squares problem of one rank, or of all together."""

    products: Matrix = field(default_factory=lambda: [[0.0] * 3 for _ in _DIMENSIONS])
    targets: Vector = field(default_factory=lambda: [0.0] * 3)
    weight: float = 0.0

    def fade(self, factor: float) -> None:
        """Let everything so far count less."""
        self.products = [[factor * value for value in row] for row in self.products]
        self.targets = [factor * value for value in self.targets]
        self.weight *= factor

    def add(self, row: Vector, weight: float) -> None:
        """One row of relative features, whose target is 1."""
        for i in _DIMENSIONS:
            self.targets[i] += weight * row[i]
            for j in _DIMENSIONS:
                self.products[i][j] += weight * row[i] * row[j]
        self.weight += weight

    def merge(self, other: _Sums, slowness: float) -> None:
        """All rows of another problem, as if its rank were as fast as this one's."""
        for i in _DIMENSIONS:
            self.targets[i] += slowness * other.targets[i]
            for j in _DIMENSIONS:
                self.products[i][j] += slowness * slowness * other.products[i][j]
        self.weight += other.weight

    def slowness(self, shape: Vector, worth_of_one: float) -> float:
        """The factor by which ``shape`` fits best, drawn to 1 as by so many measurements."""
        energy = math.fsum(
            shape[i] * self.products[i][j] * shape[j] for i in _DIMENSIONS for j in _DIMENSIONS
        )
        match = math.fsum(self.targets[i] * shape[i] for i in _DIMENSIONS)
        return (match + worth_of_one) / (energy + worth_of_one)


@dataclass
class _Rank:
    """One rank: coefficients in units of ``_UNIT`` tokens, and how far off its measurements usually are."""

    fit: Vector
    sums: _Sums = field(default_factory=_Sums)
    usual_error: float = _USUAL_ERROR
    strikes: int = 0

    def add(self, row: Vector, forgetting: float, fitted: bool) -> None:
        self.sums.fade(forgetting)
        self.sums.add(row, self._weight(row) if fitted else 1.0)

    def _weight(self, row: Vector) -> float:
        """See Note [Fitting a cost]."""
        error = math.fsum(self.fit[i] * row[i] for i in _DIMENSIONS) - 1
        kept = _ERRORS_KEPT * self.usual_error
        fresh = 1.25 * min(abs(error), kept)
        self.usual_error = max(_LEAST_ERROR, _ERROR_MEMORY * self.usual_error + (1 - _ERROR_MEMORY) * fresh)
        if abs(error) <= kept:
            self.strikes = 0
            return 1.0
        side = 1 if error > 0 else -1
        self.strikes = self.strikes + side if self.strikes * side > 0 else side
        if abs(self.strikes) < _STRIKES:
            return (kept / error) ** 2
        self.sums.fade(_KEPT_AFTER_CHANGE)
        self.strikes = 0
        return 1.0


class FittedCost:
    """Seconds of a microbatch, fitted online for each rank; a `Cost` for the planner.

    Until the first observation all ranks are alike and the cost is the prior's. Call :meth:`observe` once per
    minibatch with the measurements of *all* ranks, in the same order on every rank.

    Args:
        num_ranks: how many ranks are fitted.
        prior: the shape to start from; its unit does not matter.
        forgetting: how much a measurement counts after one more of the same rank, between 0 and 1; 0.98 remembers
            about 50 microbatches.
        dense: attention runs over all tokens of a microbatch: it takes ``a_r (sum s_i)^2``, see Note [Dense attention].

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        num_ranks: int,
        prior: PolynomialCost | None = None,
        forgetting: float = 0.98,
        dense: bool = False,
    ) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(
                f"forgetting must be above 0 and at most 1, got {forgetting}: FittedCost(8, forgetting=0.98)."
            )
        prior = quadratic() if prior is None else prior
        self.num_ranks = check_count("num_ranks", num_ranks)
        self.forgetting = forgetting
        self.dense = dense
        self._prior = [prior.quadratic * _UNIT * _UNIT, prior.linear * _UNIT, prior.constant]
        self._is_fitted = False
        self._by_rank = [_Rank(list(self._prior)) for _ in range(self.num_ranks)]

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch and fit again.

        Raises:
            ValueError: a rank that does not exist, seconds that are not positive and finite, or lengths that are none.
        """
        rows = [(rank, self._row(rank, lengths, seconds)) for rank, lengths, seconds in observations]
        for rank, row in rows:
            self._by_rank[rank].add(row, self.forgetting, self._is_fitted)
        for rank in set(range(self.num_ranks)).difference(rank for rank, _ in rows):
            self._by_rank[rank].sums.fade(_SILENT_FADE)
        if any(rank.sums.weight for rank in self._by_rank):
            self._fit()

    def _row(self, rank: int, lengths: Sequence[int], seconds: float) -> Vector:
        """The relative features of one observation."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} was observed, but FittedCost({self.num_ranks}) fits that many ranks."
            )
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"a microbatch of rank {rank} took {seconds} s; measured seconds are positive and finite."
            )
        return [feature / seconds for feature in self._features(lengths)]

    def _fit(self) -> None:
        """All ranks together near the prior, then each near that fit times its own slowness."""
        shape, slowness = self._prior, [1.0] * self.num_ranks
        for _ in range(2):
            everyone = _Sums()
            for rank, factor in zip(self._by_rank, slowness, strict=True):
                everyone.merge(rank.sums, factor)
            scale = everyone.slowness(shape, 0.0)
            typical = [everyone.products[i][i] / everyone.weight for i in _DIMENSIONS]
            pulls = [_PRIOR_WORTH * value for value in typical]
            shape = fit_near(everyone.products, everyone.targets, pulls, [scale * value for value in shape])
            slowness = [rank.sums.slowness(shape, _OTHERS_WORTH) for rank in self._by_rank]
        for rank, factor in zip(self._by_rank, slowness, strict=True):
            pulls = [_OTHERS_WORTH * value / (factor * factor) for value in typical]
            near = [factor * value for value in shape]
            rank.fit = fit_near(rank.sums.products, rank.sums.targets, pulls, near)
        self._is_fitted = True

    @property
    def coefficients(self) -> Floats:
        """``[num_ranks, 3]``: seconds per squared token, per token, and per microbatch."""
        return np.array([rank.fit for rank in self._by_rank]) / np.array([_UNIT * _UNIT, _UNIT, 1.0])

    def predict(self, rank: int, lengths: Sequence[int]) -> float:
        """Seconds that a microbatch of these segments will take on ``rank``."""
        return math.fsum(map(mul, self._by_rank[rank].fit, self._features(lengths)))

    def samples(self, lengths: Floats) -> Floats:
        """Seconds ``[num_ranks, n]`` of samples, without the constant."""
        terms = self.coefficients
        return (terms[:, :1] * lengths + terms[:, 1:2]) * lengths

    @property
    def overhead(self) -> Floats:
        return self.coefficients[:, 2]

    @property
    def pair(self) -> Floats:
        return 2 * self.coefficients[:, 0] * self.dense

    def _features(self, lengths: Sequence[int]) -> Vector:
        """What the coefficients are multiplied with, in units of ``_UNIT`` tokens."""
        sizes = as_lengths(lengths).tolist()
        squares = sum(sizes) ** 2 if self.dense else sum(size * size for size in sizes)
        return [squares / (_UNIT * _UNIT), sum(sizes) / _UNIT, 1.0]

    def snapshot(self) -> FittedCost:
        """A copy that stays as it is: for a loader that plans ahead, by as much on every rank."""
        return deepcopy(self)

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers, lists and dicts of them."""
        ranks = [asdict(rank) for rank in self._by_rank]
        return {
            "prior": [*self._prior],
            "forgetting": self.forgetting,
            "dense": self.dense,
            "fitted": self._is_fitted,
            "ranks": ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of another number of ranks.
        """
        if len(state["ranks"]) != self.num_ranks:
            raise ValueError(
                f"the saved FittedCost has {len(state['ranks'])} ranks, this one {self.num_ranks}; the speeds of other "
                f"ranks say nothing: start anew with FittedCost({self.num_ranks})."
            )
        state = deepcopy(state)
        self._prior, self.forgetting = state["prior"], state["forgetting"]
        self.dense, self._is_fitted = state["dense"], state["fitted"]
        self._by_rank = [_Rank(**{**rank, "sums": _Sums(**rank["sums"])}) for rank in state["ranks"]]
