"""What every kind of microbatch tells the search: a contract with two bodies, `Packed` rows and `Tables`.

The search asks a `Microbatches` two things. What do sets of samples cost their ranks in well-made microbatches? And
what is each sample's part of that, roughly? Samples are numbered here by rising size. Sets of samples are the rows of
an array ``[p, k]``: the samples of each, which rise, then the number of all samples, which stands for none.

Note [The same plan everywhere]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank makes the plan for itself, so a plan may not depend on the processor that makes it. The last bit of a sum of
floats does: vector units of different widths add in different orders. So costs are put on a grid of whole numbers,
stored in float64 and small enough that every sum the search can form stays below 2^53. Such sums are exact in any
order. Besides them the planner uses only single float operations (which IEEE 754 fixes), stable sorts, first-minimum
searches, and raw words of a bit generator (which numpy promises never to change).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_odc.balance.arrays import Floats, Ints, Plan

FEW_SAMPLES = 32
"""Samples up to which minibatches are small, so that more is tried."""

_GRID_BITS = 48

Bins = list[list[int]]
"""Microbatches, each a list of samples numbered as in `Microbatches`."""

Groups = list[list[int]]
"""The samples of every rank, numbered as in `Microbatches`."""


Pieces = tuple[Ints, Floats]
"""Samples that are shared out together: how many, one after another, each piece has; and what a piece costs, as far as
it can be said alone, ``[1 or num_ranks, pieces]`` whole numbers.
"""


class Microbatches(ABC):
    """The samples of a minibatch, with costs on a grid: Note [The same plan everywhere]."""

    # Costs are whole numbers, in one row for all ranks if those are equal, else in one row per rank.
    num_ranks: int
    order: Ints  # [n] the caller's indices of the samples
    tokens: Ints  # [n] of each, rising
    costs: Floats  # [1 or num_ranks, n] of each sample alone, without overhead
    parts: Floats  # [1 or num_ranks, n] that each sample adds to a load, as far as it can be said alone
    overhead: Floats  # [1 or num_ranks] of a microbatch
    is_additive: bool  # a load is exactly the sum of parts
    scale: float  # grid points per unit of the caller's costs
    most_lined_up: int  # samples up to which `along` is fast

    def __init__(self, num_ranks: int, order: Ints) -> None:
        self.num_ranks = num_ranks
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, ranks: Ints) -> Ints:
        """The rows of the arrays that are about these ranks."""
        return ranks if len(self.costs) > 1 else np.zeros_like(ranks)

    def loads(self, ranks: Ints, groups: Ints) -> Floats:
        """What ``groups[p, k]`` cost ``ranks[p]`` in their best microbatches, overhead included."""
        return self.bins(ranks, groups)[0]

    @abstractmethod
    def bins(self, ranks: Ints, groups: Ints) -> tuple[Floats, Ints]:
        """``[p]`` loads of ``ranks[p]`` with samples ``groups[p, k]``, and ``[p, k]`` the microbatch of each sample."""

    @abstractmethod
    def costs_of(self, ranks: Ints, samples: Ints, begins: Ints) -> Floats:
        """What microbatches ``[m]`` of these ranks cost with overhead; each begins at ``begins[m]`` of ``samples``."""

    def plan(self, owners: Ints) -> Plan:
        """The plan, if ``owners[n]`` is the rank of each sample."""
        rows = as_rows(owners[None], self.num_ranks)
        places = self.bins(np.arange(self.num_ranks), rows)[1]
        ranks, slots = np.nonzero(rows < len(self))
        return self.in_order(ranks, places[ranks, slots], rows[ranks, slots])

    def in_order(self, ranks: Ints, places: Ints, samples: Ints) -> Plan:
        """The caller's indices: the costliest microbatch first, in each the costliest sample first."""
        order = np.lexsort((samples, places, ranks))
        ranks, places, samples = ranks[order], places[order], samples[order]
        is_first = np.append(True, (np.diff(ranks) != 0) | (np.diff(places) != 0))
        begins, bins, indices = np.flatnonzero(is_first), np.cumsum(is_first) - 1, self.order[samples]
        costs = self.costs_of(ranks[begins], samples, begins)
        falling = np.lexsort((np.minimum.reduceat(indices, begins), -costs, ranks[begins]))
        turns = np.argsort(falling)[bins]  # when the microbatch of each sample has its turn
        flat = indices[np.lexsort((indices, -self.costs[self.rows(ranks), samples], turns))].tolist()
        ends = np.cumsum(np.diff(begins, append=len(samples))[falling]).tolist()
        plan: Plan = [[] for _ in range(self.num_ranks)]
        for rank, begin, end in zip(ranks[begins][falling].tolist(), [0, *ends], ends, strict=False):
            plan[rank].append(flat[begin:end])
        return plan

    @abstractmethod
    def bound(self) -> float:
        """No plan has a largest load below it."""

    @abstractmethod
    def divisions(self) -> Iterator[Pieces]:
        """What to share out."""

    @abstractmethod
    def in_step(self, groups: Groups, counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Equally many microbatches of each rank that do not depend on the costs of other ranks' samples."""

    @abstractmethod
    def along(self, rank: int, samples: list[int], profile: list[float]) -> tuple[Bins, list[float]] | None:
        """As many microbatches as the profile has entries, none empty, that together exceed it little; None: too few.

        Collectives wait for the largest ``m``-th microbatch. The *profile* has the largest ones of other ranks. Below
        it, a microbatch costs nothing. The costliest is the first, and the costs are the second list.
        """

    @abstractmethod
    def counts(self, groups: Ints) -> Sequence[int]:
        """Numbers of microbatches that are worth trying, if all ranks have equally many."""


def as_rows(owners: Ints, num_ranks: int) -> Ints:
    """``[c * num_ranks, k]``: the samples of each rank, then ``n``; from ``owners[c, n]``, ``num_ranks`` for none."""
    count, nothing = owners.shape
    lines = owners + np.arange(count)[:, None] * (num_ranks + 1)
    order = np.argsort(lines.ravel(), kind="stable") % nothing
    sizes = np.bincount(lines.ravel(), minlength=count * (num_ranks + 1))
    slots = np.arange(max(1, sizes.reshape(count, -1)[:, :-1].max()))
    places = (np.cumsum(sizes) - sizes)[:, None] + slots
    rows = np.where(slots < sizes[:, None], order.take(places, mode="clip"), nothing)
    return rows.reshape(count, num_ranks + 1, -1)[:, :-1].reshape(count * num_ranks, -1)


def sums(values: NDArray[Any], begins: Ints) -> NDArray[Any]:
    """The sum of each part of the last axis; parts begin at ``begins``."""
    return np.add.reduceat(values, begins, axis=-1)


def grid_scale(largest_sum: float) -> float:
    """Grid points per unit such that sums up to this one are exact, a power of two."""
    return 2.0 ** (_GRID_BITS - math.frexp(largest_sum)[1])


def lower_bound(costs: Floats, num_ranks: int) -> float:
    """No plan has a largest load below this many grid points, if these are what samples cost at least."""
    # It is the largest of three bounds. The first is the weighted mean of the loads, with weights that make ranks of
    # different speed equal. The second is the cost of each sample where it is cheapest. The third, for equal ranks, is
    # ``j + 1`` of the first ``j * num_ranks + 1`` samples, since one rank gets that many of them.
    largest = float(costs.min(0).max())
    if len(costs) > 1:
        slowness = costs.sum(1)
        weights = (1 / slowness) / math.fsum(1 / slowness)
        return max(float(np.floor(costs * weights[:, None]).min(0).sum()), largest)
    falling = -np.sort(-costs[0], kind="stable")
    totals = np.concatenate([[0.0], np.cumsum(falling)])
    bound = max(math.ceil(totals[-1] / num_ranks), largest)
    last = np.arange(num_ranks, len(falling), num_ranks)
    if len(last):
        bound = max(bound, float((totals[last + 1] - totals[last - np.arange(1, len(last) + 1)]).max()))
    return bound
