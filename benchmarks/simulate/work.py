"""What every device has to compute: the seconds of all planned microbatches, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.model import Model
from lightning_odc.balance import Plan, Planner, Policy, epoch_order, microbatch_costs

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Work:
    """What every device has to compute: ``S`` minibatches, ``M`` microbatches at most, ``D`` devices.

    Attributes:
        seconds: ``[S, M, D]`` of each microbatch, without waiting and communication; 0 where there is none.
        exists: ``[S, M, D]`` where there is a microbatch.
        most_tokens: The most tokens that a microbatch computes.
    """

    seconds: Floats
    exists: Bools
    most_tokens: int

    @property
    def are_equal(self) -> bool:
        """Whether all devices have equally many microbatches in every minibatch, as collectives need."""
        return bool((self.exists == self.exists[:, :, :1]).all())


def plan_work(
    lengths: Any,
    model: Model,
    cluster: Cluster,
    *,
    minibatch_size: int,
    policy: Policy = "lb_mini",
    max_tokens: int | None = None,
    minibatches: int = 1,
) -> Work:
    """Plan minibatches of a shuffled epoch with the package's planner.

    Args:
        lengths: ``[n]`` tokens of the samples of the data set, which are packed.
        model: What it costs is what the planner plans by.
        cluster: How many devices there are.
        minibatch_size: Samples per device and minibatch, as in `BalancedDataLoader`.
        policy: One of `lightning_odc.balance.POLICIES`.
        max_tokens: Most tokens of a microbatch; by default the longest sample.
        minibatches: How many.

    Raises:
        ValueError: too few samples, or what `Planner` refuses.
    """
    array = np.asarray(lengths)
    size = minibatch_size * cluster.devices
    if minibatches * size > len(array):
        raise ValueError(
            f"{minibatches} minibatches of {size} samples need more than the {len(array)} lengths that were given: "
            f"minibatches={len(array) // size}."
        )
    planner = Planner(cluster.devices, max_tokens, policy, model.cost).capped_for(array)
    order = epoch_order(len(array), seed=0, epoch=0)
    drawn = []
    for index in range(minibatches):
        one = array[order[index * size : (index + 1) * size]]
        drawn.append(one)
    return work_of(((planner.plan(own), own) for own in drawn), model)


def work_of(planned: Iterable[tuple[Plan, Any]], model: Model) -> Work:
    """The work of plans.

    Args:
        planned: Plan of every minibatch, and ``[n]`` the lengths of the samples that its indices name.
        model: What it costs.
    """
    costs = []
    most_tokens = 0
    for plan, lengths in planned:
        costs.append(microbatch_costs(plan, lengths, model.cost))
        tokens = (sum(lengths[i] for i in microbatch) for rank in plan for microbatch in rank)
        most_tokens = max(most_tokens, *tokens)
    most = max(len(rank) for minibatch in costs for rank in minibatch)
    shape = (len(costs), most, len(costs[0]))
    seconds = np.zeros(shape)
    exists = np.zeros(shape, dtype=np.bool_)
    for index, minibatch in enumerate(costs):
        for device, rank in enumerate(minibatch):
            seconds[index, : len(rank), device] = rank
            exists[index, : len(rank), device] = True
    return Work(seconds, exists, int(most_tokens))
