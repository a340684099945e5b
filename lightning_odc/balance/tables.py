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
from itertools import accumulate

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.collation import Collation
from lightning_odc.balance.costs import MinibatchCosts
from lightning_odc.balance.microbatches import Bins, Microbatches, Pieces, Rooms, grid_scale, lower_bound


class Tables(Microbatches):
    """Samples as rows of a table, each as long as the longest.

    Args:
        rows: ``[n]`` or ``[n, d]``, of each sample alone; the first number is padded, the others add up.
        caps: ``[num_ranks]`` or ``[num_ranks, d]``.
        costs: What samples cost; see `MinibatchCosts.forbid_unfitting` for caps that differ.
        collation: Whether rows are padded or must have equal lengths.
        below: A cost that falls somewhere while samples get longer is taken as the largest so far. If ``below``, it is
            taken as the smallest that follows: then no plan costs less than `bound`.
    """

    is_additive = False
    most_lined_up = 256

    def __init__(
        self, rows: Ints, caps: Ints, costs: MinibatchCosts, collation: Collation, below: bool = False
    ) -> None:
        rows, caps = rows.reshape(len(rows), -1), caps.reshape(len(caps), -1)
        order = np.argsort(rows[:, 0], kind="stable")
        super().__init__(len(caps), order)
        kinds = 1 if costs.ranks_equal else self.num_ranks
        self.tokens, self._caps = rows[order, 0], caps[:kinds, 0].tolist()
        self._shortest = self.tokens if collation.kind == "stacked" else np.full(len(rows), self.tokens[-1])
        self._counts = [1] * len(rows)
        self._rooms = Rooms(rows.shape[1] - 1)
        # Samples that are not neighbours may fit together, so no bound follows from the other numbers.
        self._others = self._rooms.sizes(rows[order, 1:] * (not below))
        self._other_caps = self._rooms.sizes(caps[:kinds, 1:])
        samples, extra = costs.samples[:, order], costs.extra_cost[:, order]
        overhead = costs.overhead[:kinds]
        self.scale = grid_scale(float(samples.max() + overhead.max()) * (len(rows) + 1))
        whole = np.floor if below else np.rint
        of_rows = whole((samples - extra) * self.scale)
        if below:
            of_rows = np.minimum.accumulate(of_rows[:, ::-1], axis=1)[:, ::-1]
        of_rows = np.maximum.accumulate(of_rows, axis=1)
        self._row_costs = np.broadcast_to(of_rows, (kinds, len(rows)))
        self._extra = np.broadcast_to(np.floor(extra * self.scale), (kinds, len(rows)))
        # Of equal plans, the one with fewer microbatches is better, so each costs a grid point more.
        self.overhead = whole(overhead * self.scale) + (not below)
        self._set_costs()

    def _set_costs(self) -> None:
        """What follows from the costs of rows: what all samples cost if they are cut together, and samples' parts."""
        self._sizes, self._listed_shortest = self.tokens.tolist(), self._shortest.tolist()
        self._has_extra, self._overheads = bool(self._extra.any()), self.overhead.tolist()
        self._row_lists = self._row_costs.tolist()
        self.costs = self._row_costs * self._counts + self._extra
        fastest = self._row_costs.min(0)
        roomiest = int(np.argmax(self._caps))
        firsts = self._firsts(roomiest, range(len(self)))
        ends = np.cumsum(self._counts).tolist()
        total, pool = cut(fastest.tolist(), firsts, float(self.overhead.min()), ends)
        self._level = total + float(self._extra.min(0).sum())
        self._pool = [list(places) for places in pool]
        longest = np.repeat([bin_[-1] for bin_ in pool], [len(bin_) for bin_ in pool])
        rows = np.repeat([sum(self._counts[i] for i in bin_) for bin_ in pool], [len(bin_) for bin_ in pool])
        share = self._row_costs[:, longest] + np.rint(self.overhead[:, None] / rows)
        self.parts = share * self._counts + self._extra

    def _firsts(self, row: int, samples: Sequence[int]) -> list[int]:
        """For each place in ``samples``, which rise, the first one that may share a table with it."""
        sizes, shortest = self._sizes, self._listed_shortest
        cap, other_cap, fits = self._caps[row], self._other_caps[row], self._rooms.fits
        first = rows = others = 0
        firsts = []
        for place, sample in enumerate(samples):
            rows, others = rows + self._counts[sample], others + self._others[sample]
            while first < place and (
                rows * sizes[sample] > cap
                or shortest[samples[first]] < sizes[sample]
                or not fits(others, other_cap)
            ):
                rows, others = rows - self._counts[samples[first]], others - self._others[samples[first]]
                first += 1
            firsts.append(first)
        return firsts

    def _make_bins(self, row: int, samples: list[int]) -> tuple[float, Bins]:
        costs = [self._row_lists[row][sample] for sample in samples]
        ends = list(accumulate(map(self._counts.__getitem__, samples)))
        firsts = self._firsts(row, samples)
        load, bins = cut(costs, firsts, self._overheads[row], ends)
        if self._has_extra:
            load += float(self._extra[row].take(samples).sum())
        return load, [[samples[place] for place in places] for places in bins]

    def cost(self, rank: int, bin_: Sequence[int]) -> float:
        row, rows = self.row(rank), sum(map(self._counts.__getitem__, bin_))
        extra = float(self._extra[row].take(bin_).sum()) if self._has_extra else 0.0
        return rows * self._row_lists[row][max(bin_)] + extra + self._overheads[row]

    def bound(self) -> float:
        filled = self.tokens / np.maximum(np.array(self._caps)[:, None], self.tokens)
        least = self.costs + np.floor(self.overhead[:, None] * filled)
        alone = float((self.costs + self.overhead[:, None]).min(0).max())
        level = self._level / self.num_ranks if len(self.costs) == 1 else 0.0
        return max(lower_bound(least, self.num_ranks), alone, level)

    def divisions(self) -> Iterator[Pieces]:
        """The tables of all samples cut together, whole, and in parts that cost little of a rank's load."""
        costs = [min(self.cost(rank, bin_) for rank in range(len(self.costs))) for bin_ in self._pool]
        limit, tried = self.bound(), 0
        for share in (math.inf, 1.0, 0.5, 0.25):
            pieces: Bins = []
            for bin_, cost in zip(self._pool, costs, strict=True):
                count = min(len(bin_), max(math.ceil(cost / (share * limit)), 1))
                pieces += [bin_[len(bin_) * i // count : len(bin_) * (i + 1) // count] for i in range(count)]
            if len(pieces) > tried:
                tried = len(pieces)
                by_rank = [[self.cost(rank, piece) for piece in pieces] for rank in range(len(self.costs))]
                yield Pieces(pieces, np.array(by_rank))
        if tried < len(self):
            yield Pieces([[sample] for sample in range(len(self))], self.costs + self.overhead[:, None])

    def counts(self, groups: list[list[int]]) -> Sequence[int]:
        likely = max(len(self.bins(rank, group)) for rank, group in enumerate(groups))
        return range(max(likely - 2, 1), min(likely + 1, len(groups[0])) + 1)

    def in_step(self, groups: list[list[int]], counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Tables of the same places in every group, which cost least if all ranks wait for the longest rows."""
        if len(set(map(len, groups))) > 1:
            return
        rows = [self.row(rank) for rank in range(len(groups))]
        firsts = [self._firsts(row, group) for row, group in zip(rows, groups, strict=True)]
        costs = [self._row_costs[row].take(group) for row, group in zip(rows, groups, strict=True)]
        heights = [[self._counts[sample] for sample in group] for group in groups]
        ends = np.cumsum(np.max(heights, axis=0)).tolist()
        largest, latest = np.max(costs, axis=0).tolist(), np.max(firsts, axis=0).tolist()
        _, bins = cut(largest, latest, float(self.overhead.max()), ends)
        yield [[[group[place] for place in places] for places in bins] for group in groups]

    def along(self, rank: int, samples: list[int], profile: list[float]) -> Bins | None:
        """``least[i]``: what the profile and the longest ``i`` samples in the tables so far cost together.

        In each turn one more table, of samples ``j .. i - 1``, is put on the next entry of the profile.
        """
        row, count = self.row(rank), len(samples)
        longest_first = samples[::-1]
        rows = np.cumsum([0, *(self._counts[sample] for sample in longest_first)])
        extra = np.cumsum([0.0, *self._extra[row].take(longest_first).tolist()])
        costs = (rows - rows[:-1, None]) * self._row_costs[row].take(longest_first)[:, None]  # [j, i]
        costs = costs + extra - extra[:-1, None] + self.overhead[row]
        ends = count - np.array(self._firsts(row, samples))[::-1]  # [j] the last sample that fits
        places = np.arange(count + 1)
        fits = (places > places[:-1, None]) & (places <= ends[:, None])
        costs = np.where(fits, costs, np.inf)
        least, begins = np.where(places, np.inf, 0.0), []
        for limit in profile:
            total = least[:-1, None] + np.maximum(costs, limit)
            begins.append(total.argmin(0).tolist())
            least = total.min(0)
        if least[-1] == np.inf:
            return None
        bins, end = [], count
        for begin in reversed(begins):
            bins.append(longest_first[begin[end] : end])
            end = begin[end]
        # In rows of numbers, the longest tables are not the costliest: then the order is that of the profile.
        return bins[::-1] if self._has_extra else sorted(bins, key=lambda bin_: -self.cost(rank, bin_))

    def pairs(self, count: int) -> Bins:
        """Neighbours, so that they pad little."""
        pairs: Bins = []
        sample = 0
        while sample + 1 < len(self) and len(pairs) < count:
            if self._firsts(0, [sample, sample + 1]) == [0, 0]:
                pairs.append([sample, sample + 1])
                sample += 1
            sample += 1
        return pairs if len(pairs) == count else []

    def _size(self, unit: list[int]) -> int:
        return int(self.tokens[unit].max())

    def _glue(self, units: Bins, flat: list[int], firsts: Ints) -> None:
        self.tokens = np.maximum.reduceat(self.tokens[flat], firsts)
        self._shortest = np.minimum.reduceat(self._shortest[flat], firsts)
        self._counts = [sum(self._counts[sample] for sample in unit) for unit in units]
        self._others = [sum(self._others[sample] for sample in unit) for unit in units]
        self._row_costs = np.maximum.reduceat(self._row_costs[:, flat], firsts, axis=1)
        self._extra = np.add.reduceat(self._extra[:, flat], firsts, axis=1)
        self._set_costs()


def cut(
    costs: Sequence[float], firsts: Sequence[int], overhead: float, ends: Sequence[int]
) -> tuple[float, list[range]]:
    """Consecutive tables of least total cost.

    If a table may begin at either of two samples, the later beginning is better from some sample on, and stays better:
    rows only get longer, and it has fewer of them. So beginnings are kept in a queue with the samples from which they
    are better, and one that another overtakes before that is dropped. That takes about as long as sorting.

    Args:
        costs: ``[n]`` of a row as long as each sample, rising.
        firsts: ``[n]``, the first sample that may share a table with each, where that is the longest; rising.
        overhead: Cost of a table.
        ends: ``[n]``, how many rows the samples up to each one have together.

    Returns:
        The total cost, and the places of the samples of each table.
    """
    before = [0, *ends]
    least, begins = [0.0], list[int]()  # [n + 1] cost of the samples before each, [n]
    queue, times, head = list[int](), list[int](), 0  # beginnings, and the sample from which each is the best
    for here, cost in enumerate(costs):
        time = here
        while len(queue) > head:
            last = queue[-1]
            saved = (least[here] - least[last]) / (before[here] - before[last])
            time = bisect_right(costs, saved, here)
            if time > here and firsts[time - 1] > last:
                time = bisect_right(firsts, last, here)
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
        least.append(least[queue[head]] + (before[here + 1] - before[queue[head]]) * cost + overhead)
    tables, end = list[range](), len(begins)
    while end:
        tables.append(range(begins[end - 1], end))
        end = begins[end - 1]
    return least[-1], tables[::-1]
