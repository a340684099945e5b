"""What balancing would gain on a loader as it is: planned from lengths, before anything has run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, SequentialSampler, Subset

from lightning_odc.balance import (
    COLLECTIVE_SAFE,
    Plan,
    Planner,
    collective_cost,
    microbatch_costs,
    on_demand_cost,
)
from lightning_odc.balance.arrays import first_number
from lightning_odc.balance.collation import Collation
from lightning_odc.data.lengths import LengthArray, LengthFunction, checked, plain
from lightning_odc.data.rng import isolated_rng, with_own_rng

_SECONDS = 0.4
_MOST_MINIBATCHES = 16


@dataclass(frozen=True)
class Gain:
    """What a plan says about batches as they come and about balanced minibatches."""

    idle: float  # the part of all ranks' time in which they wait, as batches come
    balanced_idle: float  # the same for balanced minibatches
    padding: float  # the part of the computed tokens that is padding, as batches come
    balanced_padding: float  # the same for balanced minibatches
    balanced: float  # the time of balanced minibatches, in the unit of the cost
    factor: float  # the time as batches come, over the time of balanced minibatches
    shortest: int  # tokens of the shortest sample that was looked at; of rows of numbers, by the first one
    longest: int  # tokens of the longest one


def planned_gain(
    lengths: LengthArray, batch_size: int, batches: int, planner: Planner, unbalanced: Collation | None = None
) -> Gain:
    """Compare batches as they come with balanced minibatches; ``unbalanced`` is the collation of the former."""
    num_ranks = planner.num_ranks
    balanced_as: Any = {"cost": planner.cost, "collation": planner.collation}
    come_as: Any = {"cost": planner.cost, "collation": unbalanced or planner.collation}
    size = batch_size * batches * num_ranks
    whole = lengths[: len(lengths) // size * size or len(lengths)]
    # As they come, ranks wait at every batch, since Lightning meets there. Balanced, they wait once per optimizer
    # step, or at every microbatch under a policy for collectives.
    evaluate = collective_cost if planner.policy in COLLECTIVE_SAFE else on_demand_cost
    come, balanced = _Sum(), _Sum()
    for part in [whole[first : first + size] for first in range(0, len(whole), size)][:_MOST_MINIBATCHES]:
        # A distributed sampler gives a rank every `num_ranks`-th sample.
        by_rank = [range(rank, len(part), num_ranks) for rank in range(num_ranks)]
        begins = range(0, batch_size * batches, batch_size)
        dealt = [[list(samples[begin : begin + batch_size]) for begin in begins] for samples in by_rank]
        planned = planner.plan(part)
        come.add(collective_cost(dealt, part, **come_as), dealt, part, **come_as)
        balanced.add(evaluate(planned, part, **balanced_as), planned, part, **balanced_as)
    factor, tokens = come.time / balanced.time, first_number(lengths)
    shares = come.idle, balanced.idle, come.padding, balanced.padding
    return Gain(*shares, balanced.time, factor, int(tokens.min()), int(tokens.max()))


@dataclass
class _Sum:
    """Sums over minibatches: their time, the mean time that ranks compute, and tokens with and without padding."""

    time: float = 0.0
    work: float = 0.0
    computed: int = 0
    own: int = 0

    def add(self, time: float, plan: Plan, lengths: LengthArray, cost: Any, collation: Collation) -> None:
        costs = microbatch_costs(plan, lengths, cost, collation=collation)
        self.time += time
        self.work += sum(map(sum, costs)) / len(costs)
        samples = [lengths[microbatch] for microbatches in plan for microbatch in microbatches if microbatch]
        self.computed += sum(collation.tokens(of_microbatch) for of_microbatch in samples)
        self.own += sum(int(first_number(of_microbatch).sum()) for of_microbatch in samples)

    @property
    def idle(self) -> float:
        return 1 - self.work / self.time

    @property
    def padding(self) -> float:
        return max(1 - self.own / self.computed, 0.0)  # a collate_fn that cuts computes fewer


def glance(loader: DataLoader[Any], enough: int, length_of: LengthFunction) -> tuple[LengthArray, list[int]]:
    """Lengths and indices of ``enough`` samples in the order they come; fewer where reading takes time, or none."""
    dataset: Any = loader.dataset
    shuffled = getattr(loader.sampler, "shuffle", not isinstance(loader.sampler, SequentialSampler))
    count = min(enough, len(dataset))
    generator = np.random.default_rng(0)  # in time that does not grow with the data set
    order = generator.choice(len(dataset), count, replace=False) if shuffled else np.arange(count)
    indices = order.tolist()
    while isinstance(dataset, Subset):
        dataset, order = dataset.dataset, np.asarray(dataset.indices)[order]
    known = getattr(dataset, "__dict__", {}).get("lengths")  # a property may be anything but cheap
    if known is not None and not callable(known):
        return checked([plain(known[int(index)]) for index in order]), indices
    if loader.num_workers and not isinstance(dataset, list | tuple):
        return checked([]), []
    lengths = _read(dataset, order.tolist(), length_of)
    return lengths, indices[: len(lengths)]


def _read(dataset: Any, indices: list[int], length_of: LengthFunction) -> LengthArray:
    end, copied, found = time.monotonic() + _SECONDS, with_own_rng(dataset), list[Any]()
    with isolated_rng():
        for index in indices:
            found.append(plain(length_of(copied[index])))
            if time.monotonic() > end:
                break
    return checked(found)
