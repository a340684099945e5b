"""Who gets which samples: start, search, and what more can still pay: all partitions, or a search from more starts."""

from __future__ import annotations

import numpy as np

from lightning_odc.balance.arrays import Floats
from lightning_odc.balance.exact import MOST_RANKS, MOST_SAMPLES, best_partition, sums_of_sets
from lightning_odc.balance.search import Search
from lightning_odc.balance.starts import (
    Groups,
    balanced_differencing,
    largest_differencing,
    largest_to_fastest,
    longest_first,
)
from lightning_odc.balance.workload import Workload, lower_bound

#: How many more starts are searched from where the first one leaves something to gain.
STARTS = 16
#: The search ends where the largest load is this close to the lower bound, relative to it.
TOLERANCE = 1e-5
_MORE_STARTS_ABOVE = 1e-4
_SAMPLES_IN_STARTS = 384
_ROUNDS = 24
_ROUNDS_OF_STARTS = 5
_SHAKES = (0.1, 0.3)
_GOLDEN = 0.6180339887498949


def partition(work: Workload, equal_counts: bool = False, starts: int = STARTS) -> Groups:
    """Samples for every rank such that the largest load is small.

    Args:
        work: the workload.
        equal_counts: ranks get equally many samples, or one less where ``num_ranks`` does not divide them.
        starts: how many more starts to search from, where the first one's result is not good enough; fewer, and at
            last none, for more than ``384 / starts`` samples, which leave less to gain. If not 0, up to 10 samples
            are shared out in the best possible way.

    Returns:
        For every rank its samples, numbered as in the workload; some ranks may get none.
    """
    bound = lower_bound(work, equal_counts)
    good_enough = bound * (1 + TOLERANCE)
    first = _start(work, equal_counts)
    if work.num_ranks == 1:
        return first
    search = Search(work, [first], equal_counts)
    search.run(good_enough, _ROUNDS)
    span, groups = search.best()
    if span <= bound * (1 + _MORE_STARTS_ABOVE) or starts < 1:
        return groups
    if not equal_counts and work.num_samples <= MOST_SAMPLES and work.num_ranks <= MOST_RANKS:
        loads = sums_of_sets(work.costs[:, :-1]) + work.base[:, None]
        return best_partition(np.broadcast_to(loads, (work.num_ranks, loads.shape[1])))
    starts = min(starts, _SAMPLES_IN_STARTS // work.num_samples)
    if starts < 1:
        return groups
    more = Search(work, [groups, *_more_starts(work, starts, equal_counts)], equal_counts)
    more.run(good_enough, _ROUNDS_OF_STARTS)
    return more.best()[1]


def _start(work: Workload, equal_counts: bool) -> Groups:
    if not equal_counts:
        return longest_first(work)
    return largest_to_fastest(work, balanced_differencing(work.means.tolist(), work.num_ranks))


def _more_starts(work: Workload, count: int, equal_counts: bool) -> list[Groups]:
    """Karmarkar-Karp, then starts from costs shaken by up to 10 or 30 percent."""
    if not equal_counts:
        karmarkar_karp = largest_differencing(work.means.tolist(), work.num_ranks)
        shaken = [longest_first(work, _shaken(work.means, index)) for index in range(1, count)]
        return [largest_to_fastest(work, karmarkar_karp), *shaken]
    starts = []
    for index in range(1, count + 1):
        costs = _shaken(work.means, index)
        order = np.argsort(-costs, kind="stable")
        groups = balanced_differencing(costs[order].tolist(), work.num_ranks)
        starts.append(largest_to_fastest(work, [order[group].tolist() for group in groups]))
    return starts


def _shaken(costs: Floats, index: int) -> Floats:
    """Costs times factors around 1, from the multiples of the golden ratio: spread evenly, and no random state."""
    steps = np.arange(len(costs)) * _GOLDEN + index * 0.7548776662466927
    spread = (steps * (1 + index)) % 1.0
    return costs * (1 + _SHAKES[index % len(_SHAKES)] * (2 * spread - 1))
