"""Packing one rank's samples into microbatches under the token cap: as few and as even as possible.

All functions return bins as lists of positions in ``sizes``. A sample is never split and always fits in a bin alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_MOST_EXACT = 24
_NODES = 600

Bins = list[list[int]]


def pack(sizes: Sequence[int], cap: int, overhead: float = 0.0, pair: float = 0.0) -> Bins:
    """As few bins as found, and then as even ones; or more of them, if that costs less.

    Args:
        sizes: ``[k]`` tokens of the samples, each at most ``cap``.
        cap: most tokens of a bin.
        overhead: cost of a bin.
        pair: cost of every two tokens of different samples in one bin.

    Returns:
        Bins, none of them empty; none at all without samples. If ``pair`` is 0, their number is the smallest possible
        for up to 24 samples unless a search of 600 steps does not settle it, and that of best-fit decreasing otherwise.
    """
    fewest = _pack(sizes, cap)
    if not pair or len(fewest) == len(sizes):
        return fewest
    falling = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    likely = int(math.fsum(share(size, cap, overhead, pair)[0] for size in sizes))
    counts = {
        min(max(count, len(fewest)), len(sizes)) for count in (*range(likely - 1, likely + 3), len(sizes))
    }
    options = [spread(sizes, falling, sizes, cap, count) for count in sorted(counts)]
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


def share(size: int, cap: int, overhead: float, pair: float) -> tuple[float, float]:
    """A sample's share of bins and of their cost, if bins were filled evenly and as far as it pays.

    Filling a bin beyond ``sqrt(2 * overhead / pair)`` tokens costs more in pairs than another bin would.
    """
    full = min(float(cap), math.sqrt(2 * overhead / pair)) if pair else float(cap)
    if size >= full:
        return 1.0, overhead
    return size / full, overhead * size / full + pair * size * (full - size) / 2


def _pack(sizes: Sequence[int], cap: int) -> Bins:
    """As few bins as found, and then as even ones: spread the sizes if they fit, else best fit."""
    if sum(sizes) <= cap:
        return [list(range(len(sizes)))] if sizes else []
    falling = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    fewest = _fewest(sizes, falling, cap)
    bins = spread(sizes, falling, sizes, cap, fewest)
    if bins is None:
        bins = best_fit(sizes, falling, cap)
        if len(bins) > fewest and len(sizes) <= _MOST_EXACT:
            bins = _fewer(sizes, falling, cap, fewest, bins)
        bins = spread(sizes, falling, sizes, cap, len(bins)) or bins
    return bins


def pack_exactly(sizes: Sequence[int], costs: Sequence[float], cap: int, count: int) -> Bins:
    """Exactly ``count`` bins under the cap, of even cost if possible.

    Args:
        sizes: ``[k]`` tokens, ``k >= count``.
        costs: ``[k]``, what to even out.
        cap: most tokens of a bin.
        count: at least as many as ``pack`` makes.
    """
    falling = sorted(range(len(sizes)), key=lambda position: -costs[position])
    bins = spread(sizes, falling, costs, cap, count)
    if bins is None:
        bins = pack(sizes, cap)
        while len(bins) < count:
            bins.append(_halve(bins, costs))
    return bins


def spread(
    sizes: Sequence[int], falling: Sequence[int], costs: Sequence[float], cap: int, count: int
) -> Bins | None:
    """Each sample, in this order, into the bin of least cost that has room; None if one finds no room."""
    bins: Bins = [[] for _ in range(count)]
    loads, rooms = [0.0] * count, [cap] * count
    for position in falling:
        size, least, target = sizes[position], math.inf, -1
        for b in range(count):
            if loads[b] < least and rooms[b] >= size:
                least, target = loads[b], b
        if target < 0:
            return None
        bins[target].append(position)
        loads[target] += costs[position]
        rooms[target] -= size
    return bins


def best_fit(sizes: Sequence[int], falling: Sequence[int], cap: int) -> Bins:
    """Each sample, in this order, into the fullest bin that has room, or a new one."""
    bins: Bins = []
    rooms: list[int] = []
    for position in falling:
        size = sizes[position]
        target = min((b for b in range(len(bins)) if rooms[b] >= size), key=rooms.__getitem__, default=None)
        if target is None:
            target = len(bins)
            bins.append([])
            rooms.append(cap)
        bins[target].append(position)
        rooms[target] -= size
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
    """Depth-first: each sample into each bin of another room; gives up after ``_NODES`` steps."""
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
