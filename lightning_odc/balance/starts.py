"""First partitions of a workload: longest first (LPT) and largest differencing (Karmarkar-Karp).

A partition is a list of samples for every rank, numbered as in `Workload`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_odc.balance.arrays import Floats
from lightning_odc.balance.workload import Workload

Groups = list[list[int]]


def longest_first(work: Workload, costs: Floats | None = None) -> Groups:
    """LPT: each sample, the largest first, goes to the rank that then ends earliest.

    Args:
        work: the workload.
        costs: ``[n]``, sort and place by these instead of the true costs, to get other partitions; only where ranks
            are alike.
    """
    if not work.alike:
        return _earliest_end(work, costs)
    weights = (work.means if costs is None else costs).tolist()
    samples = range(len(weights)) if costs is None else np.argsort(-costs, kind="stable").tolist()
    heap = [(load, rank) for rank, load in enumerate(work.base.tolist())]
    heapq.heapify(heap)
    groups: Groups = [[] for _ in heap]
    for sample in samples:
        load, rank = heap[0]
        groups[rank].append(sample)
        heapq.heapreplace(heap, (load + weights[sample], rank))
    return groups


def _earliest_end(work: Workload, costs: Floats | None) -> Groups:
    """LPT for ranks that differ; ``costs`` only set the order."""
    loads = work.base.copy()
    columns = np.ascontiguousarray(work.costs.T)
    groups: Groups = [[] for _ in range(work.num_ranks)]
    samples = range(work.num_samples) if costs is None else np.argsort(-costs, kind="stable").tolist()
    for sample in samples:
        ends = loads + columns[sample]
        rank = int(ends.argmin())
        groups[rank].append(sample)
        loads[rank] = ends[rank]
    return groups


def largest_differencing(costs: Sequence[float], num_ranks: int) -> Groups:
    """Karmarkar-Karp for ``num_ranks`` alike: merge the two most uneven partial partitions, large against small.

    A partial partition keeps only its non-empty groups, largest first. So most merges touch few groups, and the whole
    takes milliseconds where lists of ``num_ranks`` mostly empty groups take a second.

    Args:
        costs: ``[n]``, one per sample, falling.
        num_ranks: the number of groups.

    Source: Karmarkar and Karp, *The Differencing Method of Set Partitioning*, 1982; in its k-way form.
    """
    heap = [(-cost, index, [cost], [[index]]) for index, cost in enumerate(costs)]
    return _merge_all(heap, num_ranks)


def balanced_differencing(costs: Sequence[float], num_ranks: int) -> Groups:
    """Karmarkar-Karp with equal counts: begins with rows of ``num_ranks`` samples of similar cost.

    Each merge gives every group one more sample. If ``num_ranks`` does not divide ``n``, some groups have one less.

    Args:
        costs: ``[n]``, one per sample, falling.
        num_ranks: the number of groups.
    """
    heap = []
    for row, first in enumerate(range(0, len(costs), num_ranks)):
        samples = range(first, min(first + num_ranks, len(costs)))
        sums = [costs[sample] for sample in samples]
        spread = sums[0] - (sums[-1] if len(sums) == num_ranks else 0)
        heap.append((-spread, row, sums, [[sample] for sample in samples]))
    heapq.heapify(heap)
    return _merge_all(heap, num_ranks)


def _merge_all(heap: list[tuple[float, int, list[float], Groups]], num_ranks: int) -> Groups:
    """Merge partial partitions ``(-spread, age, sums, groups)``, groups by falling sum, until one is left."""
    age = len(heap)
    while len(heap) > 1:
        _, _, sums, groups = heapq.heappop(heap)
        sums, groups = _merge(sums, groups, heap[0][2], heap[0][3], num_ranks)
        spread = sums[0] - (sums[-1] if len(sums) == num_ranks else 0)
        heapq.heapreplace(heap, (-spread, age, sums, groups))
        age += 1
    groups = heap[0][3]
    return groups + [[] for _ in range(num_ranks - len(groups))]


def _merge(
    sums: list[float], groups: Groups, other_sums: list[float], other_groups: Groups, num_ranks: int
) -> tuple[list[float], Groups]:
    """The largest group of one with the smallest of the other, of ``num_ranks`` each, counting the empty ones."""
    alone, end = num_ranks - len(other_sums), len(sums)
    if alone >= end:
        sums, groups = sums + other_sums, groups + other_groups
    else:
        partner = num_ranks - 1
        both = range(alone, end)
        sums = (
            sums[:alone] + [sums[j] + other_sums[partner - j] for j in both] + other_sums[: num_ranks - end]
        )
        groups = (
            groups[:alone]
            + [groups[j] + other_groups[partner - j] for j in both]
            + other_groups[: num_ranks - end]
        )
    falling = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)
    return [sums[j] for j in falling], [groups[j] for j in falling]


def largest_to_fastest(work: Workload, groups: Groups) -> Groups:
    """Give the groups of a partition for equal ranks to ranks that differ: the largest to the fastest."""
    if work.alike:
        return groups
    fastest = np.argsort(work.costs.sum(1), kind="stable").tolist()
    means = work.means.tolist()
    falling = sorted(groups, key=lambda group: -sum(means[sample] for sample in group))
    placed: Groups = [[] for _ in groups]
    for rank, group in zip(fastest, falling, strict=True):
        placed[rank] = group
    return placed
