"""A cost that measured times correct: one speed per rank, and the share of the quadratic part where no model says it.

Note [One speed per rank]
~~~~~~~~~~~~~~~~~~~~~~~~~
A microbatch takes ``slowness of its rank * (w_1 * part_1 + w_2 * part_2)`` seconds. The parts are what a cost says of
the squares of lengths, and of the lengths. The cost of a model is one part, since its shape is known. Of every
microbatch, a rank takes the parts over the measured seconds, ``f``. If the cost is right, ``slowness * w . f`` is 1. So
all microbatches count alike, long or short, and a pause hardly counts. Each rank has the sums of ``f_i`` and of
``f_i * f_j``, in which old ones fade. In turns, these equations give the weights and the slowness::

    sum over ranks of slowness^2 * S_ij w_j = sum over ranks of slowness * S_i        1 or 2 equations
    slowness of a rank = w . S / (w . S w)

Few microbatches, or similar ones, do not determine them. So both weights are drawn to one that is the same for both
parts, and the slowness is drawn to 1. Ranks are taken for equal unless they differ by more than chance, and the weights
for equal unless others err clearly less: then all runs have the same plans.

All ranks have equal sums, since they send them to each other: Note [Plans of what everybody knows]. From these they
compute by single operations of floats, which give the same numbers on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import Cost, PolynomialCost, with_speeds
from lightning_odc.balance.evaluate import microbatch_costs

_FADED = 0.8  # of old sums, after one more minibatch
_ALIKE = 0.1  # that weights, and ranks, are alike counts like so many measurements
_ENOUGH = 4  # microbatches of each rank, for a judgement
_SURE = 4.0  # standard errors
_SLOW = 1.1  # times the fastest rank
_LEAST_SHARE = 1e-3
_GAIN = 0.02  # the error that other weights must save, relative to a microbatch's seconds
_ROUNDS = 4

Sums = list[float]
"""Of some microbatches: how many, then the sums of each ``f_i``, then those of each ``f_i * f_j``."""


class MeasuredCost:
    """What measured times say about a cost; see Note [One speed per rank].

    Args:
        num_ranks: How many ranks are measured.
        prior: The cost as it was given. Of a `PolynomialCost`, which knows no model, the share of the quadratic part is
            found, too.
    """

    def __init__(self, num_ranks: int, prior: Cost) -> None:
        self.prior = prior
        self._collation = PACKED
        self._parts: list[Cost] = [prior]
        if isinstance(prior, PolynomialCost) and prior.quadratic and prior.linear:
            self._parts = [replace(prior, linear=0.0, constant=0.0), replace(prior, quadratic=0.0)]
        width = len(self._parts)
        self._sums = [[0.0] * (1 + width + width * width)] * num_ranks
        self._weights = [1.0] * width
        self._slowness = [1.0] * num_ranks

    def separate_samples(self) -> None:
        """The samples of a microbatch do not attend to each other, as in the rows of a padded one."""
        self._collation = Collation("apart")

    def sums_of(self, measured: Sequence[tuple[Sequence[int], float]]) -> Sums:
        """The sums of some microbatches, from the lengths of their samples and the seconds that they took."""
        total = [0.0] * len(self._sums[0])
        for lengths, seconds in measured:
            alone = [[list(range(len(lengths)))]]
            f = []
            for part in self._parts:
                ((cost,),) = microbatch_costs(alone, lengths, part, collation=self._collation)
                f.append(cost / seconds)
            terms = [1.0, *f, *(one * other for one in f for other in f)]
            total = [before + term for before, term in zip(total, terms, strict=True)]
        return total

    def observe(self, by_rank: Sequence[Sums]) -> None:
        """Take in the sums of all ranks for a minibatch."""
        for rank, fresh in enumerate(by_rank):
            if all(map(math.isfinite, fresh)):
                old = self._sums[rank]
                self._sums[rank] = [_FADED * before + value for before, value in zip(old, fresh, strict=True)]
        if any(count for count, *_ in self._sums):
            for _ in range(_ROUNDS):
                self._weigh()
                moments = [moments_of(sums, self._weights) for sums in self._sums]
                self._slowness = [(total + _ALIKE) / (squares + _ALIKE) for _, total, squares in moments]

    @property
    def found(self) -> Cost | None:
        """The cost that times show; ``None`` if it is the given one, or too few were measured."""
        if min(count for count, *_ in self._sums) < _ENOUGH:
            return None
        cost = self.prior
        alike = [1.0] * len(self._parts)
        if isinstance(cost, PolynomialCost) and self._error(self._weights) < self._error(alike) - _GAIN:
            square, rest = self._weights
            cost = PolynomialCost(
                cost.quadratic * square, cost.linear * rest, cost.constant * rest, cost.dense
            )
        if self._ranks_differ():
            return with_speeds(cost, [1 / slowness for slowness in self._slowness])
        if cost is self.prior:
            return None
        return cost

    def _weigh(self) -> None:
        """Find the weights of the parts, as ranks of this slowness show them."""
        width = len(self._parts)
        targets = [0.0] * width
        products = [0.0] * (width * width)
        for slowness, (_, *sums) in zip(self._slowness, self._sums, strict=True):
            for place in range(width):
                targets[place] += slowness * sums[place]
            for place in range(width * width):
                products[place] += slowness * slowness * sums[width + place]
        both = math.fsum(targets) / math.fsum(products)
        self._weights = [both] * width
        if width == 2:
            count = math.fsum(sums[0] for sums in self._sums)
            self._weights = solved(products, targets, both, _ALIKE / count)

    def _error(self, weights: Sequence[float]) -> float:
        """The usual error of a microbatch by these weights, if each rank has the slowness that fits best."""
        moments = [moments_of(sums, weights) for sums in self._sums]
        squared = math.fsum(count - total * total / squares for count, total, squares in moments)
        return math.sqrt(max(squared, 0.0) / math.fsum(count for count, _, _ in moments))

    def _ranks_differ(self) -> bool:
        """Whether the slowest rank is slower than the fastest one, by more than chance."""
        known = []
        for sums in self._sums:
            count, total, squares = moments_of(sums, self._weights)
            mean = total / count
            known.append((mean, max(squares / count - mean * mean, 0.0) / count))
        slowest, spread = min(known)
        fastest, other_spread = max(known)
        chance = math.sqrt(spread + other_spread)
        return fastest > _SLOW * slowest and fastest - slowest > _SURE * chance


def moments_of(sums: Sums, weights: Sequence[float]) -> tuple[float, float, float]:
    """Of predicted seconds over measured ones: how many, their sum, and the sum of their squares."""
    count, *of_f = sums
    total = 0.0
    squares = 0.0
    for place, weight in enumerate(weights):
        total += weight * of_f[place]
        for other, second in enumerate(weights, len(weights) * (place + 1)):
            squares += weight * second * of_f[other]
    return count, total, squares


def solved(products: Sequence[float], targets: Sequence[float], near: float, worth: float) -> list[float]:
    """Two weights with the least squared error, above 0, and drawn to ``near`` by as many measurements."""
    first, both, _, second = products
    one = targets[0] + worth * first * near
    other = targets[1] + worth * second * near
    first *= 1 + worth
    second *= 1 + worth
    determinant = first * second - both * both
    if determinant <= 0:  # by rounding
        return [near, near]
    square = (one * second - other * both) / determinant
    rest = (other * first - one * both) / determinant
    if square < 0:
        rest = other / second
    elif rest < 0:
        square = one / first
    least = _LEAST_SHARE * near
    return [max(square, least), max(rest, least)]
