"""What a plan takes: by rank, under on-demand communication and under collectives, and at the very least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, Plan, as_lengths, check_cap
from lightning_odc.balance.bins import packing_cost
from lightning_odc.balance.costs import resolve_cost, terms_of
from lightning_odc.balance.workload import Workload, lower_bound


def microbatch_costs(plan: Plan, lengths: Any, cost: Any = "quadratic") -> list[list[float]]:
    """Cost of each microbatch on its rank, overhead included.

    Args:
        plan: The plan of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name.
        cost: See `plan_minibatch`.
    """
    array = as_lengths(lengths)
    terms = terms_of(resolve_cost(cost), array, len(plan))

    def of(rank: int, microbatch: list[int]) -> float:
        overhead, pair = float(terms.overhead[rank]), float(terms.pair[rank])
        return _packed(terms.rows[rank, microbatch], array[microbatch], overhead, pair)

    return [[of(rank, microbatch) for microbatch in microbatches] for rank, microbatches in enumerate(plan)]


def average_costs(microbatches: Sequence[Ints], cost: Any, num_ranks: int) -> list[float]:
    """Cost of each microbatch, overhead included, on average over ranks.

    Args:
        microbatches: the lengths of each one's samples.
        cost: See `plan_minibatch`.
        num_ranks: how many ranks there are.
    """
    lengths = np.concatenate(list(microbatches))
    terms = terms_of(resolve_cost(cost), lengths, num_ranks)
    cuts = np.cumsum([len(sizes) for sizes in microbatches])[:-1]
    parts = np.split(terms.samples.mean(0), cuts)
    overhead, pair = float(terms.overhead.mean()), float(terms.pair.mean())
    return [_packed(alone, sizes, overhead, pair) for alone, sizes in zip(parts, microbatches, strict=True)]


def _packed(alone: Floats, lengths: Ints, overhead: float, pair: float) -> float:
    """Cost of one microbatch, from the costs that its samples have alone."""
    sizes = lengths.tolist()
    return math.fsum(alone.tolist()) + packing_cost([list(range(len(sizes)))], sizes, overhead, pair)


def on_demand_cost(plan: Plan, lengths: Any, cost: Any = "quadratic") -> float:
    """Cost of the minibatch where ranks meet once at its end: the largest sum over a rank's microbatches."""
    return max(sum(costs) for costs in microbatch_costs(plan, lengths, cost))


def collective_cost(plan: Plan, lengths: Any, cost: Any = "quadratic") -> float:
    """Cost of the minibatch where all ranks meet in every microbatch: the sum of the largest ``m``-th microbatches.

    Raises:
        ValueError: ranks have different numbers of microbatches, and collectives would hang.
    """
    costs = microbatch_costs(plan, lengths, cost)
    if len({len(row) for row in costs}) > 1:
        raise ValueError(
            f"ranks have {[len(row) for row in costs]} microbatches, and collectives need equally many: "
            'policy="lb_micro".'
        )
    return sum(max(column) for column in zip(*costs, strict=True))


def least_cost(lengths: Any, num_ranks: int, cost: Any = "quadratic", max_tokens: int | None = None) -> float:
    """A lower bound on `on_demand_cost` of any plan of these samples.

    Args:
        lengths: ``[n]`` tokens of the minibatch's samples.
        num_ranks: how many ranks share them.
        cost: See `plan_minibatch`.
        max_tokens: most tokens of a microbatch; by default the longest sample.
    """
    array = as_lengths(lengths)
    terms = terms_of(resolve_cost(cost), array, num_ranks)
    ranks = 1 if terms.are_alike else num_ranks
    bins = terms.overhead[:ranks, None] * (array / check_cap(array, max_tokens))
    work = Workload.of(terms.samples + bins, num_ranks)
    alone = float((terms.samples + terms.overhead[:, None]).min(0).max())
    return max(lower_bound(work) / work.scale, alone)
