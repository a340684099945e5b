"""What balancing would gain on a loader as it is: planned from lengths, before anything has run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning_odc.balance import COLLECTIVE_SAFE, Plan, Planner, microbatch_costs
from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.collation import Collation
from lightning_odc.data.plan import dealt_out

_MOST_MINIBATCHES = 16


@dataclass(frozen=True)
class Gain:
    """What a plan says about batches as they come and about balanced minibatches."""

    idle: float  # the part of all ranks' time in which they wait, as batches come
    balanced_idle: float  # the same for balanced minibatches
    padding: float  # the part of the computed tokens that is padding, as batches come
    balanced_padding: float  # the same for balanced minibatches
    factor: float  # the time as batches come, over the time of balanced minibatches
    shortest: int  # tokens of the shortest sample that was looked at
    longest: int  # tokens of the longest one
    least_idle: float  # as `idle`, where ranks wait once per optimizer step only
    padding_alone: float  # as `padding`, with one sample in a batch

    def described(self, samples: int) -> str:
        """In lines, what is certain, whichever strategy trained before; ``samples`` are those of a rank in a step."""
        said = (
            f"Expected padding: {self.balanced_padding:.0%} of the computed tokens; "
            f"with your batches, {self.padding:.0%}."
        )
        if self.idle:  # on one rank there is none
            said += (
                f"\nExpected waits: {self.balanced_idle:.0%} of the time; with your batches, about "
                f"{self.least_idle:.0%}."
            )
        if self.padding_alone < self.padding / 2:
            said += (
                f"\nWithout this package, one sample at a time ({samples} accumulated batches of 1) computes "
                f"{self.padding_alone:.0%} padding."
            )
        return said


@dataclass
class _Totals:
    """What minibatches take, and what they compute."""

    time: float = 0.0
    least: float = 0.0  # if ranks wait for each other once per minibatch
    work: float = 0.0  # the mean time that ranks compute
    computed: int = 0  # tokens, padding included
    own: int = 0  # tokens without it

    def add(self, plan: Plan, lengths: Ints, cost: Any, collation: Collation, meets: bool) -> None:
        """Count one more minibatch; ``meets``: ranks wait for each other at every microbatch."""
        costs = microbatch_costs(plan, lengths, cost, collation=collation)
        busy = [sum(of_rank) for of_rank in costs]
        self.least += max(busy)
        self.time += sum(map(max, zip_longest(*costs, fillvalue=0.0))) if meets else max(busy)
        self.work += sum(busy) / len(busy)
        for of_rank in plan:
            for microbatch in filter(None, of_rank):
                own = lengths[microbatch]
                self.computed += collation.tokens(own)
                self.own += int(own.sum())

    @property
    def idle(self) -> float:
        return 1 - self.work / self.time

    @property
    def padding(self) -> float:
        # A collate_fn that cuts computes fewer tokens than there are.
        return max(1 - self.own / self.computed, 0.0)


def planned_gain(
    lengths: Ints, batch_size: int, batches: int, planner: Planner, unbalanced: Collation | None = None
) -> Gain:
    """Compare batches as they come with balanced minibatches; ``unbalanced`` is the collation of the former."""
    size = batch_size * batches * planner.num_ranks
    whole = lengths[: len(lengths) // size * size or len(lengths)]
    # As they come, ranks wait at every batch, since Lightning meets there. Balanced, they wait once per optimizer
    # step, or at every microbatch under a policy for collectives.
    meets = planner.policy in COLLECTIVE_SAFE
    collation = unbalanced or planner.collation
    as_they_come = _Totals()
    balanced = _Totals()
    alone = _Totals()
    for first in range(0, len(whole), size)[:_MOST_MINIBATCHES]:
        part = whole[first : first + size]
        samples = list(range(len(part)))
        dealt = dealt_out(samples, planner.num_ranks, batch_size)
        as_they_come.add(dealt, part, planner.cost, collation, meets=True)
        alone.add(dealt_out(samples, 1, 1), part, planner.cost, collation, meets=False)
        balanced.add(planner.plan(part), part, planner.cost, planner.collation, meets)
    return Gain(
        idle=as_they_come.idle,
        balanced_idle=balanced.idle,
        padding=as_they_come.padding,
        balanced_padding=balanced.padding,
        factor=as_they_come.time / balanced.time,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        least_idle=1 - as_they_come.work / as_they_come.least,
        padding_alone=alone.padding,
    )
