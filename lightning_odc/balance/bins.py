"""Pack the samples of a rank into microbatches.

*Packing* puts one rank's samples into microbatches under the token cap: as few and as even as possible. All functions
return bins as lists of positions in ``sizes``. A sample is never split and always fits in a bin alone. If samples
have rows of numbers, ``sizes`` are the first numbers. ``others`` are the rest, which must fit as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.costs import Terms
from lightning_odc.balance.numbers import Others, first_number

_MOST_EXACT = 24
_NODES = 600

Bins = list[list[int]]


def pack_bins(
    sizes: Sequence[int], cap: int, overhead: float = 0.0, pair: float = 0.0, others: Others | None = None
) -> Bins:
    """Pack into few and even bins, or into more of them if that costs less.

    Args:
        sizes: ``[k]`` tokens of the samples, each at most ``cap``.
        cap: most tokens of a bin.
        overhead: cost of a bin.
        pair: cost of every two tokens of different samples in one bin.
        others: the numbers after the first, if there are any.

    Returns:
        Bins, none of them empty; none at all without samples. If ``pair`` is 0 and samples have one number, their
        number is the smallest possible for up to 24 samples unless a search of 600 steps does not settle it, and that
        of best-fit decreasing otherwise.
    """
    fewest = _pack_fewest(sizes, cap, others)
    if not pair or len(fewest) == len(sizes):
        return fewest
    falling = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    full = best_filling(cap, overhead, pair)
    likely = int(math.fsum(1.0 if size >= full else size / full for size in sizes))
    counts = {
        min(max(count, len(fewest)), len(sizes)) for count in (*range(likely - 1, likely + 3), len(sizes))
    }
    options = [spread(sizes, falling, sizes, cap, count, others) for count in sorted(counts)]
    return min(
        [fewest, *(bins for bins in options if bins)],
        key=lambda bins: packing_cost(bins, sizes, overhead, pair),
    )


def packing_cost(bins: Bins, sizes: Sequence[int], overhead: float, pair: float) -> float:
    """What bins cost besides their samples."""
    if not pair:
        return overhead * len(bins)
    filled = [sum(sizes[position] for position in members) for members in bins]
    across = sum(total * total for total in filled) - sum(size * size for size in sizes)
    return overhead * len(bins) + pair * across / 2


def best_filling(cap: int, overhead: float, pair: float) -> float:
    """Tokens up to which filling a bin pays.

    Filling a bin beyond ``sqrt(2 * overhead / pair)`` tokens costs more in pairs than another bin would.
    """
    return min(float(cap), math.sqrt(2 * overhead / pair)) if pair else float(cap)


def _pack_fewest(sizes: Sequence[int], cap: int, others: Others | None) -> Bins:
    """Pack into few and even bins: spread the sizes if they fit, else best fit."""
    everything = range(len(sizes))
    if sum(sizes) <= cap and (others is None or others.fit(everything)):
        return [list(everything)] if sizes else []
    falling = sorted(everything, key=lambda position: -sizes[position])
    fewest = _fewest(sizes, falling, cap)
    if others is not None:
        return _pack_by_shares(sizes, cap, others, max(fewest, others.fewest()))
    bins = spread(sizes, falling, sizes, cap, fewest)
    if bins is None:
        bins = best_fit(sizes, falling, cap)
        if len(bins) > fewest and len(sizes) <= _MOST_EXACT:
            bins = _fewer(sizes, falling, cap, fewest, bins)
        bins = spread(sizes, falling, sizes, cap, len(bins)) or bins
    return bins


def _pack_by_shares(sizes: Sequence[int], cap: int, others: Others, fewest: int) -> Bins:
    """Like `_pack_fewest`, for rows of numbers: the sample that takes the largest share of a cap goes first."""
    shares = [max(size / cap, share) for size, share in zip(sizes, others.shares, strict=True)]
    falling = sorted(range(len(sizes)), key=lambda position: -shares[position])
    bins = best_fit(sizes, falling, cap, others)
    for count in range(fewest if len(sizes) <= _MOST_EXACT else len(bins), len(bins) + 1):
        if even := spread(sizes, falling, shares, cap, count, others):
            return even
    return bins


def pack_exact_count(
    sizes: Sequence[int], costs: Sequence[float], cap: int, count: int, others: Others | None = None
) -> Bins:
    """Exactly ``count`` bins under the cap, of even cost if possible.

    Args:
        sizes: ``[k]`` tokens, ``k >= count``.
        costs: ``[k]``, what to even out.
        cap: most tokens of a bin.
        count: The number of bins, at least as many as `pack_bins` makes.
        others: the numbers after the first, if there are any.
    """
    falling = sorted(range(len(sizes)), key=lambda position: -costs[position])
    bins = spread(sizes, falling, costs, cap, count, others)
    if bins is None:
        bins = pack_bins(sizes, cap, others=others)
        while len(bins) < count:
            bins.append(_halve(bins, costs))
    return bins


def spread(
    sizes: Sequence[int],
    falling: Sequence[int],
    costs: Sequence[float],
    cap: int,
    count: int,
    others: Others | None = None,
) -> Bins | None:
    """Each sample, in this order, into the bin of least cost that has room; None if one finds no room."""
    bins: Bins = [[] for _ in range(count)]
    loads, rooms = [0.0] * count, [cap] * count
    beside = None if others is None else others.rooms(count)
    for position in falling:
        size, least, target = sizes[position], math.inf, -1
        for b in range(count):
            if loads[b] < least and rooms[b] >= size and (beside is None or beside.have(b, position)):
                least, target = loads[b], b
        if target < 0:
            return None
        bins[target].append(position)
        loads[target] += costs[position]
        rooms[target] -= size
        if beside is not None:
            beside.put(target, position)
    return bins


def best_fit(sizes: Sequence[int], falling: Sequence[int], cap: int, others: Others | None = None) -> Bins:
    """Each sample, in this order, into the fullest bin that has room, or a new one."""
    bins: Bins = []
    rooms: list[int] = []
    beside = None if others is None else others.rooms(len(sizes))
    for position in falling:
        size = sizes[position]
        having_room = (b for b in range(len(bins)) if rooms[b] >= size)
        if beside is not None:
            having_room = (b for b in having_room if beside.have(b, position))
        target = min(having_room, key=rooms.__getitem__, default=None)
        if target is None:
            target = len(bins)
            bins.append([])
            rooms.append(cap)
        bins[target].append(position)
        rooms[target] -= size
        if beside is not None:
            beside.put(target, position)
    return bins


def _fewest(sizes: Sequence[int], falling: Sequence[int], cap: int) -> int:
    """A lower bound on the number of bins: tokens over the cap, or samples of which no two fit together."""
    alone = 0
    for position, following in pairwise(falling):
        if sizes[position] + sizes[following] <= cap:
            break
        alone += 1
    return max(-(-sum(sizes) // cap), alone + 1)


def _fewer(sizes: Sequence[int], falling: Sequence[int], cap: int, fewest: int, bins: Bins) -> Bins:
    """The first packing that a bounded depth-first search finds with fewer bins, or ``bins``."""
    for count in range(fewest, len(bins)):
        found = _search(sizes, falling, cap, count)
        if found is not None:
            return found
    return bins


def _search(sizes: Sequence[int], falling: Sequence[int], cap: int, count: int) -> Bins | None:
    """Depth-first: each sample into each bin of another room. Ends without a result after ``_NODES`` steps."""
    rooms = [cap] * count
    chosen = [0] * len(falling)
    slack = count * cap - sum(sizes)
    smallest = sizes[falling[-1]]
    steps = 0

    def place(depth: int, waste: int) -> bool:
        nonlocal steps
        if depth == len(falling):
            return True
        steps += 1
        size, tried = sizes[falling[depth]], set[int]()
        for target, room in enumerate(rooms):
            if room < size or room in tried or steps > _NODES:
                continue
            tried.add(room)
            left = room - size
            lost = waste + (left if left < smallest else 0)
            if lost > slack:
                continue
            rooms[target], chosen[depth] = left, target
            if place(depth + 1, lost):
                return True
            rooms[target] = room
        return False

    if not place(0, 0):
        return None
    return [[p for p, b in zip(falling, chosen, strict=True) if b == target] for target in range(count)]


def _halve(bins: Bins, costs: Sequence[float]) -> list[int]:
    """Take the part of less cost out of the costliest bin that has two samples; positions by falling cost."""
    splittable = [members for members in bins if len(members) > 1]
    costliest = max(splittable, key=lambda members: math.fsum(costs[position] for position in members))
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for position in sorted(costliest, key=lambda position: -costs[position]):
        lighter = int(loads[1] < loads[0])
        halves[lighter].append(position)
        loads[lighter] += costs[position]
    costliest[:] = halves[0]
    return halves[1]


@dataclass(frozen=True, eq=False)
class RankSamples:
    """The samples of one rank, and what they cost there. Bins hold positions in these lists.

    Attributes:
        indices: ``[k]``, of the samples in the minibatch.
        sizes: ``[k]`` tokens.
        costs: ``[k]``.
        overhead: Cost of a microbatch.
        pair: Cost of every two tokens of different samples in one microbatch.
        others: ``[k]`` numbers after the first, if there are any.
    """

    indices: Sequence[int]
    sizes: Sequence[int]
    costs: Sequence[float]
    overhead: float = 0.0
    pair: float = 0.0
    others: Others | None = None

    def microbatches(self, bins: Bins) -> list[list[int]]:
        """Bins as lists of indices: the costliest microbatch first, in each the costliest sample first."""
        falling = sorted(bins, key=lambda members: (-self.cost_of(members), self.indices[members[0]]))
        return [
            [self.indices[p] for p in sorted(members, key=lambda p: (-self.costs[p], self.indices[p]))]
            for members in falling
        ]

    def cost_of(self, members: Sequence[int]) -> float:
        """Cost of one microbatch, without its overhead."""
        alone = math.fsum(self.costs[position] for position in members)
        if not self.pair:
            return alone
        total = sum(self.sizes[position] for position in members)
        return alone + self.pair * (total * total - sum(self.sizes[p] * self.sizes[p] for p in members)) / 2


def samples_of_ranks(groups: Sequence[Ints], lengths: Ints, caps: Ints, terms: Terms) -> list[RankSamples]:
    """The samples of every rank, from their indices and the lengths, caps and costs of a minibatch."""
    ends = np.cumsum([len(group) for group in groups]).tolist()
    flat, ranks = np.concatenate(groups), np.repeat(np.arange(len(groups)), np.diff(ends, prepend=0))
    indices, own = flat.tolist(), lengths[flat]
    sizes, costs = first_number(own).tolist(), terms.rows[ranks, flat].tolist()
    overhead, pair = terms.overhead.tolist(), terms.pair.tolist()
    return [
        RankSamples(
            indices[begin:end],
            sizes[begin:end],
            costs[begin:end],
            overhead[rank],
            pair[rank],
            Others.of(own[begin:end], caps[rank]),
        )
        for rank, (begin, end) in enumerate(pairwise([0, *ends]))
    ]


class Packings:
    """Bins of the samples of one rank after another, see `pack_bins`; equal sizes are packed once.

    Args:
        caps: ``[num_ranks]`` or ``[num_ranks, d]``, most tokens of a bin.
        terms: the costs.
    """

    def __init__(self, caps: Ints, terms: Terms) -> None:
        most, overhead, pair = first_number(caps).tolist(), terms.overhead.tolist(), terms.pair.tolist()
        self._terms = list(zip(most, overhead, pair, strict=True))
        self._known: dict[tuple[Any, ...], Bins] = {}

    def of(self, rank: int, sizes: Sequence[int], others: Others | None) -> Bins:
        cap, overhead, pair = self._terms[rank]
        beside = () if others is None else (*map(tuple, others.numbers), *others.caps)
        key = (cap, overhead, pair, *sizes, *beside)
        if key not in self._known:
            self._known[key] = pack_bins(sizes, cap, overhead, pair, others)
        return self._known[key]
