"""What a plan takes: by rank, under on-demand communication and under collectives, and at the very least."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Floats, Plan, as_lengths, check_cap
from lightning_odc.balance.costs import evaluate, resolve_cost
from lightning_odc.balance.workload import Workload, lower_bound


def microbatch_costs(plan: Plan, lengths: Any, cost: Any = "quadratic") -> list[list[float]]:
    """Cost of each microbatch on its rank, overhead included.

    Args:
        plan: of the samples of one minibatch.
        lengths: ``[n]`` tokens of the samples that the plan's indices name.
        cost: as for `plan_minibatch`.
    """
    samples, overhead = evaluate(resolve_cost(cost), as_lengths(lengths), len(plan))
    rows = np.broadcast_to(samples, (len(plan), samples.shape[1]))
    return [
        [float(rows[rank, microbatch].sum() + overhead[rank]) for microbatch in microbatches]
        for rank, microbatches in enumerate(plan)
    ]


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
        cost: as for `plan_minibatch`.
        max_tokens: most tokens of a microbatch; by default the longest sample.
    """
    array = as_lengths(lengths)
    samples, overhead = evaluate(resolve_cost(cost), array, num_ranks)
    shares: Floats = overhead[:, None] * (array / check_cap(array, max_tokens))
    alike = len(samples) == 1 and bool((overhead == overhead[0]).all())
    work = Workload.of(samples + (shares[:1] if alike else shares), num_ranks)
    alone = float((samples + overhead[:, None]).min(0).max())
    return max(lower_bound(work) / work.scale, alone)
