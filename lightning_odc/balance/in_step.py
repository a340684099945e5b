"""Equally many microbatches for every rank, as collectives need them.

Collectives wait for the largest ``m``-th microbatch of all ranks. So ranks get equally many samples, and their
microbatches line up. The samples are shared out in two ways: *levelled*, so that the ranks' totals are equal; and
*dealt*, neighbours by cost to different ranks, so that all ranks have alike samples. Ranks of equal total can still
wait for each other in every microbatch: one holds a sample that fills a microbatch alone, another has spread the same
cost evenly. So ranks line up one after another, those with the costliest samples first, each along the *profile* of
the ranks before it: the largest load so far of each ``m``. Below the profile, load costs nothing.

Note [A sample more]
~~~~~~~~~~~~~~~~~~~~
If the number of ranks does not divide the number of samples, ``n = q * num_ranks + r``, then ``r`` ranks get one more
than the others, and must put two together. So the shortest samples are cut into runs, of which the first ``r`` have one
sample more, and the rest is shared out as before. Example: 7 samples on 3 ranks, numbered by rising size; with runs of
one, ranks begin with ``[0, 1]``, ``[2]`` and ``[3]``, and each gets one of the samples 4, 5 and 6. Exchanges may move
all of them. If two do not fit together, every sample runs alone, and the other ranks end with an empty microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import numpy as np

from lightning_odc.balance.arrays import Floats
from lightning_odc.balance.microbatches import Bins, Groups, Microbatches, for_each_rank, lower_bound
from lightning_odc.balance.search import improve, longest_first

_ATTEMPTS = 64
_TOLERANCE = 5e-3
_FEW = 64  # samples up to which the search is longer
_MANY = 256  # samples above which the search is shorter
_LONGEST_RUN = 3


def in_step(work: Microbatches) -> list[Bins]:
    """The microbatches of every rank; equally many, or each sample alone where that cannot be."""
    best = []
    least = math.inf
    aligns = len(work) <= work.most_lined_up or len(work) % work.num_ranks > 0
    for groups in _groupings(work):
        for count in _counts(work, groups):
            options = []
            if aligns:
                options.append(_line_up(work, groups, count, least))
            if not aligns or len(work) <= _MANY:
                options.append(work.evenly(groups, count))
            for bins in options:
                total = _total(work, bins)
                if total < least:
                    best = bins
                    least = total
            if best and len(work) > _MANY:
                break
    if best:
        return best
    dealt = _dealt(work, [[] for _ in range(work.num_ranks)])
    return [[[sample] for sample in group] for group in dealt]


def _total(work: Microbatches, bins: list[Bins]) -> float:
    """The sum of the largest ``m``-th microbatches of all ranks, if each runs them by cost."""
    if not bins or not all(bins):
        return math.inf
    costs = [sorted([work.cost_of(rank, samples) for samples in own]) for rank, own in enumerate(bins)]
    return sum(map(max, zip(*costs, strict=True)))


def _groupings(work: Microbatches) -> Iterator[Groups]:
    """Ways to share the samples out, each rank's by rising size: levelled; dealt, then levelled; dealt."""
    whole, spare = divmod(len(work), work.num_ranks)
    if not whole:
        return
    limits = [whole + (rank < spare) for rank in range(work.num_ranks)]
    is_few = len(work) <= _FEW
    for short in _short_runs(work, is_few):
        dealt = _dealt(work, short)
        if len(work) <= work.most_lined_up:
            level = [list(run) for run in short]
            rest = range(sum(map(len, short)), len(work))
            loads = for_each_rank(work.alone, short)
            longest_first(work.costs, rest, level, loads, limits)
            yield _levelled(work, level)
            if is_few:
                yield _levelled(work, dealt)
        yield [sorted(group) for group in dealt]


def _short_runs(work: Microbatches, is_few: bool) -> Iterator[Groups]:
    """Runs of the shortest samples that ranks begin with, empty if counts are equal; see Note [A sample more]."""
    whole, spare = divmod(len(work), work.num_ranks)
    lengths = range(1)
    if spare and is_few:
        lengths = range(min(whole, _LONGEST_RUN) + 1)
    elif spare:
        lengths = range(1, 2)
    for length in lengths:
        sizes = [length + (rank < spare) for rank in range(work.num_ranks)]
        ends = accumulate(sizes)
        yield [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _dealt(work: Microbatches, short: Groups) -> Groups:
    """One of each ``num_ranks`` neighbours by cost for every rank: the costliest for the fastest, least loaded one."""
    groups = [list(run) for run in short]
    loads = for_each_rank(work.alone, short)
    slowness = work.by_rank(work.costs.sum(1))
    sums: list[float] = work.costs.sum(0).tolist()
    rest = sorted(range(sum(map(len, short)), len(work)), key=work.bulk.__getitem__)
    while rest:
        neighbours = sorted(rest[-work.num_ranks :], key=sums.__getitem__, reverse=True)
        del rest[-work.num_ranks :]
        receivers = sorted(range(work.num_ranks), key=lambda rank: (slowness[rank], loads[rank]))
        for rank, sample in zip(receivers, neighbours, strict=False):
            groups[rank].append(sample)
            loads[rank] += work.costs_of[rank][sample]
    return groups


def _levelled(work: Microbatches, groups: Groups) -> Groups:
    """Groups after exchanges of equally many samples that make the ranks' totals equal."""
    level = [list(group) for group in groups]
    enough = lower_bound(work.costs, work.num_ranks) * (1 + _TOLERANCE)
    improve(level, work.costs, work.alone, enough, _ATTEMPTS, equal_counts=True)
    return [sorted(group) for group in level]


def _counts(work: Microbatches, groups: Groups) -> list[int]:
    """Numbers of microbatches that are worth trying."""
    likely = max(for_each_rank(work.likely, groups))
    most = min(map(len, groups))
    counts = [likely + step for step in work.near]
    return [count for count in dict.fromkeys([*counts, most]) if 0 < count <= most]


def _line_up(work: Microbatches, groups: Groups, count: int, limit: float) -> list[Bins]:
    """So many microbatches of every rank; none if its samples do not fit into them, or if the limit is reached."""
    lined: list[Bins] = [[] for _ in groups]
    loads = np.zeros((len(groups), count), dtype=np.int64)
    costliest = [max([work.costs_of[rank][sample] for sample in group]) for rank, group in enumerate(groups)]
    order = sorted(range(len(groups)), key=costliest.__getitem__, reverse=True)
    for rank in order * 2:  # once more, now that all others are known
        others: Floats = loads.max(0)
        if lined[rank]:
            if (loads[rank] < others).all():
                continue
            others = np.delete(loads, rank, axis=0).max(0, initial=0)
        found = work.along(rank, groups[rank], others.tolist()) or lined[rank]
        if not found:
            return []
        bins = sorted(found, key=partial(work.cost_of, rank), reverse=True)  # as ranks run them
        costs = [work.cost_of(rank, samples) for samples in bins]
        total = np.maximum(others, costs).sum()
        if not lined[rank] or total < loads.max(0).sum():
            lined[rank] = bins
            loads[rank] = costs
            if total > limit:
                return []
    return lined
