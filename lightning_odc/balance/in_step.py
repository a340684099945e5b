"""Equally many microbatches for every rank, as collectives need them.

Collectives wait for the largest ``m``-th microbatch of all ranks. So ranks get equally many samples, and their
microbatches line up. The samples are shared out in two ways: *dealt*, neighbours by size to different ranks, so that
all ranks have alike samples; and *levelled*, so that the ranks' totals are equal. Ranks of equal total can still wait
for each other in every microbatch: one holds a sample that fills a microbatch alone, another has spread the same cost
evenly. So ranks line up one after another, those with the costliest samples first, each along the *profile* of the
ranks before it: the largest load so far of each ``m``. Below the profile, load costs nothing. Small minibatches
are also cut evenly, and into single samples.

If the number of ranks does not divide the number of samples, ``n = q * num_ranks + r``, then ``r`` ranks get one more
than the others. The shortest samples are cut into runs, of which the first ``r`` have one sample more, and the rest is
shared out as before. Ranks with ``q + 1`` samples put two together. If that does not fit, every sample runs alone, and
the other ranks end with an empty microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import itemgetter

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, Plan
from lightning_odc.balance.microbatches import Bins, Groups, Microbatches, as_rows, lower_bound
from lightning_odc.balance.search import Search

_TURNS, _TOLERANCE = 12, 5e-3
_FEW, _MOST_ROWS = 64, 4
_MANY = 256  # samples above which ranks are lined up only


def in_step(work: Microbatches, lined_up: bool) -> Plan:
    """The microbatches of every rank, equally many; some are empty if they must be. All caps are equal."""
    ranks, (whole, spare) = work.num_ranks, divmod(len(work), work.num_ranks)
    options: list[tuple[float, list[Bins]]] = []
    tried = min(whole + 1, _MOST_ROWS if spare and len(work) <= _FEW else 1)
    for rows in range(tried if whole else 0):
        first = np.arange(ranks).repeat(rows + (np.arange(ranks) < spare) if spare else 0)
        options += _options(work, np.append(first, np.full(len(work) - len(first), ranks)), lined_up)
    if not options:
        alone, samples = _deal(work, work.costs.sum(0), np.full(len(work), ranks)), np.arange(len(work))
        return [own + [[]] * (whole + 1 - len(own)) for own in work.in_order(alone, samples, samples)]
    _, bins = min(options, key=itemgetter(0))
    flat = [
        (rank, place, sample)
        for rank, own in enumerate(bins)
        for place, bin_ in enumerate(own)
        for sample in bin_
    ]
    return work.in_order(*np.array(flat).T)


def _options(work: Microbatches, first: Ints, lined_up: bool) -> Iterator[tuple[float, list[Bins]]]:
    """What collectives take for some microbatches of all ranks, and those; the ranks in ``first`` stay."""
    dealt = _deal(work, np.arange(len(work)), first)
    lined_up = lined_up and len(work) <= work.most_lined_up
    groupings = [(dealt, work.counts(as_rows(dealt[None], work.num_ranks)))]
    if len(work) <= work.most_lined_up:
        level = _level(work, first, dealt, max(groupings[0][1]))
        others = groupings if lined_up else []
        groupings = [(level, work.counts(as_rows(level[None], work.num_ranks))), *others]
    if lined_up and len(work) <= _MANY and (first == work.num_ranks).all():
        # Each alone, neighbours by cost: where other numbers cost, not those by size.
        alone = _groups(work, _deal(work, work.costs.sum(0), first))
        bins_of_ranks = [[[sample] for sample in group] for group in alone]
        yield _profile(work, bins_of_ranks), bins_of_ranks
    best = math.inf
    for owners, likely in groupings:
        groups = _groups(work, owners)
        counts = [count for count in likely if count <= min(map(len, groups))]
        found = [_line_up(work, groups, count, best) for count in counts] if lined_up else []
        options = list(filter(None, found))
        if (not options and best == math.inf) or len(counts) > 1 or len(work) <= _MANY:
            options += work.in_step(groups, counts)
        for bins in options:
            total = _profile(work, bins)
            best = min(best, total)
            yield total, bins


def _groups(work: Microbatches, owners: Ints) -> Groups:
    """The samples of each rank, rising."""
    rows, nothing = as_rows(owners[None], work.num_ranks).tolist(), len(work)
    return [[sample for sample in row if sample < nothing] for row in rows]


def _level(work: Microbatches, first: Ints, dealt: Ints, count: int) -> Ints:
    """Exchange samples until the ranks' totals are equal, if each has so many microbatches."""
    base = _loads(work, first) + work.overhead * count
    moving = np.where(first == work.num_ranks, dealt, work.num_ranks)
    search = Search(work.costs, [moving], work.num_ranks, base=base, equal_counts=True)
    search.run((lower_bound(work.costs, work.num_ranks) + float(base.min())) * (1 + _TOLERANCE), _TURNS)
    return np.minimum(first, search.best()[1])


def _loads(work: Microbatches, owners: Ints) -> Floats:
    """The costs of the samples of each rank."""
    rows = work.rows(np.minimum(owners, work.num_ranks - 1))
    costs = work.costs[rows, np.arange(len(work))]
    return np.bincount(owners, costs, work.num_ranks + 1)[: work.num_ranks].astype(np.float64)


def _deal(work: Microbatches, sizes: Ints | Floats, owners: Ints) -> Ints:
    """One of each ``num_ranks`` neighbours by size for every rank: the costliest for the fastest, least loaded one."""
    ranks, owners = work.num_ranks, owners.copy()
    rows, means = work.rows(np.arange(ranks)), work.costs.sum(0)
    slowness, loads = work.costs.sum(1)[rows], _loads(work, owners)
    falling = np.flatnonzero(owners == ranks)
    falling = falling[np.argsort(-sizes[falling], kind="stable")]
    for begin in range(0, len(falling), ranks):
        samples = falling[begin : begin + ranks]
        samples = samples[np.argsort(-means[samples], kind="stable")]
        receivers = np.lexsort((loads, slowness))[: len(samples)]
        loads[receivers] += work.costs[rows[receivers], samples]
        owners[samples] = receivers
    return owners


def _line_up(work: Microbatches, groups: Groups, count: int, limit: float) -> list[Bins] | None:
    """So many microbatches of every rank; None if its samples do not fit into them, or if the limit is reached."""
    lined: list[Bins] = [[] for _ in groups]
    loads = np.zeros((len(groups), count))
    profile = [0.0] * count
    rows, costs = work.rows(np.arange(len(groups))).tolist(), work.costs.tolist()
    largest = [max([costs[row][sample] for sample in group]) for row, group in zip(rows, groups, strict=True)]
    for rank in sorted(range(len(groups)), key=largest.__getitem__, reverse=True):
        found = work.along(rank, groups[rank], profile)
        if found is None:
            return None
        lined[rank], loads[rank] = found
        profile = list(map(max, profile, found[1]))
        if sum(profile) > limit:
            return None
    largest_of = loads.argmax(0).tolist()
    for rank in range(len(groups)):  # once more, now that all others are known
        if rank not in largest_of:  # others are as large everywhere
            continue
        others = np.delete(loads, rank, axis=0).max(0, initial=0.0)
        found = work.along(rank, groups[rank], others.tolist())
        if found and np.maximum(others, found[1]).sum() < np.maximum(others, loads[rank]).sum():
            lined[rank], loads[rank] = found
            largest_of = loads.argmax(0).tolist()
    return lined


def _profile(work: Microbatches, bins: list[Bins]) -> float:
    """The sum of the largest ``m``-th microbatches of all ranks, if each runs the costliest first."""
    count = len(bins[0])
    samples = np.array([sample for own in bins for bin_ in own for sample in sorted(bin_)])
    begins = np.cumsum([0, *(len(bin_) for own in bins for bin_ in own)])[:-1]
    loads = work.costs_of(np.arange(len(bins)).repeat(count), samples, begins).reshape(-1, count)
    return float(np.sort(loads, axis=1).max(0).sum())
