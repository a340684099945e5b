"""Tables with little padding: cutting sorted samples into microbatches, and distributing them over ranks.

Samples are sorted by the length of their rows, the shortest first. The samples of one rank are best cut into
*consecutive* ones: if the microbatch with the longest row had other samples than the next longest ones, exchanging
them would make no row longer. So the least cost of the first ``i`` samples follows from those of fewer samples::

    least[i] = min over j of  least[j] + (i - j) * cost[i - 1] + overhead        j .. i - 1 are one microbatch

Example: rows of 10, 10, 30 and 40 tokens, a token costs 1 and a microbatch 15, no cap. ``least`` is 0, 25, 35, 80 for
up to three samples. With the fourth, the last is alone, ``80 + 40 + 15 = 135``; or the last two are together,
``35 + 2 * 40 + 15 = 130``; or the last three, ``25 + 3 * 40 + 15 = 160``; or all, 175. So ``least[4]`` is 130.

If samples have rows of numbers, the first ones are sorted and padded. The cost of the other numbers does not depend on
the cut and is added to it. Their caps make microbatches begin later.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.collation import Collation
from lightning_odc.balance.costs import Terms
from lightning_odc.balance.numbers import Others, first_number
from lightning_odc.balance.workload import grid_scale


def cut(costs: Sequence[float], firsts: Sequence[int], overhead: float) -> tuple[float, list[range]]:
    """Consecutive microbatches of least total cost.

    If a microbatch may begin at either of two rows, the later beginning is better from some row on, and stays better:
    rows only get longer, and it has fewer of them. So beginnings are kept in a queue with the rows from which they are
    better, and one that another overtakes before that row is dropped. That takes about as long as sorting.

    Args:
        costs: ``[n]`` of a row of each sample's length, rising.
        firsts: ``[n]``, the first sample that may share a microbatch with each, where that is the longest; rising.
        overhead: cost of a microbatch.

    Returns:
        The total cost, and the positions of the samples of each microbatch.
    """
    least, begins = [0.0], list[int]()  # [n + 1] cost of the samples before each, [n]
    queue, times, head = list[int](), list[int](), 0  # beginnings, and the row from which each is the best
    for here, cost in enumerate(costs):
        time = here
        while len(queue) > head:
            last = queue[-1]
            time = bisect_right(costs, (least[here] - least[last]) / (here - last), here)
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
        least.append(least[queue[head]] + (here + 1 - queue[head]) * cost + overhead)
    bins, end = list[range](), len(begins)
    while end:
        bins.append(range(begins[end - 1], end))
        end = begins[end - 1]
    return least[-1], bins[::-1]


@dataclass(frozen=True, eq=False)
class PaddedSamples:
    """The samples of one minibatch, the shortest first, with costs on a grid: Note [The same plan everywhere].

    Attributes:
        order: ``[n]``, the caller's index of each sample here.
        sizes: ``[n]`` tokens of a row, rising.
        costs: ``[1 or num_ranks, n]`` whole numbers, what a row of that length costs, rising; one row if all ranks are
            alike.
        overhead: ``[1 or num_ranks]`` whole numbers, cost of a microbatch.
        caps: ``[num_ranks]``, most tokens of a microbatch.
        runs: ``[n]``, the first sample that may share a microbatch with each, whatever the caps.
        scale: grid points per unit of the caller's costs.
        beside: ``[1 or num_ranks, n]`` whole numbers, what each sample costs besides its row; ``None``: nothing.
        others: The numbers after the first, for each rank, with samples as they are numbered here; ``None``: none.
    """

    order: Ints
    sizes: Ints
    costs: Floats
    overhead: Floats
    caps: Ints
    runs: Ints
    scale: float
    beside: Floats | None = None
    others: list[Others] | None = None

    @classmethod
    def of(
        cls, lengths: Ints, caps: Ints, terms: Terms, collation: Collation, below: bool = False
    ) -> PaddedSamples:
        """Make one from the lengths and costs of a minibatch; see `bar` for caps that differ.

        A cost that falls somewhere while samples get longer is taken as the largest so far, or, if ``below``, as the
        smallest that follows: then no plan costs less than its costs here.
        """
        rows = collation.row_lengths(lengths)
        order = np.argsort(first_number(rows), kind="stable")
        sizes = first_number(rows)[order]
        ranks = 1 if terms.are_alike else len(caps)
        costs, overhead = terms.rows[:ranks, order], terms.overhead[:ranks]
        scale = grid_scale(float(max(costs.max(), overhead.max())) * (len(rows) + 1))
        beside = None
        if terms.beside is not None:
            alone = np.broadcast_to(terms.beside, terms.rows.shape)[:ranks, order]
            costs, beside = costs - alone, np.floor(alone * scale)
        if below:
            costs = np.minimum.accumulate(np.floor(costs * scale)[:, ::-1], axis=1)[:, ::-1]
            overhead = np.floor(overhead * scale)
        else:
            costs = np.maximum.accumulate(np.rint(costs * scale), axis=1)
            overhead = np.rint(overhead * scale) + 1  # of equal plans, the one with fewer microbatches
        runs = np.searchsorted(sizes, sizes) if collation.kind == "stacked" else np.zeros_like(sizes)
        # Without the caps of other numbers, no plan costs less.
        others = None if below or rows.ndim == 1 else _others_by_rank(rows[order], caps)
        return cls(order, sizes, costs, overhead, first_number(caps), runs, scale, beside, others)

    @property
    def num_ranks(self) -> int:
        return len(self.caps)

    @property
    def alike(self) -> bool:
        """Whether a sample costs the same on every rank."""
        return len(self.costs) == 1

    @property
    def most(self) -> Ints:
        """``[1 or num_ranks, n]`` rows of a microbatch in which a sample is the longest; 1 where it does not fit."""
        return np.maximum(self.caps[: len(self.costs), None] // self.sizes, 1)

    def beside_of(self, row: int, members: Sequence[int]) -> float:
        """What samples cost besides their rows; ``row`` is that of ``costs``."""
        return 0.0 if self.beside is None else float(self.beside[row, members].sum())

    @property
    def all_costs(self) -> Floats:
        """``[1 or num_ranks, n]``, what each sample costs alone, without the overhead."""
        return self.costs if self.beside is None else self.costs + self.beside

    def named(self, members: Iterable[int]) -> list[int]:
        """The caller's indices of the samples of one microbatch, the longest first."""
        order, places = self._falling
        return [order[place] for place in sorted(places[one] for one in members)]

    @cached_property
    def _falling(self) -> tuple[list[int], list[int]]:
        """The caller's indices, the longest sample first, and where each sample is among them."""
        falling = np.argsort(-self.sizes, kind="stable")
        return self.order[falling].tolist(), np.argsort(falling, kind="stable").tolist()

    @property
    def caps_differ(self) -> bool:
        return bool((self.caps != self.caps[0]).any())

    def pool(self, cap: int | None = None) -> tuple[float, list[range]]:
        """All samples cut together: what they cost at least, on ranks that are alike, and the microbatches.

        If ranks differ, costs are those of the fastest, and a microbatch fits wherever its longest sample fits.

        Args:
            cap: most tokens of a microbatch, instead; a sample that does not fit is alone.
        """
        caps = np.sort(self.caps) if cap is None else np.array([cap])
        cap_of = caps[np.minimum(np.searchsorted(caps, self.sizes), len(caps) - 1)]
        most = np.maximum(cap_of // self.sizes, 1)
        firsts = np.maximum(np.arange(1, len(most) + 1) - most, self.runs)
        if self.others is not None:
            loosest = [max(of_rank) for of_rank in zip(*(own.caps for own in self.others), strict=True)]
            others = Others(self.others[0].numbers, loosest)
            firsts = np.maximum(firsts, others.firsts(range(len(firsts))))
        firsts = np.maximum.accumulate(firsts)
        total, bins = cut(self.costs.min(0).tolist(), firsts.tolist(), float(self.overhead.min()))
        return total if self.beside is None else total + float(self.beside.min(0).sum()), bins


def _others_by_rank(rows: Ints, caps: Ints) -> list[Others]:
    """Numbers ``[n, d]``, equal on every rank, under the rank's own caps ``[d]``."""
    numbers = rows[:, 1:].tolist()
    return [Others(numbers, own[1:]) for own in caps.tolist()]


class RankLoads:
    """What ranks pay for sets of samples, each cut by itself; a set is cut once."""

    def __init__(self, samples: PaddedSamples) -> None:
        self._samples = samples
        self._costs, self._most = samples.costs.tolist(), samples.most.tolist()
        self._overhead, self._runs = samples.overhead.tolist(), samples.runs.tolist()
        self._beside = None if samples.beside is None else samples.beside.tolist()
        self._known: dict[tuple[int, ...], tuple[float, list[range]]] = {}

    def of(self, rank: int, group: list[int]) -> float:
        """The load of a rank with these samples."""
        load = self._cut(rank, sorted(group))[0]
        return (
            load
            if self._beside is None
            else load + math.fsum(self._beside[self._row(rank)][one] for one in group)
        )

    def _row(self, rank: int) -> int:
        return 0 if self._samples.alike else rank

    def _cut(self, rank: int, rising: list[int]) -> tuple[float, list[range]]:
        row = self._row(rank)
        key = (row, *rising)
        if key not in self._known:
            costs, most = self._costs[row], self._most[row]
            firsts = [place - most[sample] for place, sample in enumerate(rising, start=1)]
            if self._runs[-1]:  # rows must have equal lengths
                runs = (bisect_left(rising, self._runs[sample]) for sample in rising)
                firsts = list(map(max, firsts, runs))
            if self._samples.others is not None:
                firsts = list(map(max, firsts, self._samples.others[rank].firsts(rising)))
            self._known[key] = cut([costs[sample] for sample in rising], firsts, self._overhead[row])
        return self._known[key]

    def microbatches(self, rank: int, group: list[int]) -> list[list[int]]:
        """The caller's indices: the costliest microbatch first, in each the longest sample first."""
        rising, row = sorted(group), self._row(rank)
        costs, beside = self._costs[row], self._samples.beside_of
        bins = [[rising[place] for place in places] for places in self._cut(rank, rising)[1]]
        falling = sorted(bins, key=lambda own: (-len(own) * costs[own[-1]] - beside(row, own), own[-1]))
        return [self._samples.named(members) for members in falling]
