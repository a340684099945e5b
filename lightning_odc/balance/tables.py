"""Samples as rows of a table, each as long as the longest: sorted samples, cut into tables of least cost.

A rank's sorted samples are cut. If the table with the longest row had other samples than the next longest ones,
exchanging them would make no row longer. So the least cost of the first ``i`` samples follows from those of fewer
samples::

    least[i] = min over j of  least[j] + (i - j) * cost[i - 1] + overhead        j .. i - 1 are one table

Example: rows of 10, 10, 30 and 40 tokens, a token costs 1 and a table 15, no cap. ``least`` is 0, 25, 35, 80 for up to
three samples. With the fourth, the last is alone, ``80 + 40 + 15 = 135``; or the last two are together,
``35 + 2 * 40 + 15 = 130``; or the last three, ``25 + 3 * 40 + 15 = 160``; or all, 175. So ``least[4]`` is 130.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, as_cap
from lightning_odc.balance.collation import Collation
from lightning_odc.balance.costs import MinibatchCosts
from lightning_odc.balance.microbatches import Bins, Groups, Microbatches, Pieces, Samples
from lightning_odc.balance.packed import Packed

_SHARES = (math.inf, 1.0, 0.5, 0.25, 1e-9)  # of a rank's load, that a piece may cost


class Tables(Microbatches):
    """Samples as rows of a table, each as long as the longest."""

    most_lined_up = 256

    def __init__(self, num_ranks: int, rows: Ints, cap: int, costs: MinibatchCosts, is_stacked: bool) -> None:
        super().__init__(num_ranks, rows, cap, costs)
        self.bulk = self.costs.sum(0).tolist()
        self._is_stacked = is_stacked
        self.overhead = self.overhead + 1  # of equal plans, the one with fewer microbatches is better
        self.overhead_of = self.by_rank(self.overhead)
        # A cost that falls while samples get longer is the largest so far; in bounds, the smallest that follows.
        self._padded = np.maximum.accumulate(self.costs, axis=1)
        self.smallest = np.minimum.accumulate(self.costs[:, ::-1], axis=1)[:, ::-1]
        self._padded_of = self.by_rank(self._padded)
        self._heights: list[int] = (cap // self.sizes).tolist()
        # All samples cut together, which no plan undercuts, and the part of each sample in that.
        everything = range(len(self))
        firsts = self._firsts(everything)
        self._total, parts = cut(self._padded.min(0).tolist(), firsts, int(self.overhead.min()))
        self._pool = [everything[part] for part in parts]
        sizes = [len(table) for table in self._pool]
        longest = self._padded[:, [table[-1] for table in self._pool]]
        shares = longest + self.overhead[:, None] // sizes
        self.parts = np.repeat(shares, sizes, axis=1)

    def bound(self) -> float:
        bound = super().bound()
        is_rising = bool((self.smallest == self._padded).all())
        if len(self.costs) > 1 or not is_rising:
            return bound
        return max(bound, self._total / self.num_ranks)

    def cost_of(self, rank: int, samples: Samples) -> int:
        return len(samples) * self._padded_of[rank][max(samples)] + self.overhead_of[rank]

    def load(self, rank: int, samples: Samples) -> int:
        load, _ = self._cut(rank, sorted(samples))
        return load

    def bins(self, rank: int, samples: Samples) -> Bins:
        rising = sorted(samples)
        _, tables = self._cut(rank, rising)
        return [rising[table] for table in tables]

    def _cut(self, rank: int, samples: Samples) -> tuple[int, list[slice]]:
        padded = self._padded_of[rank]
        costs = [padded[sample] for sample in samples]
        return cut(costs, self._firsts(samples), self.overhead_of[rank])

    def _firsts(self, samples: Sequence[int]) -> list[int]:
        """For each of these samples, which rise, the place of the first one that may share a table with it."""
        heights = self._heights
        firsts = [max(0, end - heights[sample]) for end, sample in enumerate(samples, 1)]
        if self._is_stacked:
            tokens = [self.tokens[sample] for sample in samples]
            firsts = [max(first, bisect_left(tokens, own)) for first, own in zip(firsts, tokens, strict=True)]
        return firsts

    def divisions(self) -> Iterator[Pieces]:
        """The tables of all samples cut together, whole, and in parts that cost little of a rank's load; each alone."""
        sizes = [len(table) for table in self._pool]
        loads = self._costs_of(self._pool).min(0) / self.bound()
        tried = 0
        for share in _SHARES:
            counts = np.clip(np.ceil(loads / share), 1, sizes).astype(np.int64)
            if counts.sum() == tried:
                continue
            pieces = []
            for table, count in zip(self._pool, counts.tolist(), strict=True):
                ends = [len(table) * part // count for part in range(count + 1)]
                pieces += [table[begin:end] for begin, end in pairwise(ends)]
            tried = len(pieces)
            yield pieces, self._costs_of(pieces)

    def _costs_of(self, tables: Sequence[Sequence[int]]) -> Ints:
        """What tables of consecutive samples cost, ``[1 or num_ranks, tables]``."""
        sizes = np.array([len(table) for table in tables])
        ends = np.cumsum(sizes)
        return sizes * self._padded[:, ends - 1] + self.overhead[:, None]

    def evenly(self, groups: Groups, count: int) -> list[Bins]:
        """Tables of the same places in every group, which cost least if all ranks wait for the longest rows."""
        if len(set(map(len, groups))) > 1:
            return []
        costs = [self._padded[rank % len(self._padded), group] for rank, group in enumerate(groups)]
        firsts = [self._firsts(group) for group in groups]
        _, parts = cut(np.max(costs, 0).tolist(), np.max(firsts, 0).tolist(), max(self.overhead_of))
        return [[group[part] for part in parts] for group in groups]

    def along(self, rank: int, samples: Samples, profile: list[int]) -> Bins:
        """``least[i]``: what the profile and the shortest ``i`` samples in the tables so far cost together."""
        # In each turn one more table, of samples ``j .. i - 1``, is put on the next entry of the profile.
        row = rank % len(self._padded)
        begins = np.arange(len(samples))[:, None]
        ends = np.arange(1, len(samples) + 1)
        costs = (ends - begins) * self._padded[row, samples] + self.overhead_of[rank]
        fits = (begins < ends) & (begins >= self._firsts(samples))
        costs = np.where(fits, costs, math.inf)  # [j, i - 1]
        least = np.full(len(samples) + 1, math.inf)
        least[0] = 0.0
        cuts = []
        for limit in reversed(profile):
            total = least[:-1, None] + np.maximum(costs, limit)
            cuts.append(total.argmin(0).tolist())
            least = np.append(math.inf, total.min(0))
        if least[-1] == math.inf:
            return []
        bins: Bins = []
        end = len(samples)
        for begins_of in reversed(cuts):
            begin = begins_of[end - 1]
            bins.append(samples[begin:end])
            end = begin
        return bins


def cut(costs: list[int], firsts: list[int], overhead: int) -> tuple[int, list[slice]]:
    """Consecutive tables of least total cost: the cost, and the tables.

    Args:
        costs: What a row as long as each sample costs; they rise.
        firsts: The first sample that may share a table with each; they rise.
        overhead: What a table costs besides.

    Example:
        >>> cut([10, 10, 30, 40], [0, 0, 0, 0], 15)
        (130, [slice(0, 2, None), slice(2, 4, None)])
    """
    # If a table may begin at either of two samples, the later one is better from some sample on, and stays better: rows
    # only get longer, and it has fewer of them. So no table begins before the best one of the sample before.
    least = [0]
    begins = []
    begin = 0
    for end, cost in enumerate(costs, 1):
        begin = max(begin, firsts[end - 1])
        best = least[begin] + (end - begin) * cost
        for other in range(begin + 1, end):
            total = least[other] + (end - other) * cost
            if total < best:
                best = total
                begin = other
        least.append(best + overhead)
        begins.append(begin)
    tables = []
    end = len(costs)
    while end:
        tables.append(slice(begins[end - 1], end))
        end = begins[end - 1]
    return least[-1], tables[::-1]


def microbatches_of(
    lengths: Ints, max_tokens: int | None, cost: Any, num_ranks: int, collation: Collation
) -> Microbatches:
    """The samples of a minibatch, after all checks of the cap and of costs."""
    rows = collation.row_lengths(lengths)
    cap = as_cap(rows, max_tokens)
    costs = MinibatchCosts.of(cost, lengths, num_ranks, collation).whole()
    if collation.is_table:
        return Tables(num_ranks, rows, cap, costs, collation.kind == "stacked")
    return Packed(num_ranks, rows, cap, costs)
