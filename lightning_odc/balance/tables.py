"""Samples as rows of a table, each as long as the longest: sorted samples, cut into tables of least cost.

A rank's sorted samples are cut. If the table with the longest row had other samples than the next
longest ones, exchanging them would make no row longer. So the least cost of the first ``i`` samples follows from those
of fewer samples::

    least[i] = min over j of  least[j] + (i - j) * cost[i - 1] + overhead        j .. i - 1 are one table

Example: rows of 10, 10, 30 and 40 tokens, a token costs 1 and a table 15, no cap. ``least`` is 0, 25, 35, 80 for up to
three samples. With the fourth, the last is alone, ``80 + 40 + 15 = 135``; or the last two are together,
``35 + 2 * 40 + 15 = 130``; or the last three, ``25 + 3 * 40 + 15 = 160``; or all, 175. So ``least[4]`` is 130.

If samples have rows of numbers, the first ones are sorted and padded. What the others cost does not depend on the cut
and is added to it. Their caps make tables begin later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.collation import Collation
from lightning_odc.balance.costs import MinibatchCosts
from lightning_odc.balance.microbatches import (
    Bins,
    Groups,
    Microbatches,
    Pieces,
    grid_scale,
    lower_bound,
    sums,
)


class Tables(Microbatches):
    """Samples as rows of a table, each as long as the longest. The first number is padded, the others add up."""

    is_additive = False
    most_lined_up = 256

    def __init__(
        self, rows: Ints, caps: Ints, costs: MinibatchCosts, collation: Collation, below: bool = False
    ) -> None:
        rows, caps = rows.reshape(len(rows), -1), caps.reshape(len(caps), -1)
        order = np.argsort(rows[:, 0], kind="stable")
        super().__init__(len(caps), order)
        kinds = 1 if costs.ranks_equal else self.num_ranks
        self.tokens, self._caps = rows[order, 0], caps[:kinds].T
        self._is_stacked = collation.kind == "stacked"
        # Samples that are not neighbours may fit together, so no bound follows from the other numbers.
        self._others = list((rows[order, 1:] * (not below)).T)
        samples, extra = costs.samples[:, order], costs.extra_cost[:, order]
        overhead = costs.overhead[:kinds]
        self.scale = grid_scale(float(samples.max() + overhead.max()) * (len(rows) + 1))
        whole = np.floor if below else np.rint
        of_rows = whole((samples - extra) * self.scale)
        # A cost that falls while samples get longer is the largest so far. ``below``, it is the smallest that follows:
        # then no plan costs less than `bound`.
        if below:
            of_rows = np.minimum.accumulate(of_rows[:, ::-1], axis=1)[:, ::-1]
        of_rows = np.maximum.accumulate(of_rows, axis=1)
        self._row_costs = np.broadcast_to(of_rows, (kinds, len(rows)))
        self._extra = np.broadcast_to(np.floor(extra * self.scale), (kinds, len(rows)))
        # Of equal plans, the one with fewer microbatches is better, so each costs a grid point more.
        self.overhead = whole(overhead * self.scale) + (not below)
        self._has_extra = bool(self._extra.any())
        self.costs = self._row_costs + self._extra
        # What all samples cost if they are cut together, and the part of each sample in that.
        firsts = self._firsts(int(np.argmax(self._caps[0])), np.arange(len(self)))
        total, self._pool = cut(self._row_costs.min(0), firsts, float(self.overhead.min()))
        self._level = total + float(self._extra.min(0).sum())
        sizes = np.array([len(table) for table in self._pool])
        longest = self._row_costs[:, [table[-1] for table in self._pool]]
        share = longest + np.rint(self.overhead[:, None] / sizes)
        self.parts = np.repeat(share, sizes, axis=1) + self._extra

    def _firsts(self, row: int, samples: Ints) -> Ints:
        """For each place in ``samples``, which rise, the first one that may share a table with it."""
        tokens, places = self.tokens[samples], np.arange(len(samples))
        firsts = places + 1 - self._caps[0, row] // tokens
        for numbers, cap in zip(self._others, self._caps[1:, row], strict=True):
            ends = np.cumsum(numbers[samples])
            firsts = np.maximum(firsts, np.searchsorted(np.append(0, ends), ends - cap))
        if self._is_stacked:
            firsts = np.maximum(firsts, np.searchsorted(tokens, tokens))
        return np.clip(firsts, 0, places)

    def bins(self, ranks: Ints, groups: Ints) -> tuple[Floats, Ints]:
        """``least[p, i]``: the least cost of the first ``i`` samples, as in the example above, of all sets at once."""
        rows, lines = self.rows(ranks), np.arange(len(groups))
        real, known = groups < len(self), groups % len(self)
        costs, tokens = self._row_costs[rows[:, None], known], self.tokens[known]
        heights = np.maximum(self._caps[0, rows, None] // tokens, 1)  # one alone is never refused
        others = [own[known] for own in self._others]
        caps = [np.maximum(cap[rows, None], own) for cap, own in zip(self._caps[1:], others, strict=True)]
        before = [np.cumsum(own, axis=1) - own for own in others]
        least, cuts = np.zeros((len(groups), groups.shape[1] + 1)), np.zeros_like(groups)
        for last in range(groups.shape[1]):
            rising = np.arange(last + 1, 0, -1)
            total = rising * costs[:, last, None] + least[:, : last + 1]
            total[rising > heights[:, last, None]] = np.inf
            for own, begins, cap in zip(others, before, caps, strict=True):
                ends = (begins + own)[:, last, None]
                total[ends - begins[:, : last + 1] > cap[:, last, None]] = np.inf
            if self._is_stacked:
                total[tokens[:, : last + 1] != tokens[:, last, None]] = np.inf
            cuts[:, last] = begin = total.argmin(1)
            least[:, last + 1] = total[lines, begin] + self.overhead[rows]
        ends, places = real.sum(1), np.zeros_like(groups)
        loads = least[lines, ends]
        if self._has_extra:
            loads = loads + np.where(real, self._extra[rows[:, None], known], 0.0).sum(1)
        while ends.any():  # from the last table to the first: what is before it is one place further
            ends = np.where(ends, cuts[lines, ends - 1], 0)
            places += np.arange(groups.shape[1]) < ends[:, None]
        return loads, places

    def costs_of(self, ranks: Ints, samples: Ints, begins: Ints) -> Floats:
        rows, counts = self.rows(ranks), np.diff(begins, append=len(samples))
        longest = self._row_costs[rows, samples[begins + counts - 1]]
        found = counts * longest + self.overhead[rows]
        if not self._has_extra:
            return found
        return found + sums(self._extra[np.repeat(rows, counts), samples], begins)

    def bound(self) -> float:
        filled = self.tokens / np.maximum(self._caps[0, :, None], self.tokens)
        least = self.costs + np.floor(self.overhead[:, None] * filled)
        alone = float((self.costs + self.overhead[:, None]).min(0).max())
        level = self._level / self.num_ranks if len(self.costs) == 1 else 0.0
        return max(lower_bound(least, self.num_ranks), alone, level)

    def divisions(self) -> Iterator[Pieces]:
        """The tables of all samples cut together, whole, and in parts that cost little of a rank's load."""
        sizes, costs_of = self._pieces(np.array([table[0] for table in self._pool]))
        costs, ends = costs_of.min(0), np.cumsum(sizes)
        limit, tried = self.bound(), 0
        for share in (math.inf, 1.0, 0.5, 0.25):
            counts = np.clip(np.ceil(costs / (share * limit)).astype(np.int64), 1, sizes)
            if (count := int(counts.sum())) > tried:
                tried = count
                part = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
                first, size = np.repeat(ends - sizes, counts), np.repeat(sizes, counts)
                yield self._pieces(first + size * part // np.repeat(counts, counts))
        if tried < len(self):
            yield self._pieces(np.arange(len(self)))

    def _pieces(self, begins: Ints) -> Pieces:
        """All samples in tables that begin at these ones."""
        samples, count = np.arange(len(self)), len(begins)
        by_rank = [self.costs_of(np.full(count, rank), samples, begins) for rank in range(len(self.costs))]
        return np.diff(begins, append=len(self)), np.array(by_rank)

    def counts(self, groups: Ints) -> Sequence[int]:
        likely = int(self.bins(np.arange(len(groups)), groups)[1].max()) + 1
        return range(max(likely - 2, 1), min(likely + 1, groups.shape[1]) + 1)

    def in_step(self, groups: Groups, counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Tables of the same places in every group, which cost least if all ranks wait for the longest rows."""
        if len(set(map(len, groups))) > 1:
            return
        rows, samples = self.rows(np.arange(len(groups))), np.array(groups)
        firsts = np.max([self._firsts(row, group) for row, group in zip(rows, samples, strict=True)], axis=0)
        costs = self._row_costs[rows[:, None], samples].max(0)
        _, tables = cut(costs, firsts, float(self.overhead.max()))
        yield [[[group[place] for place in table] for table in tables] for group in groups]

    def along(self, rank: int, samples: list[int], profile: list[float]) -> tuple[Bins, list[float]] | None:
        """``least[i]``: what the profile and the longest ``i`` samples in the tables so far cost together."""
        # In each turn one more table, of samples ``j .. i - 1``, is put on the next entry of the profile.
        row, count = rank if len(self.costs) > 1 else 0, len(samples)
        falling = np.array(samples[::-1])
        places = np.arange(count + 1)
        extra = np.append(0.0, np.cumsum(self._extra[row, falling]))
        costs = (places - places[:-1, None]) * self._row_costs[row, falling, None]  # [j, i]
        costs = costs + extra - extra[:-1, None] + self.overhead[row]
        ends = count - self._firsts(row, falling[::-1])[::-1]  # [j] the last sample that fits
        costs = np.where((places > places[:-1, None]) & (places <= ends[:, None]), costs, np.inf)
        least, begins = np.where(places, np.inf, 0.0), []
        for limit in profile:
            total = least[:-1, None] + np.maximum(costs, limit)
            begins.append(total.argmin(0).tolist())
            least = total.min(0)
        if least[-1] == np.inf:
            return None
        found, end = [], count
        for begin in reversed(begins):
            found.append((float(costs[begin[end], end]), samples[count - end : count - begin[end]]))
            end = begin[end]
        found.reverse()
        if not self._has_extra:  # in rows of numbers, the longest tables are not the costliest
            found.sort(key=lambda one: -one[0])
        return [bin_ for _, bin_ in found], [load for load, _ in found]


def cut(costs: Floats, firsts: Ints, overhead: float) -> tuple[float, list[range]]:
    """Consecutive tables of least total cost: the cost, and the places of the samples of each table.

    Of each sample ``[n]``: what a row as long costs, and the first sample that may share a table with it; both rise.
    """
    # If a table may begin at either of two samples, the later one is better from some sample on, and stays better: rows
    # only get longer, and it has fewer of them. So beginnings are queued with the samples from which they are better,
    # and one that another overtakes before that is dropped. That takes about as long as sorting.
    of_rows, rising = costs.tolist(), firsts.tolist()
    least, begins = [0.0], list[int]()  # [n + 1] cost of the samples before each, [n]
    queue, times, head = list[int](), list[int](), 0  # beginnings, and the sample from which each is the best
    for here, cost in enumerate(of_rows):
        time = here
        while len(queue) > head:
            last = queue[-1]
            time = bisect_right(of_rows, (least[here] - least[last]) / (here - last), here)
            if time > here and rising[time - 1] > last:
                time = bisect_right(rising, last, here)
            if time > times[-1] and time > here:
                break
            time = here
            queue.pop()
            times.pop()
        queue.append(here)
        times.append(time)
        while len(queue) > head + 1 and times[head + 1] <= here:
            head += 1
        begins.append(queue[head])
        least.append(least[queue[head]] + (here + 1 - queue[head]) * cost + overhead)
    tables, end = list[range](), len(begins)
    while end:
        tables.append(range(begins[end - 1], end))
        end = begins[end - 1]
    return least[-1], tables[::-1]
