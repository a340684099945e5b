"""Equal counts without empty microbatches, where the ranks do not divide the samples.

Of ``n = q * num_ranks + r`` samples ``r`` ranks get ``q + 1`` and the others ``q``. If one of the former
cannot put two of its samples into one microbatch, it has ``q + 1`` microbatches, and each of the others ends
with an empty one. So each of the ``r`` needs a pair that fits, and such pairs exist if and only if the ``2r``
shortest samples, the shortest with the longest of them and so on, make them.
"""

from __future__ import annotations

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.workload import Workload


def fitting_pairs(lengths: Ints, cap: int, count: int) -> list[tuple[int, int]]:
    """So many disjoint pairs of samples that fit into one microbatch; none if there are not so many."""
    if 2 * count > len(lengths):
        return []
    shortest = np.argsort(lengths, kind="stable")[: 2 * count]
    pairs = [(int(shortest[i]), int(shortest[-1 - i])) for i in range(count)]
    return pairs if all(int(lengths[a] + lengths[b]) <= cap for a, b in pairs) else []


def share_with_pairs(work: Workload, sizes: list[int], pairs: list[tuple[int, int]]) -> list[Ints]:
    """The samples of every rank: one of the pairs for each of the largest shares, the rest the costliest first.

    Args:
        work: the workload.
        sizes: how many samples every rank gets; as many of the largest size as there are pairs.
        pairs: of samples, numbered as the caller does.

    Returns:
        For every rank its samples, numbered as the caller does.
    """
    number = {int(sample): position for position, sample in enumerate(work.order)}
    paired = [[number[sample] for sample in pair] for pair in pairs]
    larger = [rank for rank, size in enumerate(sizes) if size == max(sizes)]
    shares: list[list[int]] = [[] for _ in sizes]
    for rank, pair in zip(larger, paired, strict=True):
        shares[rank] = pair
    rows = np.broadcast_to(work.costs, (work.num_ranks, work.costs.shape[1]))
    loads = [float(work.base[rank] + rows[rank, share].sum()) for rank, share in enumerate(shares)]
    taken = {sample for pair in paired for sample in pair}
    for sample in (one for one in range(work.num_samples) if one not in taken):
        free = [rank for rank, share in enumerate(shares) if len(share) < sizes[rank]]
        rank = min(free, key=lambda one: loads[one] + rows[one, sample])
        shares[rank].append(sample)
        loads[rank] += float(rows[rank, sample])
    return [work.order[share] for share in shares]
