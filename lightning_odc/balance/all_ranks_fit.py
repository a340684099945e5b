"""All ranks' coefficients under one assumption about attention; see Note [Fitting a cost]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_odc.balance.costs import PolynomialCost
from lightning_odc.balance.least_squares import Vector, fit_near
from lightning_odc.balance.rank_fit import RankFit, Sums

_UNIT = 4096.0  # tokens; keeps the three columns of the problem at similar size
_PRIOR_WORTH = 0.1  # measurements
_OTHERS_WORTH = 0.5  # what the other ranks say about one counts like this many of its own measurements
_SILENT_FADE = 0.9  # so that a rank that was found slow and gets no samples is soon tried again
_PACKED_ERROR = 0.1  # before anything is known, which counts like ...
_PACKED_ERROR_WORTH = 4.0  # ... so many predictions
_PACKED_ERROR_MEMORY = 0.95
_DIMENSIONS = range(3)


def features(sizes: Sequence[int], dense: bool) -> Vector:
    """What the coefficients are multiplied with, in units of ``_UNIT`` tokens."""
    squares = sum(sizes) ** 2 if dense else sum(size * size for size in sizes)
    return [squares / (_UNIT * _UNIT), sum(sizes) / _UNIT, 1.0]


@dataclass
class AllRanksFit:
    """The fits of all ranks.

    Attributes:
        dense: whether attention runs over all tokens of a microbatch.
        prior: the shape to start from, in units of ``_UNIT`` tokens.
        ranks: one fit per rank.
        is_fitted: there was a measurement.
        mispredicted: sum of its relative errors when it predicted microbatches of several samples; old ones fade.
        predicted: how many these are.
    """

    dense: bool
    prior: Vector
    ranks: list[RankFit]
    is_fitted: bool = False
    mispredicted: float = _PACKED_ERROR * _PACKED_ERROR_WORTH
    predicted: float = _PACKED_ERROR_WORTH

    @classmethod
    def near(cls, prior: PolynomialCost, num_ranks: int, dense: bool) -> AllRanksFit:
        """With nothing known but a prior."""
        start = [prior.quadratic * _UNIT * _UNIT, prior.linear * _UNIT, prior.constant]
        return cls(dense, start, [RankFit(list(start)) for _ in range(num_ranks)])

    def observe(self, measured: Sequence[tuple[int, list[int], float]], forgetting: float) -> None:
        """Take in ranks, sizes and seconds of microbatches, and fit again."""
        for rank, sizes, seconds in measured:
            row = [feature / seconds for feature in features(sizes, self.dense)]
            if self.is_fitted and len(sizes) > 1:
                error = min(abs(self.ranks[rank].error(row)), 1.0)
                self.mispredicted = _PACKED_ERROR_MEMORY * self.mispredicted + error
                self.predicted = _PACKED_ERROR_MEMORY * self.predicted + 1
            self.ranks[rank].add(row, forgetting, self.is_fitted)
        for rank in set(range(len(self.ranks))).difference(rank for rank, _, _ in measured):
            self.ranks[rank].sums.fade(_SILENT_FADE)
        if any(rank.sums.weight for rank in self.ranks):
            self._fit()

    def _fit(self) -> None:
        """All ranks together near the prior, then each near that fit times its own slowness."""
        shape, slowness = self.prior, [1.0] * len(self.ranks)
        for _ in range(2):
            everyone = Sums()
            for rank, factor in zip(self.ranks, slowness, strict=True):
                everyone.merge(rank.sums, factor)
            scale = everyone.slowness(shape, 0.0)
            typical = [everyone.products[i][i] / everyone.weight for i in _DIMENSIONS]
            pulls = [_PRIOR_WORTH * value for value in typical]
            shape = fit_near(everyone.products, everyone.targets, pulls, [scale * value for value in shape])
            slowness = [rank.sums.slowness(shape, _OTHERS_WORTH) for rank in self.ranks]
        for rank, factor in zip(self.ranks, slowness, strict=True):
            pulls = [_OTHERS_WORTH * value / (factor * factor) for value in typical]
            near = [factor * value for value in shape]
            rank.fit = fit_near(rank.sums.products, rank.sums.targets, pulls, near)
        self.is_fitted = True

    @property
    def packed_error(self) -> float:
        """By how much it usually mispredicts a microbatch of several samples, relative to its seconds."""
        return self.mispredicted / self.predicted

    @property
    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """By rank: seconds per squared token, per token, and per microbatch."""
        return tuple((a / (_UNIT * _UNIT), b / _UNIT, c) for a, b, c in (rank.fit for rank in self.ranks))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as numbers, lists and dicts of them."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> AllRanksFit:
        """From `state_dict`."""
        ranks = [RankFit(**{**rank, "sums": Sums(**rank["sums"])}) for rank in state["ranks"]]
        return cls(**{**state, "ranks": ranks})
