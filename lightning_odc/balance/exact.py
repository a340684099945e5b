"""The best partition of a few samples, by dynamic programming over sets of samples.

A set is a number whose bit ``i`` says whether it has sample ``i``. The arrays below have one entry per set, or one per
pair of a set and one of its subsets, of which ``n`` samples have ``3^n``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints

MOST_SAMPLES = 10
MOST_RANKS = 16


@dataclass(frozen=True, eq=False)
class _Pairs:
    """All pairs of a set and a subset, ordered by the set."""

    part: Ints
    rest: Ints  # the set without the part
    first: Ints  # where the pairs of each set begin


@lru_cache(maxsize=MOST_SAMPLES)
def _pairs(count: int) -> _Pairs:
    sets, parts = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for sample in range(count):  # in neither, in the set only, or in both
        bit = 1 << sample
        sets = np.concatenate([sets, sets + bit, sets + bit])
        parts = np.concatenate([parts, parts, parts + bit])
    order = np.lexsort((parts, sets))
    sets, parts = sets[order], parts[order]
    return _Pairs(parts, sets - parts, np.searchsorted(sets, np.arange(1 << count)))


def sums_of_sets(values: Floats) -> Floats:
    """``[..., 2^n]`` from ``[..., n]``: the sum over each set."""
    sums = np.zeros((*values.shape[:-1], 1))
    for sample in range(values.shape[-1]):
        sums = np.concatenate([sums, sums + values[..., sample, None]], axis=-1)
    return sums


def bins_of_sets(sizes: Ints, cap: Ints) -> Ints:
    """``[2^n]``: how many bins under the cap each set needs at least.

    Args:
        sizes: ``[n]``, or ``[n, d]`` where samples have rows of numbers; each is at most the cap.
        cap: ``[]`` or ``[d]``.
    """
    pairs = _pairs(len(sizes))
    sums = sums_of_sets(np.atleast_2d(sizes.T).astype(np.float64))  # [d, 2^n]
    fits: Bools = np.all(sums <= np.atleast_1d(cap)[:, None], axis=0)
    bins = np.zeros(len(fits), dtype=np.int64)
    packed = np.zeros(len(fits), dtype=np.bool_)
    packed[0] = True
    while not packed.all():
        bins += ~packed
        packed = np.logical_or.reduceat(fits[pairs.part] & packed[pairs.rest], pairs.first)
    return bins


def table_loads(costs: Floats, overhead: Floats, most: Ints, runs: Ints) -> Floats:
    """``[ranks, 2^n]``: what each rank takes for each set of samples, cut into tables of least cost.

    The longest sample of a set is in a table with the next longest ones, see `padding`; all numbers of them are tried.

    Args:
        costs: ``[ranks, n]`` of a row as long as each sample, rising.
        overhead: ``[ranks]``, cost of a table.
        most: ``[ranks, n]`` rows of a table in which each sample is the longest.
        runs: ``[n]``, the first sample that may be in a table with each.
    """
    loads = np.zeros((len(costs), 1))
    top = np.array([-1])  # [sets] the longest sample of each, -1 of none
    for longest in range(costs.shape[1]):
        rest = np.arange(1 << longest)  # the sets that the longest sample makes new ones of
        allowed = np.ones(len(rest), dtype=np.bool_)
        least = np.full((len(costs), len(rest)), np.inf)
        for rows in range(1, longest + 2):
            table = np.where(rows <= most[:, longest], rows * costs[:, longest] + overhead, np.inf)
            least = np.minimum(least, np.where(allowed, loads[:, rest] + table[:, None], np.inf))
            allowed = allowed & (top[rest] >= runs[longest])
            rest = np.where(rest, rest - (1 << np.maximum(top[rest], 0)), 0)
        loads = np.concatenate([loads, least], axis=1)
        top = np.append(top, np.full(1 << longest, longest))
    return loads


def best_partition(loads: Floats) -> list[list[int]]:
    """Samples for every rank such that the largest load is the smallest possible.

    Args:
        loads: ``[num_ranks, 2^n]``, what each rank takes for each set.
    """
    count = loads.shape[1].bit_length() - 1
    pairs = _pairs(count)
    least = [loads[0]]  # of the ranks so far, for each set
    for of_rank in loads[1:]:
        larger = np.maximum(of_rank[pairs.part], least[-1][pairs.rest])
        least.append(np.minimum.reduceat(larger, pairs.first))
    left, groups = (1 << count) - 1, []
    for rank in range(len(loads) - 1, 0, -1):
        part = pairs.part[pairs.first[left] : pairs.first[left + 1] if left + 1 < 1 << count else None]
        chosen = int(part[np.maximum(loads[rank][part], least[rank - 1][left - part]).argmin()])
        groups.append(chosen)
        left -= chosen
    return [[i for i in range(count) if mask >> i & 1] for mask in [left, *reversed(groups)]]
