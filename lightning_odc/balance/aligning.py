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
from lightning_odc.balance.packing import Bins


@dataclass(frozen=True, eq=False)
class Share:
    """The samples of one rank: tokens ``[k]`` and costs ``[k]`` on that rank."""

    sizes: Sequence[int]
    costs: Sequence[float]


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
