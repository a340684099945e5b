"""Equally many microbatches for every rank, as collectives need them: aligning, pairing.

*Aligning* makes microbatches line up, since collectives wait for the largest ``m``-th microbatch of all ranks.
Ranks of equal total cost can still wait for each other in every microbatch: one holds a sample that fills a microbatch
alone, another has spread the same cost evenly. So ranks pack one after another, those with the largest samples first.
Each packs along the *profile* of the ranks before it: the largest load so far of each ``m``. Below the profile, load
costs nothing.

*Pairing* gives equal counts without empty microbatches, if the number of ranks does not divide the number of samples.
Of ``n = q * num_ranks + r`` samples ``r`` ranks get ``q + 1`` and the others ``q``. If one of the former cannot put two
of its samples into one microbatch, it has ``q + 1`` microbatches, and each of the others ends with an empty one. So
each of the ``r`` ranks needs a pair that fits. Such pairs exist if and only if the ``2r`` shortest samples form them:
the shortest with the longest of them, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import lt

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.bins import Bins, RankSamples, pack_bins, pack_exact_count
from lightning_odc.balance.workload import Workload

_COUNTS = 5


def pack_equal_counts(ranks: Sequence[RankSamples], cap: int, lined_up: bool) -> list[Bins]:
    """Equally many bins for every rank, as long as it has that many samples.

    Args:
        ranks: the samples of every rank.
        cap: most tokens of a bin.
        lined_up: `align` them.

    Returns:
        Bins of positions; as few as possible, or as many as cost least if samples cost each other.
    """
    fewest = 0
    for own in ranks:
        if len(own.sizes) > fewest:  # otherwise it has no more bins
            fewest = max(fewest, len(pack_bins(own.sizes, cap, others=own.others)))
    if not any(own.pair for own in ranks):
        return _even_in_cost(ranks, cap, fewest, lined_up)
    most = max(len(own.sizes) for own in ranks)
    counts = sorted({round(fewest * (most / fewest) ** (step / _COUNTS)) for step in range(_COUNTS + 1)})
    options = [_even_in_cost(ranks, cap, count, lined_up) for count in counts]
    options += [[_exactly(own, own.sizes, cap, count) for own in ranks] for count in counts]
    return min(options, key=lambda packed: _collective_cost(ranks, packed))


def _even_in_cost(ranks: Sequence[RankSamples], cap: int, count: int, lined_up: bool) -> list[Bins]:
    packed = [_exactly(own, own.costs, cap, count) for own in ranks]
    return align(ranks, packed, cap) if lined_up else packed


def _exactly(own: RankSamples, even: Sequence[float], cap: int, count: int) -> Bins:
    """Exactly this many bins, or one per sample if there are fewer samples."""
    if not own.sizes:
        return []
    return pack_exact_count(own.sizes, even, cap, min(count, len(own.sizes)), own.others)


def _collective_cost(ranks: Sequence[RankSamples], packed: list[Bins]) -> float:
    """The sum of the largest ``m``-th bins."""
    count = max(map(len, packed))
    loads = np.zeros((len(ranks), count))
    for row, own, bins in zip(loads, ranks, packed, strict=True):
        row[: len(bins)] = sorted((own.cost_of(members) + own.overhead for members in bins), reverse=True)
    return math.fsum(loads.max(0).tolist())


def align(ranks: Sequence[RankSamples], packed: list[Bins], cap: int) -> list[Bins]:
    """Bins of every rank that line up at least as well as ``packed``.

    Args:
        ranks: the samples of every rank.
        packed: Equally many bins for every rank, none empty; otherwise returned as it is.
        cap: most tokens of a bin.

    Returns:
        The same number of bins for every rank, none empty, the costliest first.
    """
    count = len(packed[0])
    if count < 2 or any(len(bins) != count for bins in packed):
        return packed
    falling = [_falling(own, bins) for own, bins in zip(ranks, packed, strict=True)]
    first, loads = [bins for bins, _ in falling], np.array([costs for _, costs in falling])
    order = sorted(range(len(ranks)), key=lambda rank: -max(ranks[rank].costs))
    aligned, along = list(first), loads.copy()
    profile = [0.0] * count  # the largest loads of the ranks so far
    for rank in order:
        if found := _along(ranks[rank], cap, profile):
            aligned[rank], along[rank] = found
        profile = list(map(max, profile, along[rank].tolist()))
    for rank in order:
        if all(map(lt, along[rank].tolist(), profile)):
            continue  # it is nowhere what the others wait for
        others = np.delete(along, rank, axis=0).max(0) if len(along) > 1 else np.zeros(count)
        if found := _along(ranks[rank], cap, others.tolist()):
            again, new = found[0], np.array(found[1])
            if _span(others, new) < _span(others, along[rank]):
                aligned[rank], along[rank] = again, new
                profile = along.max(0).tolist()
    return aligned if math.fsum(along.max(0).tolist()) < math.fsum(loads.max(0).tolist()) else first


def _along(own: RankSamples, cap: int, profile: list[float]) -> tuple[Bins, list[float]] | None:
    """Each sample, the costliest first, where it raises the profile least, and there where most room is left below it.

    Returns the bins and what each costs, the costliest first; None if a sample finds no room.
    """
    count = len(profile)
    bins: Bins = [[] for _ in range(count)]
    loads, rooms, empty = [0.0] * count, [cap] * count, count
    beside = None if own.others is None else own.others.rooms(count)
    falling = sorted(range(len(own.costs)), key=lambda position: -own.costs[position])
    for place, position in enumerate(falling):
        size, cost = own.sizes[position], own.costs[position]
        must_open = len(falling) - place <= empty
        least, target = (math.inf, math.inf), -1
        for b in range(count):
            if rooms[b] < size or (must_open and bins[b]):
                continue
            if beside is not None and not beside.have(b, position):
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
        if beside is not None:
            beside.put(target, position)
    return _falling(own, bins)


def _falling(own: RankSamples, bins: Bins) -> tuple[Bins, list[float]]:
    """The bins and what each costs, the costliest first."""
    costs = [math.fsum([own.costs[position] for position in members]) for members in bins]
    falling = sorted(range(len(bins)), key=costs.__getitem__, reverse=True)
    return [bins[b] for b in falling], [costs[b] for b in falling]


def _span(profile: Floats, loads: Floats) -> float:
    return math.fsum(np.maximum(profile, loads).tolist())


def fitting_pairs(lengths: Ints, cap: Ints, count: int) -> list[tuple[int, int]]:
    """So many disjoint pairs of samples that fit into one microbatch; none if there are not so many.

    Args:
        lengths: ``[n]``, or ``[n, d]``; of rows of numbers, pairs may be overlooked.
        cap: ``[]`` or ``[d]``.
        count: The number of pairs.
    """
    if 2 * count > len(lengths):
        return []
    largest = lengths if lengths.ndim == 1 else (lengths / cap).max(1)
    shortest = np.argsort(largest, kind="stable")[: 2 * count]
    pairs = [(int(shortest[i]), int(shortest[-1 - i])) for i in range(count)]
    return pairs if all((lengths[a] + lengths[b] <= cap).all() for a, b in pairs) else []


def partition_with_pairs(work: Workload, sizes: list[int], pairs: list[tuple[int, int]]) -> list[Ints]:
    """The samples of every rank: one of the pairs for each that gets the most, the rest the costliest first.

    Args:
        work: the workload.
        sizes: how many samples every rank gets; as many of the largest size as there are pairs.
        pairs: Pairs of samples, numbered as the caller does.

    Returns:
        For every rank its samples, numbered as the caller does.
    """
    number = {int(sample): position for position, sample in enumerate(work.order)}
    paired = [[number[sample] for sample in pair] for pair in pairs]
    larger = [rank for rank, size in enumerate(sizes) if size == max(sizes)]
    groups: list[list[int]] = [[] for _ in sizes]
    for rank, pair in zip(larger, paired, strict=True):
        groups[rank] = pair
    rows = np.broadcast_to(work.costs, (work.num_ranks, work.costs.shape[1]))
    loads = [float(work.base[rank] + rows[rank, group].sum()) for rank, group in enumerate(groups)]
    taken = {sample for pair in paired for sample in pair}
    for sample in (one for one in range(work.num_samples) if one not in taken):
        free = [rank for rank, group in enumerate(groups) if len(group) < sizes[rank]]
        rank = min(free, key=lambda one: loads[one] + rows[one, sample])
        groups[rank].append(sample)
        loads[rank] += float(rows[rank, sample])
    return [work.order[group] for group in groups]
