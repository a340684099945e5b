"""The partitioning problem in exact numbers: the cost of each sample on each rank.

Note [The same plan everywhere]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank makes the plan for itself, so a plan may not depend on the processor that makes it. The last bit of a sum of
floats does: vector units of different widths add in different orders. So costs are put on a grid of whole numbers,
stored in float64 and small enough that every sum the search can form stays below 2^53. Such sums are exact in any
order, as are matrix products of them. Besides them the planner uses only single float operations (which IEEE 754
fixes), stable sorts, first-minimum searches, and raw words of a bit generator (which numpy promises never to change).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints

_GRID_BITS = 48


@dataclass(frozen=True, eq=False)
class Workload:
    """Costs on the grid of Note [The same plan everywhere].

    Samples are numbered here by falling cost (the mean over ranks, ties by index), so that "the first" are the
    largest, and ``num_samples`` is the number of no sample.

    Attributes:
        num_ranks: how many ranks share the samples.
        costs: ``[1 or num_ranks, n + 1]`` whole numbers; one row if all ranks are alike; 0 in the last column.
        means: ``[n]`` whole numbers, the mean cost over ranks.
        base: ``[num_ranks]`` whole numbers, what ranks pay before any sample.
        order: ``[n]``, the caller's index of each sample here.
        scale: grid points per unit of the caller's costs, a power of two.
    """

    num_ranks: int
    costs: Floats
    means: Floats
    base: Floats
    order: Ints
    scale: float

    @classmethod
    def of(cls, costs: Floats, num_ranks: int, base: Floats | None = None) -> Workload:
        """Make one from costs ``[1 or num_ranks, n]`` and bases ``[num_ranks]``, finite and not negative."""
        base = np.zeros(num_ranks) if base is None else base
        top = max(float(costs.max()), float(base.max()))
        scale = grid_scale(top * (costs.shape[1] + 1))
        grid = np.rint(costs * scale)
        means = grid[0] if len(grid) == 1 else np.rint(grid.sum(0) / len(grid))
        order = np.argsort(-means, kind="stable")
        padded = np.zeros((len(grid), grid.shape[1] + 1))
        padded[:, :-1] = grid[:, order]
        return cls(num_ranks, padded, means[order], np.rint(base * scale), order, scale)

    @property
    def num_samples(self) -> int:
        return len(self.order)

    @property
    def alike(self) -> bool:
        """Whether a sample costs the same on every rank."""
        return len(self.costs) == 1

    def at(self, ranks: Ints, samples: Ints) -> Floats:
        """Costs ``[p, k]`` of ``samples[p, k]`` on ``ranks[p]``."""
        if self.alike:
            return self.costs[0].take(samples)
        return self.costs.ravel().take(samples + (ranks * self.costs.shape[1])[:, None])


def grid_scale(largest_sum: float) -> float:
    """Grid points per unit such that sums up to this one are exact, a power of two."""
    return 2.0 ** (_GRID_BITS - math.frexp(largest_sum)[1])


def lower_bound(work: Workload, equal_counts: bool = False) -> float:
    """No partition has a largest load below this many grid points.

    It is the largest of three bounds. The first is the weighted mean of the loads, with weights that make ranks of
    different speed equal. The second is the cost of each sample where it is cheapest. The third, for ranks that are
    alike, is ``j + 1`` of the first ``j * num_ranks + 1`` samples, since one rank gets that many of them. With equal
    counts, the rank of the largest sample gets at least the smallest ones besides it.
    """
    cheapest = work.costs[:, :-1].min(0)
    largest = float(cheapest.max())
    others = work.num_samples // work.num_ranks - 1
    if equal_counts and others > 0:
        largest = float(np.sort(cheapest, kind="stable")[:others].sum()) + largest
    if not work.alike:
        return max(_weighted_mean(work), largest)
    costs, ranks = work.costs[0, :-1], work.num_ranks
    bound = max(math.ceil((costs.sum() + work.base.sum()) / ranks), largest)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    last = np.arange(ranks, len(costs), ranks)
    if len(last):
        bound = max(bound, float((sums[last + 1] - sums[last - np.arange(1, len(last) + 1)]).max()))
    return bound


def _weighted_mean(work: Workload) -> float:
    """Sum over samples of the smallest weighted cost: with weights that sum to 1, no largest load is below it."""
    costs = work.costs[:, :-1]
    slowness = costs.sum(1)
    weights = (1 / slowness) / math.fsum(1 / slowness)
    return float(np.floor(costs * weights[:, None]).min(0).sum() + np.floor(work.base * weights).sum())
