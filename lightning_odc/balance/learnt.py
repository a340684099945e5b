"""A cost that measured times correct: one speed per rank, and the share of the quadratic part where no model says it.

Note [One speed per rank]
~~~~~~~~~~~~~~~~~~~~~~~~~
The speed of a rank in a microbatch is what the microbatch costs over the seconds that it took. So all microbatches
count alike, long or short. The speed of a rank is the mean of these, each weighted by itself, so that a pause hardly
counts. Older microbatches count like ``_MEMORY`` new ones, however many they are. If the cost is right, the speeds of a
rank differ by noise alone. A cost without a model is tested with several shares of the quadratic part, and the one
by which speeds of the same rank are most alike is right. Example: samples of 1,000 and 4,000 tokens take 2 and 20
seconds. By ``s + s^2 / 1000``, both speeds are 1,000; by ``s + s^2 / 4000``, they are 625 and 400.

Ranks are taken for equal unless they differ by more than chance, and the share is taken as given unless another one
errs clearly less: then all runs have the same plans. If a rank becomes slow, its old speeds are forgotten after about
20 microbatches.

All ranks have equal sums, since they send them to each other: Note [Plans of what all ranks know]. From these they
compute by single operations of floats, which give the same numbers on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import Cost, PolynomialCost, with_speeds
from lightning_odc.balance.evaluate import relative_costs

_MEMORY = 8.0  # microbatches, like so many of which older ones count at most
_ENOUGH = 6.0  # microbatches of each rank, for a judgement
_SURE = 4.0  # standard errors
_SLOW = 1.1  # times the fastest rank
_GAIN = 0.02  # of the relative error, that another share must save
_SHARES = [2.0**power for power in range(-5, 9) if power]  # of the quadratic part, relative to the given one

Sums = list[float]
"""Of some microbatches: how many; then, for each cost in question, the sums of speeds and of squared speeds."""


@dataclass(frozen=True)
class _Speed:
    """The speed of a rank by some cost."""

    count: float  # of its microbatches, of which old ones count less
    mean: float
    variance: float


class MeasuredCost:
    """What measured times say about a cost; see Note [One speed per rank].

    Args:
        num_ranks: How many ranks are measured.
        prior: The cost as it was given. Of a `PolynomialCost`, which has no model, the share of the quadratic part is
            found, too.
    """

    def __init__(self, num_ranks: int, prior: Cost) -> None:
        self.prior = prior
        self._collation = PACKED
        self._tried = [prior]
        if isinstance(prior, PolynomialCost) and prior.quadratic:
            self._tried += [replace(prior, quadratic=prior.quadratic * share) for share in _SHARES]
        self._sums: list[Sums] = [[0.0]] * num_ranks

    def separate_samples(self) -> None:
        """The samples of a microbatch do not attend to each other, as in the rows of a padded one."""
        self._collation = Collation("apart")

    def sums_of(self, measured: Sequence[tuple[Sequence[int], float]]) -> Sums:
        """The sums of some microbatches, from the lengths of their samples and the seconds that they took."""
        sums = [float(len(measured))]
        if not measured:
            return sums
        lengths = [np.array(own) for own, _ in measured]
        seconds = np.array([own for _, own in measured])
        for cost in self._tried:
            speeds = relative_costs(lengths, cost, collation=self._collation) / seconds
            sums += [math.fsum(speeds), math.fsum(speeds**2)]
        return sums

    def observe(self, by_rank: Sequence[Sums]) -> None:
        """Take in the sums of all ranks for a minibatch."""
        for rank, fresh in enumerate(by_rank):
            kept = _MEMORY / (_MEMORY + fresh[0])
            together = zip_longest(self._sums[rank], fresh, fillvalue=0.0)
            self._sums[rank] = [kept * before + value for before, value in together]

    @property
    def found(self) -> Cost | None:
        """The cost that times show; ``None`` if it is the given one, or too few were measured."""
        if min(sums[0] for sums in self._sums) < _ENOUGH:
            return None
        by_cost = [self._speeds(place) for place in range(len(self._tried))]
        errors = list(map(_error, by_cost))
        best = errors.index(min(errors))
        if errors[best] > errors[0] - _GAIN:
            best = 0
        if _differ(by_cost[best]):
            fastest = max(speed.mean for speed in by_cost[best])
            return with_speeds(self._tried[best], [speed.mean / fastest for speed in by_cost[best]])
        if best:
            return self._tried[best]
        return None

    def _speeds(self, place: int) -> list[_Speed]:
        """The speed of every rank by one of the costs in question."""
        speeds = []
        for count, *sums in self._sums:
            total = sums[2 * place]
            squares = sums[2 * place + 1]
            variance = squares / count - (total / count) ** 2
            speeds.append(_Speed(count, squares / total, max(variance, 0.0)))
        return speeds


def _error(speeds: Sequence[_Speed]) -> float:
    """How much the speeds of the same rank usually differ, relative to their mean."""
    squared = math.fsum(speed.count * speed.variance / speed.mean**2 for speed in speeds)
    return math.sqrt(squared / math.fsum(speed.count for speed in speeds))


def _differ(speeds: Sequence[_Speed]) -> bool:
    """Whether the slowest rank is slower than the fastest one, by more than chance."""
    slowest = min(speeds, key=lambda speed: speed.mean)
    fastest = max(speeds, key=lambda speed: speed.mean)
    chance = math.sqrt(slowest.variance / slowest.count + fastest.variance / fastest.count)
    return fastest.mean > _SLOW * slowest.mean and fastest.mean - slowest.mean > _SURE * chance
