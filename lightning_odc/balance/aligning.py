"""Microbatches that line up: collectives wait for the largest ``m``-th microbatch of all ranks, for each ``m``.

Ranks of equal total cost can still wait for each other in every microbatch: one holds a sample that fills a microbatch
alone, another has spread the same cost evenly. So each rank, those with the largest samples first, packs along the
*profile* of the ranks before it, the largest load so far of each ``m``: where the profile has room, load costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_odc.balance.arrays import Floats
from lightning_odc.balance.packing import Bins, pack, pack_exactly

_COUNTS = 5


@dataclass(frozen=True, eq=False)
class Share:
    """The samples of one rank, and what they cost there.

    Attributes:
        sizes: ``[k]`` tokens.
        costs: ``[k]``.
        overhead: of a microbatch.
        pair: of every two tokens of different samples in one microbatch.
    """

    sizes: Sequence[int]
    costs: Sequence[float]
    overhead: float = 0.0
    pair: float = 0.0

    def cost_of(self, members: Sequence[int]) -> float:
        """Cost of one microbatch, without its overhead."""
        alone = math.fsum(self.costs[position] for position in members)
        if not self.pair:
            return alone
        total = sum(self.sizes[position] for position in members)
        return alone + self.pair * (total * total - sum(self.sizes[p] * self.sizes[p] for p in members)) / 2


def pack_equally(shares: Sequence[Share], cap: int, lined_up: bool) -> list[Bins]:
    """Equally many bins for every rank, as long as it has that many samples.

    Args:
        shares: the samples of every rank.
        cap: most tokens of a bin.
        lined_up: `align` them.

    Returns:
        Bins of positions; as few as possible, or as many as cost least if samples cost each other.
    """
    fewest = max(len(pack(share.sizes, cap)) for share in shares)
    if not any(share.pair for share in shares):
        return _even_in_cost(shares, cap, fewest, lined_up)
    most = max(len(share.sizes) for share in shares)
    counts = sorted({round(fewest * (most / fewest) ** (step / _COUNTS)) for step in range(_COUNTS + 1)})
    options = [_even_in_cost(shares, cap, count, lined_up) for count in counts]
    options += [[_exactly(share, share.sizes, cap, count) for share in shares] for count in counts]
    return min(options, key=lambda packed: _collective_cost(shares, packed))


def _even_in_cost(shares: Sequence[Share], cap: int, count: int, lined_up: bool) -> list[Bins]:
    packed = [_exactly(share, share.costs, cap, count) for share in shares]
    return align(shares, packed, cap) if lined_up else packed


def _exactly(share: Share, even: Sequence[float], cap: int, count: int) -> Bins:
    """As many bins, even in this, or as many as there are samples."""
    return pack_exactly(share.sizes, even, cap, min(count, len(share.sizes))) if share.sizes else []


def _collective_cost(shares: Sequence[Share], packed: list[Bins]) -> float:
    """The sum of the largest ``m``-th bins."""
    count = max(map(len, packed))
    loads = np.zeros((len(shares), count))
    for row, share, bins in zip(loads, shares, packed, strict=True):
        row[: len(bins)] = sorted((share.cost_of(members) + share.overhead for members in bins), reverse=True)
    return math.fsum(loads.max(0).tolist())


def align(shares: Sequence[Share], packed: list[Bins], cap: int) -> list[Bins]:
    """Bins of every rank that line up at least as well as ``packed``.

    Args:
        shares: the samples of every rank.
        packed: for every rank equally many bins of positions in its share, none empty; otherwise returned as it is.
        cap: most tokens of a bin.

    Returns:
        As many bins for every rank, none empty, the costliest first.
    """
    count = len(packed[0])
    if count < 2 or any(len(bins) != count for bins in packed):
        return packed
    first = [_falling(share, bins) for share, bins in zip(shares, packed, strict=True)]
    loads = np.array([_loads(share, bins) for share, bins in zip(shares, first, strict=True)])
    order = sorted(range(len(shares)), key=lambda rank: -max(shares[rank].costs))
    aligned, along = list(first), np.zeros_like(loads)
    for rank in order:
        profile = along.max(0)
        aligned[rank] = _along(shares[rank], cap, profile.tolist()) or first[rank]
        along[rank] = _loads(shares[rank], aligned[rank])
    for rank in order:
        if not (along[rank] >= along.max(0)).any():
            continue  # it is nowhere what the others wait for
        others = np.delete(along, rank, axis=0).max(0) if len(along) > 1 else np.zeros(count)
        again = _along(shares[rank], cap, others.tolist())
        if again is not None:
            new = np.array(_loads(shares[rank], again))
            if _span(others, new) < _span(others, along[rank]):
                aligned[rank], along[rank] = again, new
    return aligned if math.fsum(along.max(0).tolist()) < math.fsum(loads.max(0).tolist()) else first


def _along(share: Share, cap: int, profile: list[float]) -> Bins | None:
    """Each sample, the costliest first, where it raises the profile least, and there where most room is left below it.

    None if a sample finds no room.
    """
    count = len(profile)
    bins: Bins = [[] for _ in range(count)]
    loads, rooms, empty = [0.0] * count, [cap] * count, count
    falling = sorted(range(len(share.costs)), key=lambda position: -share.costs[position])
    for place, position in enumerate(falling):
        size, cost = share.sizes[position], share.costs[position]
        must_open = len(falling) - place <= empty
        least, target = (math.inf, math.inf), -1
        for b in range(count):
            if rooms[b] < size or (must_open and bins[b]):
                continue
            before, after, limit = loads[b], loads[b] + cost, profile[b]
            raised = 0.0 if after <= limit else after - max(before, limit)
            if (raised, after - limit) < least:
                least, target = (raised, after - limit), b
        if target < 0:
            return None
        empty -= not bins[target]
        bins[target].append(position)
        loads[target] += cost
        rooms[target] -= size
    return _falling(share, bins)


def _falling(share: Share, bins: Bins) -> Bins:
    return sorted(bins, key=lambda members: -math.fsum(share.costs[position] for position in members))


def _loads(share: Share, bins: Bins) -> list[float]:
    return [math.fsum(share.costs[position] for position in members) for members in bins]


def _span(profile: Floats, loads: Floats) -> float:
    return math.fsum(np.maximum(profile, loads).tolist())
