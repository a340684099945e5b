"""Distributing padded microbatches over ranks.

The samples of all ranks together are the *pool*. Cut together, they pad least. So whole microbatches of the pool are
distributed first; each is one item to place, like a sample. A few large items are hard to distribute evenly, so they
are also halved and quartered, and samples are tried one by one. Then a `descent` exchanges samples between ranks, and
each rank cuts its own.

Example: 2 ranks, rows of 10, 10, 10 and 10 tokens, a token costs 1 and a microbatch 4. The pool is one microbatch of
``4 * 10 + 4 = 44``, and the other rank would be idle. No rank can be done before ``44 / 2 = 22``. Microbatches of at
most 22 are two of two samples, ``2 * 10 + 4 = 24`` on each rank, which is the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_odc.balance.arrays import Floats, Plan
from lightning_odc.balance.descent import Descent, Estimate
from lightning_odc.balance.exact import MOST_RANKS, MOST_SAMPLES, best_partition, table_loads
from lightning_odc.balance.padding import PaddedSamples, RankLoads
from lightning_odc.balance.partition import TOLERANCE, Groups, longest_first, partition
from lightning_odc.balance.workload import Workload, lower_bound

_FEW_SAMPLES = 32
_STEPS_FOR_FEW, _STEPS = 64, 12
_TOLERANCE = 2e-3
_SHARES = (math.inf, 1.0, 0.5, 0.25)


def partition_padded(samples: PaddedSamples, starts: int) -> Plan:
    """The microbatches of every rank, such that the largest load is small.

    Up to 10 samples of one number each are shared out in the best possible way.

    Args:
        samples: the samples, and what their rows cost.
        starts: see `Planner`.
    """
    few = len(samples.sizes) <= _FEW_SAMPLES and starts > 0
    loads = RankLoads(samples)
    exactly = few and len(samples.sizes) <= MOST_SAMPLES and samples.num_ranks <= MOST_RANKS
    if exactly and samples.others is None:
        of_sets = table_loads(samples.costs, samples.overhead, samples.most, samples.runs)
        groups = best_partition(np.broadcast_to(of_sets, (samples.num_ranks, of_sets.shape[1])))
    else:
        groups = _share_out(samples, loads, starts // 4 if few else 0, few)
    return [loads.microbatches(rank, group) for rank, group in enumerate(groups)]


def padded_bound(samples: PaddedSamples, pooled: float) -> float:
    """No plan has a largest load below this many grid points.

    Args:
        samples: the samples.
        pooled: what they cost together, see `PaddedSamples.pool`.
    """
    filled = samples.sizes / np.maximum(samples.caps[: len(samples.costs), None], samples.sizes)
    work = Workload.of(samples.all_costs + samples.overhead[:, None] * filled, samples.num_ranks)
    alone = float((samples.all_costs + samples.overhead[:, None]).min(0).max())
    level = pooled / samples.num_ranks if samples.alike else 0.0
    return max(lower_bound(work) / work.scale, alone, level)


def _share_out(samples: PaddedSamples, loads: RankLoads, starts: int, few: bool) -> Groups:
    """The samples of every rank, numbered as in ``samples``."""
    pooled, bins = samples.pool()
    tolerance = TOLERANCE if few else _TOLERANCE
    bound = padded_bound(samples, pooled)
    good_enough = bound * (1 + tolerance)
    parts = _parts_of_bins(samples, bins)
    options = list(_options(samples, bins, bound)) if few else [_likeliest(samples, bins, bound, good_enough)]
    if few or samples.caps_differ:
        options.append((_alone(samples), Workload.of(parts, samples.num_ranks)))
    best: Descent | None = None
    for things, work in options:
        shared = partition(work, starts=starts, tolerance=tolerance)
        groups = [[one for thing in work.order[group].tolist() for one in things[thing]] for group in shared]
        descent = Descent(loads, _estimate(samples, parts), groups, pairs_too=few)
        descent.run(good_enough, _STEPS_FOR_FEW if few else _STEPS)
        if best is None or descent.largest_load() < best.largest_load():
            best = descent
        if best.largest_load() <= good_enough:
            break
    assert best is not None
    return best.groups


def _estimate(samples: PaddedSamples, parts: Floats) -> Estimate:
    """Each sample costs its part of a microbatch of the pool, so microbatches cost nothing more."""
    return Estimate(parts, np.zeros(samples.num_ranks), samples.sizes, samples.caps)


Things = list[Sequence[int]]


def _options(samples: PaddedSamples, bins: list[range], bound: float) -> Iterator[tuple[Things, Workload]]:
    """What to share out: microbatches of the pool, smaller ones, and single samples."""
    tried = 0
    for share in _SHARES:
        things = _halved(samples, bins, share * bound)
        if len(things) > tried:
            tried = len(things)
            yield things, _work(samples, things)
    if tried < len(samples.sizes):
        alone = _alone(samples)
        yield alone, _work(samples, alone)


def _likeliest(
    samples: PaddedSamples, bins: list[range], bound: float, good_enough: float
) -> tuple[Things, Workload]:
    """The first option that is good enough if shared out longest first, or the best of all."""
    best, least = None, math.inf
    for option in _options(samples, bins, bound):
        load = _longest_first_load(option[1])
        if load < least:
            best, least = option, load
        if load <= good_enough:
            break
    assert best is not None
    return best


def _alone(samples: PaddedSamples) -> Things:
    return [(sample,) for sample in range(len(samples.sizes))]


def _halved(samples: PaddedSamples, bins: list[range], limit: float) -> Things:
    """Microbatches of which none costs much more than the limit, if it has two samples."""
    ends, rows = [own[-1] for own in bins], np.array([len(own) for own in bins])
    costs = rows * samples.costs[:, ends].min(0) + samples.overhead.min()
    if samples.beside is not None:
        costs = costs + _beside_of(samples, bins).min(0)
    counts = np.clip(np.ceil(costs / limit), 1, rows).astype(np.int64).tolist()
    things: Things = []
    for own, count in zip(bins, counts, strict=True):
        things += [own[len(own) * part // count : len(own) * (part + 1) // count] for part in range(count)]
    return things


def _work(samples: PaddedSamples, things: Things) -> Workload:
    return Workload.of(_costs_of(samples, things), samples.num_ranks)


def _costs_of(samples: PaddedSamples, things: Sequence[Sequence[int]]) -> Floats:
    """``[1 or num_ranks, things]``, what each costs as a microbatch."""
    ends, rows = [own[-1] for own in things], np.array([len(own) for own in things])
    costs = samples.costs[:, ends] * rows + samples.overhead[:, None]
    return costs if samples.beside is None else costs + _beside_of(samples, things)


def _beside_of(samples: PaddedSamples, things: Sequence[Sequence[int]]) -> Floats:
    """``[1 or num_ranks, things]``, what each costs besides its rows."""
    return np.array([[samples.beside_of(row, own) for own in things] for row in range(len(samples.costs))])


def _longest_first_load(work: Workload) -> float:
    groups = longest_first(work)
    rows = np.broadcast_to(work.costs, (work.num_ranks, work.costs.shape[1]))
    return max(float(rows[rank, group].sum()) for rank, group in enumerate(groups)) / work.scale


def _parts_of_bins(samples: PaddedSamples, bins: list[range]) -> Floats:
    """``[1 or num_ranks, n]``: each sample's part of the cost of its microbatch, if the pool had the rank's cap."""
    pools = {cap: samples.pool(cap)[1] for cap in set(samples.caps.tolist())} if samples.caps_differ else {}
    parts = np.empty_like(samples.costs)
    for rank, (costs, overhead) in enumerate(zip(samples.costs, samples.overhead.tolist(), strict=True)):
        own = pools.get(int(samples.caps[rank]), bins)
        rows = np.array([len(members) for members in own])
        ends = np.repeat([members[-1] for members in own], rows)
        parts[rank] = costs[ends] + overhead / np.repeat(rows, rows)
    return parts if samples.beside is None else parts + samples.beside
