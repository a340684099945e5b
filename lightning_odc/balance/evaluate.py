"""What a plan takes: by rank, under on-demand communication and under collectives, and at the very least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Cap, Ints, Plan, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens
from lightning_odc.balance.tables import microbatches_of


def microbatch_costs(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> list[list[float]]:
    """Cost of each microbatch on its rank, overhead included.

    Args:
        plan: The plan of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name.
        cost: See `plan_minibatch`.
        collation: See `plan_minibatch`.
    """
    array = as_lengths(lengths)
    costs = MinibatchCosts.of(cost, array, len(plan), collation)
    found = []
    for rank, own in enumerate(plan):
        found.append([_together(costs, rank, members, array, collation) for members in own])
    return found


def relative_costs(
    microbatches: Sequence[Ints], cost: Any, num_ranks: int = 1, *, collation: Collation = PACKED
) -> list[float]:
    """Cost of each microbatch, overhead included, if they all run on the first rank.

    Args:
        microbatches: the lengths of each one's samples.
        cost: See `plan_minibatch`.
        num_ranks: how many ranks there are.
        collation: See `plan_minibatch`.
    """
    ends: list[int] = np.cumsum([0, *map(len, microbatches)]).tolist()
    members = [list(range(begin, end)) for begin, end in pairwise(ends)]
    others: Plan = [[]] * (num_ranks - 1)
    costs = microbatch_costs([members, *others], np.concatenate(microbatches), cost, collation=collation)
    return costs[0]


def _together(costs: MinibatchCosts, rank: int, members: Any, lengths: Ints, collation: Collation) -> float:
    """Cost of one microbatch on a rank, from the costs that samples have alone, and the lengths of all."""
    row = rank % len(costs.samples)
    alone = costs.samples[row].take(members)
    own = lengths[members]
    overhead = float(costs.overhead[rank])
    if collation.is_table and len(members):
        longest = int(collation.row_lengths(own).argmax())
        return len(members) * float(alone[longest]) + overhead
    pairs = pairs_of_tokens(own.tolist())
    return math.fsum(alone.tolist()) + overhead + float(costs.pair[rank]) * pairs


def on_demand_cost(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> float:
    """Cost of the minibatch where ranks synchronize once at its end: the largest sum over a rank's microbatches.

    Args:
        plan: The plan of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name.
        cost: See `plan_minibatch`.
        collation: See `plan_minibatch`.
    """
    return max(sum(costs) for costs in microbatch_costs(plan, lengths, cost, collation=collation))


def collective_cost(
    plan: Plan, lengths: Any, cost: Any = "quadratic", *, collation: Collation = PACKED
) -> float:
    """Cost of the minibatch where all ranks synchronize in every microbatch: the sum of the largest ``m``-th ones.

    Args:
        plan: The plan of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name.
        cost: See `plan_minibatch`.
        collation: See `plan_minibatch`.

    Raises:
        ValueError: ranks have different numbers of microbatches, and collectives would hang.
    """
    costs = microbatch_costs(plan, lengths, cost, collation=collation)
    return sum(max(column) for column in zip(*costs, strict=True))


def least_cost(
    lengths: Any,
    num_ranks: int,
    cost: Any = "quadratic",
    max_tokens: Cap = None,
    *,
    collation: Collation = PACKED,
) -> float:
    """A lower bound on `on_demand_cost` of any plan of these samples.

    Args:
        lengths: ``[n]`` tokens of the minibatch's samples.
        num_ranks: how many ranks share them.
        cost: See `plan_minibatch`.
        max_tokens: most tokens of a microbatch, see `plan_minibatch`; by default the longest row.
        collation: See `plan_minibatch`.
    """
    work = microbatches_of(as_lengths(lengths), max_tokens, cost, num_ranks, collation)
    return work.bound() / work.scale
