"""What a plan takes: by rank, under on-demand communication and under collectives, and at the very least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Caps, Ints, Plan, as_caps, as_lengths, check_caps, first_number
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens, resolve_cost
from lightning_odc.balance.packed import Packed
from lightning_odc.balance.tables import Tables


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
    costs = MinibatchCosts.of(resolve_cost(cost), array, len(plan), collation)
    return [
        [_together(costs, rank, microbatch, array[microbatch], collation) for microbatch in microbatches]
        for rank, microbatches in enumerate(plan)
    ]


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
    costs = MinibatchCosts.of(resolve_cost(cost), lengths, num_ranks, collation).average()
    ends = np.cumsum([len(sizes) for sizes in microbatches]).tolist()
    return [
        _together(costs, 0, range(end - len(sizes), end), sizes, collation)
        for end, sizes in zip(ends, microbatches, strict=True)
    ]


def _together(
    costs: MinibatchCosts, rank: int, members: Sequence[int], lengths: Ints, collation: Collation
) -> float:
    """Cost of one microbatch on a rank, from the costs that its members have alone, and their lengths."""
    row, overhead, pair = rank % len(costs.samples), float(costs.overhead[rank]), float(costs.pair[rank])
    alone, extra = costs.samples[row].take(members), costs.extra_cost[row].take(members)
    if collation.is_table and len(members):
        longest = int(first_number(collation.row_lengths(lengths)).argmax())
        return len(members) * float(alone[longest] - extra[longest]) + float(extra.sum()) + overhead
    across = pairs_of_tokens(first_number(lengths).tolist()) if pair else 0
    return math.fsum(alone.tolist()) + overhead + pair * across


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
    costs = MinibatchCosts.of(resolve_cost(cost), array, num_ranks, collation)
    costs = costs.forbid_unfitting(rows, caps)
    is_table = collation.is_table
    work = Tables(rows, caps, costs, collation, below=True) if is_table else Packed(rows, caps, costs)
    return work.bound() / work.scale
