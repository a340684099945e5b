"""What every kind of microbatch tells the search: a contract with two bodies, `Packed` rows and `Tables`.

The search asks a `Microbatches` two things. What does a set of samples cost a rank, if its microbatches are made well?
And what is each sample's part of that, roughly? Samples are numbered here by rising size.

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
from copy import copy
from typing import NamedTuple, Self

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, Plan

FEW_SAMPLES = 32
"""Samples up to which minibatches are small, so that more is tried."""

_GRID_BITS = 48
_FIELD = 64

Bins = list[list[int]]
"""Microbatches, each a list of samples numbered as in `Microbatches`."""


class Rooms:
    """Rows of numbers as single whole numbers, so that rows are added and compared at once.

    Each number has 64 bits to itself. A room has the top bit of each set, its *guard*. Where a number is larger than
    the room for it, the subtraction borrows the guard.
    """

    def __init__(self, numbers: int) -> None:
        self._shifts = [_FIELD * place for place in reversed(range(numbers))]
        self.guards = sum(1 << (shift + _FIELD - 1) for shift in self._shifts)

    def sizes(self, rows: Ints) -> list[int]:
        """One whole number for each row of ``[n, d]``."""
        if rows.shape[1] == 1:
            return rows[:, 0].tolist()
        return [sum(n << s for n, s in zip(row, self._shifts, strict=True)) for row in rows.tolist()]

    def fits(self, size: int, cap: int) -> bool:
        """Whether none of the numbers is above its cap."""
        return ((cap | self.guards) - size) & self.guards == self.guards


class Pieces(NamedTuple):
    """Samples that are shared out together, and what each piece costs as far as it can be said alone.

    Attributes:
        members: The samples of each piece.
        costs: ``[1 or num_ranks, pieces]`` whole numbers.
    """

    members: Bins
    costs: Floats

    def samples(self, groups: Bins) -> Bins:
        """The samples of each group of pieces, rising."""
        return [sorted(sample for piece in group for sample in self.members[piece]) for group in groups]


class Microbatches(ABC):
    """The samples of a minibatch, with costs on a grid: Note [The same plan everywhere].

    Arrays have one row for all ranks if those are equal, else one row per rank.

    Attributes:
        num_ranks: How many ranks share the samples.
        members: ``[n]`` the caller's indices of each sample here: one, or two of a pair that stays together.
        tokens: ``[n]`` tokens of each, rising.
        costs: ``[1 or num_ranks, n]`` whole numbers, of each sample alone, without overhead.
        parts: ``[1 or num_ranks, n]`` whole numbers, what each sample adds to a load, as far as it can be said alone.
        overhead: ``[1 or num_ranks]`` whole numbers, of a microbatch.
        is_additive: Whether a load is exactly the sum of ``parts``.
        scale: Grid points per unit of the caller's costs.
        most_lined_up: Samples up to which `along` is fast.
    """

    num_ranks: int
    members: list[list[int]]
    tokens: Ints
    costs: Floats
    parts: Floats
    overhead: Floats
    is_additive: bool
    scale: float
    most_lined_up: int

    def __init__(self, num_ranks: int, order: Ints) -> None:
        self.num_ranks = num_ranks
        self.members = [[index] for index in order.tolist()]
        self._known: dict[tuple[int, ...], tuple[float, Bins]] = {}
        self._lists: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def row(self, rank: int) -> int:
        """The row of the arrays that is about a rank."""
        return rank if len(self.costs) > 1 else 0

    def listed(self, row: int) -> list[float]:
        """A row of ``costs`` as a list, which is faster to look up."""
        if row not in self._lists:
            self._lists[row] = self.costs[row].tolist()
        return self._lists[row]

    def load(self, rank: int, samples: Sequence[int]) -> float:
        """What these samples, which rise, cost a rank in its best microbatches, overhead included."""
        return self._best(rank, samples)[0]

    def bins(self, rank: int, samples: Sequence[int]) -> Bins:
        """The best microbatches of a rank with these samples, which rise."""
        return self._best(rank, samples)[1]

    def largest_load(self, groups: Sequence[Sequence[int]]) -> float:
        """The largest load, if each rank has the samples of its group, which rise."""
        return max(self.load(rank, group) for rank, group in enumerate(groups))

    def _best(self, rank: int, samples: Sequence[int]) -> tuple[float, Bins]:
        key = (self.row(rank), *samples)
        if key not in self._known:
            self._known[key] = self._make_bins(self.row(rank), list(samples))
        return self._known[key]

    def in_order(self, rank: int, bins: Bins) -> list[list[int]]:
        """The caller's indices: the costliest microbatch first, in each the costliest sample first."""
        costs, ordered = self.listed(self.row(rank)), []
        for bin_ in bins:
            falling = sorted([(-costs[unit], index) for unit in bin_ for index in self.members[unit]])
            ordered.append((-self.cost(rank, bin_), [index for _, index in falling]))
        return [indices for _, indices in sorted(ordered)]

    def plan(self, groups: Sequence[Sequence[int]]) -> Plan:
        """The plan in which each rank has the samples of its group."""
        ranked = [(rank, sorted(group)) for rank, group in enumerate(groups)]
        return [self.in_order(rank, self.bins(rank, group)) for rank, group in ranked]

    @abstractmethod
    def _make_bins(self, row: int, samples: list[int]) -> tuple[float, Bins]:
        """The load and the best microbatches of these samples, which rise."""

    @abstractmethod
    def cost(self, rank: int, bin_: Sequence[int]) -> float:
        """What one microbatch costs a rank, overhead included."""

    def costs_of(self, rank: int, bins: Bins) -> list[float]:
        """What each microbatch costs a rank."""
        return [self.cost(rank, bin_) for bin_ in bins]

    @abstractmethod
    def bound(self) -> float:
        """No plan has a largest load below it."""

    @abstractmethod
    def divisions(self) -> Iterator[Pieces]:
        """What to share out."""

    @abstractmethod
    def in_step(self, groups: list[list[int]], counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Equally many microbatches of each rank that do not depend on the costs of other ranks' samples."""

    @abstractmethod
    def along(self, rank: int, samples: list[int], profile: list[float]) -> Bins | None:
        """As many microbatches as the profile has entries, none empty, that together exceed it little; None: too few.

        Collectives wait for the largest ``m``-th microbatch. The *profile* has the largest ones of other ranks. Below
        it, a microbatch costs nothing.
        """

    @abstractmethod
    def counts(self, groups: list[list[int]]) -> Sequence[int]:
        """Numbers of microbatches that are worth trying, if all ranks have equally many."""

    @abstractmethod
    def pairs(self, count: int) -> Bins:
        """So many disjoint pairs of short samples that fit into one microbatch each; none if there are fewer."""

    def glued(self, pairs: Bins) -> Self:
        """The same minibatch, with samples that stay together as one."""
        apart = set(range(len(self))).difference(*pairs)
        units = sorted([*pairs, *([sample] for sample in apart)], key=lambda unit: (self._size(unit), unit))
        flat = [sample for unit in units for sample in unit]
        firsts = np.cumsum([0, *map(len, units[:-1])])
        glued = copy(self)
        glued.members = [[i for sample in unit for i in self.members[sample]] for unit in units]
        glued._known, glued._lists = {}, {}
        glued._glue(units, flat, firsts)
        return glued

    @abstractmethod
    def _size(self, unit: list[int]) -> int:
        """The tokens of samples that stay together."""

    @abstractmethod
    def _glue(self, units: Bins, flat: list[int], firsts: Ints) -> None:
        """Make the arrays those of units, which begin at ``firsts`` in ``flat``."""


def grid_scale(largest_sum: float) -> float:
    """Grid points per unit such that sums up to this one are exact, a power of two."""
    return 2.0 ** (_GRID_BITS - math.frexp(largest_sum)[1])


def lower_bound(costs: Floats, num_ranks: int) -> float:
    """No plan has a largest load below this many grid points, if these are what samples cost at least.

    It is the largest of three bounds. The first is the weighted mean of the loads, with weights that make ranks of
    different speed equal. The second is the cost of each sample where it is cheapest. The third, for equal ranks, is
    ``j + 1`` of the first ``j * num_ranks + 1`` samples, since one rank gets that many of them.

    Args:
        costs: ``[1 or num_ranks, n]`` whole numbers.
        num_ranks: How many ranks there are.
    """
    largest = float(costs.min(0).max())
    if len(costs) > 1:
        slowness = costs.sum(1)
        weights = (1 / slowness) / math.fsum(1 / slowness)
        return max(float(np.floor(costs * weights[:, None]).min(0).sum()), largest)
    falling = -np.sort(-costs[0], kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(falling)])
    bound = max(math.ceil(sums[-1] / num_ranks), largest)
    last = np.arange(num_ranks, len(falling), num_ranks)
    if len(last):
        bound = max(bound, float((sums[last + 1] - sums[last - np.arange(1, len(last) + 1)]).max()))
    return bound
