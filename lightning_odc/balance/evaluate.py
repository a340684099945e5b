"""What a plan takes: by rank, under on-demand communication and under collectives, and at the very least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, Plan, as_lengths
from lightning_odc.balance.bins import packing_cost
from lightning_odc.balance.caps import Caps, as_caps, check_caps
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import Terms, bar, resolve_cost, terms_of
from lightning_odc.balance.numbers import first_number, fullest
from lightning_odc.balance.padding import PaddedSamples
from lightning_odc.balance.pool import padded_bound
from lightning_odc.balance.workload import Workload, lower_bound


def microbatch_costs(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> list[list[float]]:
    """Cost of each microbatch on its rank, overhead included.

    Args:
        plan: The plan of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name, or ``[n, d]`` numbers.
        cost: See `plan_minibatch`.
        collation: See `plan_minibatch`.
    """
    array = as_lengths(lengths)
    terms = terms_of(resolve_cost(cost), array, len(plan), collation)

    def of(rank: int, microbatch: list[int]) -> float:
        overhead, pair = float(terms.overhead[rank]), float(terms.pair[rank])
        alone, beside = terms.rows[rank, microbatch], beside_rows[rank, microbatch]
        return _together(alone, beside, array[microbatch], overhead, pair, collation)

    beside_rows = _beside(terms, terms.rows.shape)
    return [[of(rank, microbatch) for microbatch in microbatches] for rank, microbatches in enumerate(plan)]


def average_costs(
    microbatches: Sequence[Ints], cost: Any, num_ranks: int, *, collation: Collation = PACKED
) -> list[float]:
    """Cost of each microbatch, overhead included, on average over ranks.

    Args:
        microbatches: the lengths of each one's samples.
        cost: See `plan_minibatch`.
        num_ranks: how many ranks there are.
        collation: See `plan_minibatch`.
    """
    lengths = np.concatenate(list(microbatches))
    terms = terms_of(resolve_cost(cost), lengths, num_ranks, collation)
    cuts = np.cumsum([len(sizes) for sizes in microbatches])[:-1]
    beside = _beside(terms, terms.samples.shape).mean(0)
    parts = zip(np.split(terms.samples.mean(0), cuts), np.split(beside, cuts), microbatches, strict=True)
    overhead, pair = float(terms.overhead.mean()), float(terms.pair.mean())
    return [_together(alone, own, sizes, overhead, pair, collation) for alone, own, sizes in parts]


def _beside(terms: Terms, shape: tuple[int, ...]) -> Floats:
    """See `Terms.beside`, in this shape."""
    return np.broadcast_to(0.0 if terms.beside is None else terms.beside, shape)


def _together(
    alone: Floats, beside: Floats, lengths: Ints, overhead: float, pair: float, collation: Collation
) -> float:
    """Cost of one microbatch, from the costs that its samples have alone, and what of them padding does not raise."""
    sizes = first_number(lengths).tolist()
    if collation.is_table and sizes:
        longest = int(first_number(collation.row_lengths(lengths)).argmax())
        return len(sizes) * float(alone[longest] - beside[longest]) + float(beside.sum()) + overhead
    return math.fsum(alone.tolist()) + packing_cost([list(range(len(sizes)))], sizes, overhead, pair)


def on_demand_cost(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> float:
    """Cost of the minibatch where ranks meet once at its end: the largest sum over a rank's microbatches."""
    return max(sum(costs) for costs in microbatch_costs(plan, lengths, cost, collation=collation))


def collective_cost(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> float:
    """Cost of the minibatch where all ranks meet in every microbatch: the sum of the largest ``m``-th microbatches.

    Raises:
        ValueError: ranks have different numbers of microbatches, and collectives would hang.
    """
    costs = microbatch_costs(plan, lengths, cost, collation=collation)
    if len({len(row) for row in costs}) > 1:
        raise ValueError(
            f"ranks have {[len(row) for row in costs]} microbatches, and collectives need equally many: "
            'policy="lb_micro".'
        )
    return sum(max(column) for column in zip(*costs, strict=True))


def least_cost(
    lengths: Any,
    num_ranks: int,
    cost: Any = "quadratic",
    max_tokens: Caps = None,
    *,
    collation: Collation = PACKED,
) -> float:
    """A lower bound on `on_demand_cost` of any plan of these samples.

    Args:
        lengths: ``[n]`` tokens of the minibatch's samples, or ``[n, d]`` numbers.
        num_ranks: how many ranks share them.
        cost: See `plan_minibatch`.
        max_tokens: most tokens of a microbatch, see `plan_minibatch`; by default the longest row.
        collation: See `plan_minibatch`.
    """
    array = as_lengths(lengths)
    rows = collation.row_lengths(array)
    caps = check_caps(array, rows, as_caps(max_tokens, num_ranks), num_ranks)
    terms = bar(terms_of(resolve_cost(cost), array, num_ranks, collation), rows, caps)
    if collation.is_table:
        samples = PaddedSamples.of(array, caps, terms, collation, below=True)
        return padded_bound(samples, samples.pool()[0]) / samples.scale
    ranks = 1 if terms.are_alike else num_ranks
    sizes, most = fullest(array, caps)
    bins = terms.overhead[:ranks, None] * (sizes / most[:ranks, None])
    work = Workload.of(terms.samples + bins, num_ranks)
    alone = float((terms.samples + terms.overhead[:, None]).min(0).max())
    return max(lower_bound(work) / work.scale, alone)
