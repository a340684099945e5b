"""Partitions when a microbatch costs something besides its samples, so that packing and balancing depend on each other.

A rank's load is the cost of its samples, plus its overhead times the number of its microbatches, plus the pair costs of
samples in one microbatch (Note [Dense attention]). It depends on packing, and rises in steps. So the search first works
without steps: each sample carries its part of a well-filled microbatch. Then a `descent` over the true
loads lets the heaviest rank exchange samples with others.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.bins import Packings, best_filling, packing_cost
from lightning_odc.balance.costs import Terms
from lightning_odc.balance.descent import Descent, Estimate
from lightning_odc.balance.exact import MOST_RANKS, MOST_SAMPLES, best_partition, bins_of_sets, sums_of_sets
from lightning_odc.balance.numbers import Others, first_number, fullest
from lightning_odc.balance.partition import TOLERANCE, partition
from lightning_odc.balance.workload import Workload, lower_bound

_FEW_SAMPLES = 32
_STEPS_FOR_FEW = 64
_STEPS = 12
_FILLINGS = (1.0, 0.75, math.inf)


def partition_with_overheads(
    lengths: Ints, caps: Ints, terms: Terms, starts: int, packings: Packings
) -> list[Ints]:
    """Choose the samples of every rank; returns their indices.

    Without pair costs, up to 10 samples are shared out in the best possible way. A few more are tried with the parts of
    microbatches that are full or three quarters full, and without parts.

    Args:
        lengths: ``[n]`` tokens, or ``[n, d]``. Of rows of numbers, estimates look at the one that fills most
            microbatches; the true loads look at all.
        caps: ``[num_ranks]`` or ``[num_ranks, d]``, most of a microbatch.
        terms: the costs; see `bar` for caps that differ.
        starts: see `Planner`.
        packings: what packs the samples of a rank.
    """
    num_ranks, few = len(caps), len(lengths) <= _FEW_SAMPLES and starts > 0
    if few and len(lengths) <= MOST_SAMPLES and num_ranks <= MOST_RANKS and not terms.pair.any():
        return [
            np.array(group, dtype=np.int64) for group in best_partition(_loads_of_sets(lengths, caps, terms))
        ]
    bin_costs = _bin_costs(lengths, caps, terms)
    least = terms.samples + _bin_costs(lengths, caps, replace(terms, pair=0 * terms.pair))
    bound = Workload.of(least, num_ranks)
    good_enough = lower_bound(bound) / bound.scale * (1 + TOLERANCE)
    loads = _PackedLoads(lengths, caps, terms, packings)
    estimate = _estimate(lengths, caps, terms, bin_costs)
    best: Descent | None = None
    for filling in _FILLINGS if few else _FILLINGS[:1]:
        work = Workload.of(terms.samples + bin_costs / filling, num_ranks)
        groups = [work.order[group].tolist() for group in partition(work, starts=starts)]
        descent = Descent(loads, estimate, groups, pairs_too=few)
        descent.run(good_enough, _STEPS_FOR_FEW if few else _STEPS)
        if best is None or descent.largest_load() < best.largest_load():
            best = descent
        if best.largest_load() <= good_enough:
            break
    assert best is not None
    if lengths.ndim == 2:
        return [np.array(group, dtype=np.int64) for group in best.groups]
    sizes = lengths.tolist()  # in the order of which `packings` knows the samples of each rank already
    return [np.array(sorted(group, key=sizes.__getitem__), dtype=np.int64) for group in best.groups]


def _loads_of_sets(lengths: Ints, caps: Ints, terms: Terms) -> Floats:
    """``[num_ranks, 2^n]``: what each rank takes for each set."""
    kinds, kind_of = np.unique(caps, axis=0, return_inverse=True)
    bins = np.array([bins_of_sets(np.minimum(lengths, cap), cap) for cap in kinds])[kind_of.ravel()]
    return sums_of_sets(terms.rows) + terms.overhead[:, None] * bins


def _bin_costs(lengths: Ints, caps: Ints, terms: Terms) -> Floats:
    """``[1 or num_ranks, n]``: what each sample adds to the cost of microbatches.

    It takes a part of a microbatch and of its cost, if microbatches are filled evenly and as far as it pays.
    """
    ranks = 1 if terms.are_alike else len(caps)
    sizes, most = _telling(lengths, caps, terms)
    overhead, pair = terms.overhead[:ranks, None], terms.pair[:ranks, None]
    costs = zip(most.tolist()[:ranks], terms.overhead.tolist(), terms.pair.tolist(), strict=False)
    full = np.array([[best_filling(*cost)] for cost in costs])  # [1 or num_ranks, 1]
    parts = overhead * sizes / np.maximum(full, 1.0) + pair * sizes * (full - sizes) / 2
    return np.where(sizes >= full, overhead, parts)


def _telling(lengths: Ints, caps: Ints, terms: Terms) -> tuple[Ints, Ints]:
    """One number of each sample, and its caps: the first one if pairs of tokens cost, else the one that fills most."""
    return (first_number(lengths), first_number(caps)) if terms.pair.any() else fullest(lengths, caps)


def _estimate(lengths: Ints, caps: Ints, terms: Terms, bin_costs: Floats) -> Estimate:
    """Microbatches are estimated by the tokens that fill them, or, where filling them costs, by each sample's part."""
    sizes, most = _telling(lengths, caps, terms)
    if terms.pair.any():
        return Estimate(terms.samples + bin_costs, np.zeros_like(terms.overhead), sizes, most)
    return Estimate(terms.samples, terms.overhead, sizes, most)


class _PackedLoads:
    """Loads of ranks whose samples are packed one after another, in the order of their lengths."""

    def __init__(self, lengths: Ints, caps: Ints, terms: Terms, packings: Packings) -> None:
        self._rows, self._packings = terms.rows, packings
        self._overhead, self._pair = terms.overhead.tolist(), terms.pair.tolist()
        # A sample that does not fit on a rank fills a microbatch there; its cost bars the exchange.
        self._kinds, kind_of = np.unique(caps, axis=0, return_inverse=True)
        self._kind_of = kind_of.ravel().tolist()
        self._cut = [np.minimum(lengths, cap).tolist() for cap in self._kinds]

    def of(self, rank: int, group: list[int]) -> float:
        kind, overhead, pair = self._kind_of[rank], self._overhead[rank], self._pair[rank]
        cut = self._cut[kind]
        sizes, others = sorted([cut[sample] for sample in group]), None
        if self._kinds.ndim == 2:
            others = Others.of(np.array(sizes), self._kinds[kind])
            sizes = [row[0] for row in sizes]
        extra = packing_cost(self._packings.of(rank, sizes, others), sizes, overhead, pair)
        return math.fsum([*self._rows[rank].take(group).tolist(), extra])
