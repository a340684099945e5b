"""Fitting costs to measured times: least squares, one rank's fit, that of all ranks; see Note [Fitting a cost].

Nonnegative coefficients come from the sums of a least-squares problem: three of them, and one more for each number
after the first if samples have rows of numbers. They are plain floats, because the results must be equal on all
processors; see Note [The same plan everywhere]. Below, ``k`` is their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import fsum
from operator import mul
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.costs import PolynomialCost
from lightning_odc.balance.numbers import first_number

Vector = list[float]
Matrix = list[list[float]]

_LEAST_SHARE = 1e-3


def fit_near(products: Matrix, targets: Vector, pulls: Vector, near: Vector) -> Vector:
    """Minimise the weighted squared errors of ``rows @ x`` from 1, with ``x >= 0``, drawn to ``near``.

    Args:
        products: ``[k, k]``, the weighted sum of ``row[i] * row[j]``.
        targets: ``[k]``, the weighted sum of ``row[i]``.
        pulls: ``[k]``, how strongly each coefficient is drawn; they decide what the rows leave open.
        near: ``[k]``, not negative.

    Returns:
        ``[k]``; what would be zero is a thousandth of ``near``.
    """
    terms = range(len(near))
    matrix = [[products[i][j] + (pulls[i] if i == j else 0.0) for j in terms] for i in terms]
    vector = [targets[i] + pulls[i] * near[i] for i in terms]
    best = _not_negative(matrix, vector)
    return [max(value, _LEAST_SHARE * anchor) for value, anchor in zip(best, near, strict=True)]


def _not_negative(matrix: Matrix, vector: Vector) -> Vector:
    """The minimum of ``x @ matrix @ x / 2 - vector @ x`` over ``x >= 0``: the best over all sets of zeros."""
    count = len(vector)
    best, lowest = [0.0] * count, 0.0
    for size in range(count, 0, -1):
        for free in combinations(range(count), size):
            found = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            if found is None or min(found) < 0:
                continue
            # At a minimum over the free coefficients the objective is minus half of vector @ x.
            value = -fsum(vector[i] * x for i, x in zip(free, found, strict=True))
            if value < lowest:
                lowest = value
                best = [0.0] * count
                for i, x in zip(free, found, strict=True):
                    best[i] = x
        if size == count and lowest < 0:
            break  # the minimum over all x is not negative: no need to look further
    return best


def _solve(matrix: Matrix, vector: Vector) -> Vector | None:
    """Gaussian elimination with pivoting; None if the matrix is singular to rounding."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) <= 1e-14 * abs(matrix[column][column]):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[column], strict=True)]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = fsum(rows[row][j] * solution[j] for j in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution


_USUAL_ERROR = 0.1  # before anything is known
_LEAST_ERROR = 0.005
_ERRORS_KEPT = 2.5  # times the usual error: the full weight
_ERROR_MEMORY = 0.9
_STRIKES = 3
_KEPT_AFTER_CHANGE = 0.02


@dataclass
class Sums:
    """The least-squares problem of one rank, or of all together."""

    products: Matrix
    targets: Vector
    weight: float = 0.0

    @classmethod
    def zero(cls, count: int) -> Sums:
        """A regression without rows, with that many coefficients."""
        return cls([[0.0] * count for _ in range(count)], [0.0] * count)

    @property
    def _terms(self) -> range:
        return range(len(self.targets))

    def fade(self, factor: float) -> None:
        """Let everything so far count less."""
        self.products = [[factor * value for value in row] for row in self.products]
        self.targets = [factor * value for value in self.targets]
        self.weight *= factor

    def add(self, row: Vector, weight: float) -> None:
        """One row of relative features, whose target is 1."""
        for i in self._terms:
            self.targets[i] += weight * row[i]
            for j in self._terms:
                self.products[i][j] += weight * row[i] * row[j]
        self.weight += weight

    def merge(self, other: Sums, slowness: float) -> None:
        """All rows of another problem, as if its rank were as fast as this one's."""
        for i in self._terms:
            self.targets[i] += slowness * other.targets[i]
            for j in self._terms:
                self.products[i][j] += slowness * slowness * other.products[i][j]
        self.weight += other.weight

    def slowness(self, shape: Vector, worth_of_one: float) -> float:
        """The factor by which ``shape`` fits best, drawn to 1 as by so many measurements."""
        energy = math.fsum(
            shape[i] * self.products[i][j] * shape[j] for i in self._terms for j in self._terms
        )
        match = math.fsum(self.targets[i] * shape[i] for i in self._terms)
        return (match + worth_of_one) / (energy + worth_of_one)


@dataclass
class RankFit:
    """One rank: its coefficients, and how far off its measurements usually are."""

    fit: Vector
    sums: Sums
    usual_error: float = _USUAL_ERROR
    strikes: int = 0

    def error(self, row: Vector) -> float:
        """The error of the fit on a row of relative features, relative to the measured value."""
        return math.fsum(map(mul, self.fit, row)) - 1

    def add(self, row: Vector, forgetting: float, fitted: bool) -> None:
        """One more measurement, in which all that were before fade."""
        self.sums.fade(forgetting)
        self.sums.add(row, self._weight(row) if fitted else 1.0)

    def _weight(self, row: Vector) -> float:
        """See Note [Fitting a cost]."""
        error = self.error(row)
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


_UNIT = 4096.0  # tokens; keeps the columns of the problem at similar size
_PRIOR_WORTH = 0.1  # measurements
_OTHERS_WORTH = 0.5  # what the other ranks say about one counts like this many of its own measurements
_SILENT_FADE = 0.9  # so that a rank that was found slow and gets no samples is soon tried again
_PACKED_ERROR = 0.1  # before anything is known, which counts like ...
_PACKED_ERROR_WORTH = 4.0  # ... so many predictions
_PACKED_ERROR_MEMORY = 0.95


def features(lengths: Ints, dense: bool) -> Vector:
    """What the coefficients are multiplied with, in units of ``_UNIT`` tokens.

    Args:
        lengths: ``[n]`` tokens of the samples of a microbatch, or ``[n, d]`` numbers.
        dense: whether attention runs over all tokens of a microbatch.

    Returns:
        Squared tokens, the sum of each number, and 1.
    """
    sizes = first_number(lengths).tolist()
    squares = sum(sizes) ** 2 if dense else sum(size * size for size in sizes)
    sums = [sum(number) / _UNIT for number in np.atleast_2d(lengths.T).tolist()]
    return [squares / (_UNIT * _UNIT), *sums, 1.0]


def widened(coefficients: Vector, count: int) -> Vector:
    """Widen a fit of one number: further numbers count like the first one, without the square."""
    square, linear, constant = coefficients
    return [square, *[linear] * (count - 2), constant]


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
        """A regression that knows only a prior."""
        start = [prior.quadratic * _UNIT * _UNIT, prior.linear * _UNIT, prior.constant]
        return cls(dense, start, _unfitted(start, num_ranks))

    def observe(self, measured: Sequence[tuple[int, Ints, float]], forgetting: float) -> None:
        """Take in ranks, lengths and seconds of microbatches, and fit again."""
        for rank, lengths, seconds in measured:
            row = [feature / seconds for feature in features(lengths, self.dense)]
            if len(row) != len(self.prior):  # the first rows of numbers
                assert not self.is_fitted
                self.prior = widened(self.prior, len(row))
                self.ranks = _unfitted(self.prior, len(self.ranks))
            if self.is_fitted and len(lengths) > 1:
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
            everyone = Sums.zero(len(self.prior))
            for rank, factor in zip(self.ranks, slowness, strict=True):
                everyone.merge(rank.sums, factor)
            scale = everyone.slowness(shape, 0.0)
            typical = [everyone.products[i][i] / everyone.weight for i in range(len(self.prior))]
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
        """The usual error for a microbatch of several samples, relative to its seconds."""
        return self.mispredicted / self.predicted

    @property
    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """For each rank: seconds per squared token, per token (per each number), and per microbatch."""
        return tuple(
            (square / (_UNIT * _UNIT), *(each / _UNIT for each in linear), constant)
            for square, *linear, constant in (rank.fit for rank in self.ranks)
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as numbers, lists and dicts of them."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> AllRanksFit:
        """Restore one from `state_dict`."""
        ranks = [RankFit(**{**rank, "sums": Sums(**rank["sums"])}) for rank in state["ranks"]]
        return cls(**{**state, "ranks": ranks})


def _unfitted(start: Vector, num_ranks: int) -> list[RankFit]:
    return [RankFit(list(start), Sums.zero(len(start))) for _ in range(num_ranks)]
