"""Equally many microbatches for every rank, as collectives need them.

Collectives wait for the largest ``m``-th microbatch of all ranks. So ranks get equally many samples, and their
microbatches line up. The samples are shared out in two ways: *dealt*, neighbours by size to different ranks, so that
all ranks have alike samples; and *levelled*, so that the ranks' totals are equal. Ranks of equal total can still wait
for each other in every microbatch: one holds a sample that fills a microbatch alone, another has spread the same cost
evenly. So ranks line up one after another, those with the costliest samples first, each along the *profile* of the
ranks before it: the largest load so far of each ``m``. Below the profile, load costs nothing.

If the number of ranks does not divide the number of samples, ``n = q * num_ranks + r``, then ``r`` ranks get one more
than the others. A rank with ``q + 1`` samples has as many microbatches as one with ``q`` only if it puts two together.
So ``r`` pairs of short samples stay together and count as one; or the shortest samples are cut into runs, of which the
first ``r`` have one sample more, and the rest is shared out as before. If there are no such pairs, every sample runs
alone, and the other ranks end with an empty microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter

import numpy as np

from lightning_odc.balance.arrays import Floats, Plan
from lightning_odc.balance.microbatches import Bins, Microbatches, lower_bound
from lightning_odc.balance.search import TOLERANCE, Groups, Search

_ROUNDS = 24
_FEW, _MOST_ROWS = 64, 4


def in_step(work: Microbatches, lined_up: bool) -> Plan:
    """The microbatches of every rank, equally many; some are empty if they must be.

    Args:
        work: The samples; all caps are equal.
        lined_up: Whether ranks line up. Otherwise each spreads its cost evenly.
    """
    ranks, (whole, spare) = work.num_ranks, divmod(len(work), work.num_ranks)
    pairs = work.pairs(spare) if whole else []
    if spare and not pairs:
        falling = np.argsort(-work.costs.sum(0), kind="stable").tolist()
        alone = [[[sample] for sample in group] for group in _deal(work, falling, [[] for _ in range(ranks)])]
        return [plan + [[]] * (whole + 1 - len(plan)) for plan in _plan(work, alone)]
    if not spare:
        options = list(_options(work, [[] for _ in range(ranks)], lined_up))
        return _plan(*min(options, key=itemgetter(0))[1:])
    glued = work.glued(pairs)
    first = sorted(range(len(glued)), key=lambda unit: len(glued.members[unit]) < 2)[:ranks]
    options = list(_options(glued, [[unit] for unit in first], lined_up))
    for rows in range(min(whole, _MOST_ROWS if len(work) <= _FEW else 1)):
        ends = np.cumsum([0, *(rows + (rank < spare) for rank in range(ranks))]).tolist()
        options += _options(work, [list(range(begin, end)) for begin, end in pairwise(ends)], lined_up)
    return _plan(*min(options, key=itemgetter(0))[1:])


def _options(
    work: Microbatches, first: Groups, lined_up: bool
) -> Iterator[tuple[float, Microbatches, list[Bins]]]:
    """What collectives take for some microbatches of all ranks, the samples, and those.

    Args:
        work: The samples.
        first: The shortest samples, which stay on these ranks; all others are shared out equally.
        lined_up: See `in_step`.
    """
    pinned = {sample for group in first for sample in group}
    free = [sample for sample in reversed(range(len(work))) if sample not in pinned]
    dealt = _deal(work, free, first)
    lined_up = lined_up and len(work) <= work.most_lined_up
    groupings = [(dealt, work.counts(dealt))]
    if len(work) <= work.most_lined_up:
        level = _level(work, first, dealt, max(groupings[0][1]))
        groupings = [*(groupings if lined_up else []), (level, work.counts(level))]
    if lined_up and not pinned:  # each alone, neighbours by cost: where other numbers cost, not those by size
        costs = work.costs.sum(0).tolist()
        alone = _deal(work, sorted(free, key=lambda sample: -costs[sample]), first)
        bins_of_ranks = [[[sample] for sample in group] for group in alone]
        yield sum(_profile(work, bins_of_ranks)), work, bins_of_ranks
    for groups, likely in groupings:
        counts = [count for count in likely if count <= min(map(len, groups))]
        lined = [_line_up(work, groups, count) for count in counts] if lined_up else []
        for bins in [*work.in_step(groups, counts), *filter(None, lined)]:
            yield sum(_profile(work, bins)), work, bins


def _plan(work: Microbatches, bins: list[Bins]) -> Plan:
    return [work.in_order(rank, of_rank) for rank, of_rank in enumerate(bins)]


def _level(work: Microbatches, first: Groups, dealt: Groups, count: int) -> Groups:
    """Exchange samples until the ranks' totals are equal, if each has so many microbatches."""
    moving = [[s for s in group if s not in fixed] for group, fixed in zip(dealt, first, strict=True)]
    base = _loads(work, first) + work.overhead * count
    search = Search(work.costs, [moving], base=base, equal_counts=True)
    search.run((lower_bound(work.costs, work.num_ranks) + float(base.min())) * (1 + TOLERANCE), _ROUNDS)
    return [sorted([*fixed, *group]) for fixed, group in zip(first, search.best()[1], strict=True)]


def _loads(work: Microbatches, groups: Groups) -> Floats:
    return np.array(
        [float(work.costs[work.row(rank)].take(group).sum()) for rank, group in enumerate(groups)]
    )


def _deal(work: Microbatches, falling: list[int], groups: Groups) -> Groups:
    """One of each ``num_ranks`` neighbours for every rank: the costliest for the fastest, least loaded one."""
    ranks, groups = work.num_ranks, [list(group) for group in groups]
    slowness = np.broadcast_to(work.costs.sum(1), (ranks,)).tolist()
    means, loads = work.costs.sum(0).tolist(), _loads(work, groups).tolist()
    for begin in range(0, len(falling), ranks):
        receivers = sorted(range(ranks), key=lambda rank: (slowness[rank], loads[rank]))
        costliest_first = sorted(falling[begin : begin + ranks], key=lambda sample: -means[sample])
        for rank, sample in zip(receivers, costliest_first, strict=False):
            groups[rank].append(sample)
            loads[rank] += float(work.costs[work.row(rank), sample])
    return [sorted(group) for group in groups]


def _line_up(work: Microbatches, groups: Groups, count: int) -> list[Bins] | None:
    """So many microbatches of every rank; None if its samples do not fit into them."""
    lined: list[Bins] = [[] for _ in groups]
    profile = [0.0] * count
    largest = [max(work.costs[work.row(rank)].take(group).tolist()) for rank, group in enumerate(groups)]
    for rank in sorted(range(len(groups)), key=lambda rank: -largest[rank]):
        bins = work.along(rank, groups[rank], profile)
        if bins is None:
            return None
        lined[rank] = bins
        profile = list(map(max, profile, work.costs_of(rank, bins)))
    loads = np.array([work.costs_of(rank, bins) for rank, bins in enumerate(lined)])
    for rank in range(len(groups)):  # once more, now that all others are known
        if rank not in loads.argmax(0).tolist():  # others are as large everywhere
            continue
        others = np.delete(loads, rank, axis=0).max(0, initial=0.0)
        bins = work.along(rank, groups[rank], others.tolist())
        again = np.array(work.costs_of(rank, bins)) if bins else loads[rank]
        if bins and np.maximum(others, again).sum() < np.maximum(others, loads[rank]).sum():
            lined[rank], loads[rank] = bins, again
    return lined


def _profile(work: Microbatches, bins: list[Bins]) -> list[float]:
    """The largest ``m``-th microbatch of all ranks, if each runs the costliest first."""
    return np.max(
        [sorted(work.costs_of(rank, own), reverse=True) for rank, own in enumerate(bins)], axis=0
    ).tolist()
