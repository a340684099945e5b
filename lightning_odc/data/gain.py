"""What balancing would gain on a loader as it is: planned from lengths, before anything has run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, SequentialSampler, Subset

from lightning_odc.balance import COLLECTIVE_SAFE, Plan, Planner, microbatch_costs
from lightning_odc.balance.arrays import Floats, as_lengths, first_number
from lightning_odc.balance.collation import Collation
from lightning_odc.data.lengths import LengthArray, LengthFunction, plain
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
    num_ranks, size = planner.num_ranks, batch_size * batches * planner.num_ranks
    whole = lengths[: len(lengths) // size * size or len(lengths)]
    # As they come, ranks wait at every batch, since Lightning meets there. Balanced, they wait once per optimizer
    # step, or at every microbatch under a policy for collectives.
    meets = planner.policy in COLLECTIVE_SAFE
    come, balanced = np.zeros(4), np.zeros(4)
    for part in [whole[first : first + size] for first in range(0, len(whole), size)][:_MOST_MINIBATCHES]:
        # A distributed sampler gives a rank every `num_ranks`-th sample.
        by_rank = [range(rank, len(part), num_ranks) for rank in range(num_ranks)]
        begins = range(0, batch_size * batches, batch_size)
        dealt = [[list(samples[begin : begin + batch_size]) for begin in begins] for samples in by_rank]
        come += _facts(dealt, part, planner.cost, unbalanced or planner.collation, meets=True)
        balanced += _facts(planner.plan(part), part, planner.cost, planner.collation, meets)
    both = come.tolist(), balanced.tolist()
    idle, balanced_idle = (1 - work / time for time, work, _, _ in both)
    # A collate_fn that cuts computes fewer tokens than there are.
    padding, balanced_padding = (max(1 - own / computed, 0.0) for _, _, computed, own in both)
    (slow, *_), (time, *_) = both
    tokens = first_number(lengths)
    ends = int(tokens.min()), int(tokens.max())
    return Gain(idle, balanced_idle, padding, balanced_padding, time, slow / time, *ends)


def _facts(plan: Plan, lengths: LengthArray, cost: Any, collation: Collation, meets: bool) -> Floats:
    """Of a minibatch: its time, the mean time that ranks compute, and the tokens with and without padding."""
    costs = microbatch_costs(plan, lengths, cost, collation=collation)
    busy = [sum(own) for own in costs]
    time = sum(map(max, zip(*costs, strict=True))) if meets else max(busy)
    microbatches = [lengths[own] for of_rank in plan for own in of_rank if own]
    computed = sum(collation.tokens(own) for own in microbatches)
    own_tokens = sum(first_number(own).sum() for own in microbatches)
    return np.array([time, sum(busy) / len(busy), computed, own_tokens])


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
        return as_lengths([plain(known[int(index)]) for index in order], count=count), indices
    if loader.num_workers and not isinstance(dataset, list | tuple):
        return as_lengths([], count=0), []
    lengths = _read(dataset, order.tolist(), length_of)
    return lengths, indices[: len(lengths)]


def _read(dataset: Any, indices: list[int], length_of: LengthFunction) -> LengthArray:
    end, copied, found = time.monotonic() + _SECONDS, with_own_rng(dataset), list[Any]()
    with isolated_rng():
        for index in indices:
            found.append(plain(length_of(copied[index])))
            if time.monotonic() > end:
                break
    return as_lengths(found, count=len(found))
