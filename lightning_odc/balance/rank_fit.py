"""One rank's measured microbatches as the sums of a least-squares problem; see Note [Fitting a cost]."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_odc.balance.least_squares import Matrix, Vector

_USUAL_ERROR = 0.1  # before anything is known
_LEAST_ERROR = 0.005
_ERRORS_KEPT = 2.5  # times the usual error: the full weight
_ERROR_MEMORY = 0.9
_STRIKES = 3
_KEPT_AFTER_CHANGE = 0.02
_DIMENSIONS = range(3)


@dataclass
class Sums:
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

    def merge(self, other: Sums, slowness: float) -> None:
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
class RankFit:
    """One rank: its three coefficients, and how far off its measurements usually are."""

    fit: Vector
    sums: Sums = field(default_factory=Sums)
    usual_error: float = _USUAL_ERROR
    strikes: int = 0

    def error(self, row: Vector) -> float:
        """By how much the fit is above what a row of relative features measured, relative to it."""
        return math.fsum(self.fit[i] * row[i] for i in _DIMENSIONS) - 1

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
