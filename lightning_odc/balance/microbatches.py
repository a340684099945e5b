"""What every kind of microbatch tells the search: a contract with two bodies, `Packed` rows and `Tables`.

The search asks two things. What do some samples cost a rank in well-made microbatches? And what is each sample's part
of that, roughly? Samples are numbered here by rising size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_odc.balance.arrays import Floats, Ints, Plan
from lightning_odc.balance.costs import MinibatchCosts

Samples = list[int]
"""Numbers of samples, which are counted by rising size: 0 is the smallest one."""

Bins = list[Samples]
"""The microbatches of a rank."""

Groups = list[Samples]
"""The samples of every rank."""

Pieces = tuple[Sequence[Sequence[int]], Ints]
"""The samples of each piece that is shared out whole; and what pieces cost, ``[1 or num_ranks, pieces]``, as far as it
can be said alone.
"""


Load = Callable[[int, Samples], int]
"""What samples, or pieces, cost a rank."""


def for_each_rank(load: Load, groups: Groups) -> list[int]:
    """What the group of each rank costs it; or another number."""
    return [load(rank, group) for rank, group in enumerate(groups)]


def additive(costs_of: list[list[int]]) -> Load:
    """A load that is the sum of costs, which are listed by rank."""

    def load(rank: int, pieces: Samples) -> int:
        row = costs_of[rank]
        return sum([row[piece] for piece in pieces])

    return load


class Microbatches(ABC):
    """The samples of a minibatch, with costs as whole numbers: Note [The same plan everywhere]."""

    # Arrays have one row for all ranks if those are equal, else one row per rank.
    parts: Ints  # [1 or num_ranks, n] that each sample adds to a load, as far as it can be said alone
    smallest: Ints  # [1 or num_ranks, n] that each sample costs at least, without overhead
    bulk: Sequence[int]  # of each sample; those of like bulk are dealt out to different ranks
    most_lined_up: int  # samples up to which `along` is fast enough
    near: Sequence[int] = (-2, -1, 0, 1)  # microbatches more than a rank likely has, that are worth trying

    def __init__(self, num_ranks: int, rows: Ints, cap: int, costs: MinibatchCosts) -> None:
        order = np.argsort(rows, kind="stable")
        self.num_ranks = num_ranks
        self.cap = cap
        self.sizes = rows[order]  # [n] tokens of each row
        self.tokens: list[int] = self.sizes.tolist()
        self.fills = self.sizes / cap  # [n] the part of a microbatch that each sample takes at least
        self.order: list[int] = order.tolist()  # the caller's indices
        self.scale = costs.scale
        self.costs = costs.samples[:, order]  # [1 or num_ranks, n] of each sample alone, without overhead
        self.overhead = costs.overhead  # [1 or num_ranks] of a microbatch
        self.costs_of: list[list[int]] = self.by_rank(self.costs)
        self.alone = additive(self.costs_of)  # each in a microbatch, without overhead
        self.overhead_of: list[int] = self.by_rank(self.overhead)

    def __len__(self) -> int:
        return len(self.order)

    def by_rank(self, rows: NDArray[Any]) -> list[Any]:
        """Rows of an array as lists, one for each rank."""
        return rows.tolist() * (self.num_ranks // len(rows))

    @abstractmethod
    def cost_of(self, rank: int, samples: Samples) -> int:
        """What one microbatch costs a rank, overhead included."""

    @abstractmethod
    def load(self, rank: int, samples: Samples) -> int:
        """What samples cost a rank in their best microbatches."""

    @abstractmethod
    def bins(self, rank: int, samples: Samples) -> Bins:
        """The best microbatches of samples on a rank."""

    def likely(self, rank: int, samples: Samples) -> int:
        """How many microbatches are best for samples on a rank."""
        return len(self.bins(rank, samples))

    @abstractmethod
    def along(self, rank: int, samples: Samples, profile: list[int]) -> Bins:
        """As many microbatches as the profile has entries, that together exceed it little; none if they do not fit.

        Collectives wait for the largest ``m``-th microbatch. The *profile* has the largest ones of other ranks. Below
        it, a microbatch costs nothing.
        """

    def evenly(self, groups: Groups, count: int) -> list[Bins]:
        """So many microbatches of each rank that do not depend on those of other ranks."""
        return [self.along(rank, group, [0] * count) for rank, group in enumerate(groups)]

    def divisions(self) -> Iterator[Pieces]:
        """What to share out: each sample alone."""
        yield [[sample] for sample in range(len(self))], self.parts

    def bound(self) -> float:
        """No plan has a largest load below it."""
        overhead: Floats = self.overhead[:, None]
        alone = (self.smallest + overhead).min(0).max()
        shares = (overhead * self.fills).astype(np.int64)
        return max(float(alone), lower_bound(self.smallest + shares, self.num_ranks))

    def plan(self, bins: list[Bins]) -> Plan:
        """The caller's indices: the costliest microbatch first, in each the costliest sample first."""
        plan: Plan = []
        for rank, microbatches in enumerate(bins):
            costs = self.costs_of[rank]
            named = []
            for samples in microbatches:
                falling = sorted([(-costs[sample], self.order[sample]) for sample in samples])
                indices = [index for _, index in falling]
                named.append((-self.cost_of(rank, samples), min(indices), indices))
            plan.append([indices for _, _, indices in sorted(named)])
        return plan


def lower_bound(costs: Ints, num_ranks: int) -> float:
    """No plan has a largest load below this, if these are what samples cost at least, ``[1 or num_ranks, n]``."""
    # It is the largest of three bounds. The first is the weighted mean of the loads, with weights that make ranks of
    # different speed equal. The second is the cost of each sample where it is cheapest. The third, for equal ranks, is
    # ``j + 1`` of the first ``j * num_ranks + 1`` samples, since one rank gets that many of them.
    largest = float(costs.min(0).max())
    if len(costs) > 1:
        quickness = 1 / costs.sum(1)
        weights = quickness / math.fsum(quickness)
        weighted: Floats = np.floor(costs * weights[:, None])
        return max(largest, float(weighted.min(0).sum()))
    falling = -np.sort(-costs[0])
    totals = np.append(0, np.cumsum(falling))
    last = np.arange(num_ranks, len(falling), num_ranks)
    count = np.arange(2, len(last) + 2)
    together = totals[last + 1] - totals[last + 1 - count]
    return max(largest, math.ceil(totals[-1] / num_ranks), float(together.max(initial=0)))
