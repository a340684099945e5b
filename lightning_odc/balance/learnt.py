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
from dataclasses import replace

import numpy as np

from lightning_odc.balance.arrays import Floats
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
        self._sums: Floats = np.zeros((num_ranks, 1 + 2 * len(self._tried)))

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
            self._sums[rank] *= _MEMORY / (_MEMORY + fresh[0])
            self._sums[rank, : len(fresh)] += fresh

    @property
    def found(self) -> Cost | None:
        """The cost that times show; ``None`` if it is the given one, or too few were measured."""
        counts = self._sums[:, :1]  # microbatches of each rank, of which old ones count less
        if counts.min() < _ENOUGH:
            return None
        totals = self._sums[:, 1::2]  # [num_ranks, costs in question]
        squares = self._sums[:, 2::2]
        speeds = squares / totals
        variances = np.maximum(squares / counts - (totals / counts) ** 2, 0.0)
        # How much the speeds of the same rank usually differ, relative to their mean.
        squared_errors = map(math.fsum, (counts * variances / speeds**2).T)
        errors = [math.sqrt(squared / math.fsum(counts.flat)) for squared in squared_errors]
        best = errors.index(min(errors))
        if errors[best] > errors[0] - _GAIN:
            best = 0
        by_rank = speeds[:, best]
        uncertain = (variances / counts)[:, best]  # squared standard errors
        slow = by_rank.argmin()
        fast = by_rank.argmax()
        chance = math.sqrt(uncertain[slow] + uncertain[fast])
        if by_rank[fast] > _SLOW * by_rank[slow] and by_rank[fast] - by_rank[slow] > _SURE * chance:
            return with_speeds(self._tried[best], (by_rank / by_rank[fast]).tolist())
        if best:
            return self._tried[best]
        return None
