"""What is certain before training: who waits under which plan, what lies on a rank, and what crosses the network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_odc.advisor.question import ModelFacts, Place, Question
from lightning_odc.balance import Planner, microbatch_costs
from lightning_odc.balance.arrays import Ints
from lightning_odc.console import OptionError
from lightning_odc.data.gain import Gain, planned_gain

WORTH = 1.03
"""A factor below this one is called none: what a plan leaves out is as large."""
_PLANNED_STEPS = 16
_ADAM = 2  # moments
_FP32 = 4


@dataclass(frozen=True)
class Plans:
    """What balancing would gain, planned from lengths and the model's cost, without the time of communication."""

    # batches as they come, and balanced for collectives: equally many microbatches on all ranks
    collective: Gain
    on_demand: Gain  # batches as they come, and balanced for ranks that meet once per optimizer step
    # the part of all ranks' time that no plan can remove, since one sample runs on one rank
    least_idle: float
    long_steps: int  # steps whose longest sample takes longer than a rank's equal share
    steps: int  # steps that were planned

    @classmethod
    def of(cls, question: Question) -> Plans:
        """Plan some steps of randomly drawn samples, the same ones under both policies."""
        size, lengths = question.samples_per_step, question.samples.lengths
        steps = min(len(lengths) // size, _PLANNED_STEPS)
        generator = np.random.default_rng(question.seed)
        drawn = lengths[generator.choice(len(lengths), steps * size, replace=False)]
        balanced, on_demand = (_gain(question, policy, drawn) for policy in ("lb_micro", "lb_mini"))
        shares, longest = np.array([_share_and_longest(question, part) for part in np.split(drawn, steps)]).T
        least = 1 - shares.sum() / np.maximum(shares, longest).sum()
        return cls(balanced, on_demand, float(least), int((longest > shares).sum()), steps)

    @property
    def over_collectives(self) -> float:
        """The time of the best plan for collectives, over that on demand."""
        return self.collective.balanced / self.on_demand.balanced


def _gain(question: Question, policy: Any, drawn: Ints) -> Gain:
    """What `lightning_odc.data.gain` says, as at the start of a fit."""
    samples = question.samples
    planner = Planner(
        question.place.devices,
        question.max_tokens,
        policy,
        question.model.cost,
        collation=samples.collation,
        allow_empty=True,
    ).capped_for(samples.lengths)
    batches = -(-question.minibatch_size // samples.together)
    return planned_gain(drawn, samples.together, batches, planner)


def _share_and_longest(question: Question, part: Ints) -> tuple[float, float]:
    """The mean work of a rank, and that of the longest sample, in the unit of the cost."""
    plan = [[[index] for index in range(len(part))]]
    (alone,) = microbatch_costs(plan, part, question.model.cost, collation=question.samples.collation)
    return sum(alone) / question.place.devices, max(alone)


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank that do not depend on the samples, under Adam and full sharding."""

    parameters: float  # its shard of the parameters
    gradients: float  # gradients of this shard
    optimizer: float  # Adam's two moments
    window: float  # what on-demand communication adds: published shards and accumulators
    limit: float  # what a rank can take

    @classmethod
    def of(cls, model: ModelFacts, place: Place) -> Memory:
        """By the formulas of ``docs/several-nodes.md``; published parameters have the dtype that computes."""
        shard, trained = model.parameters / place.devices, model.trained / place.devices
        window = (model.parameters * compute_bytes(place) + model.trained * _FP32) / place.per_node
        return cls(
            shard * _FP32,
            trained * _FP32,
            trained * _FP32 * _ADAM,
            window if place.devices > 1 else 0.0,
            place.memory,
        )

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer: what every way to communicate needs."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """What on-demand communication needs."""
        return self.states + self.window


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node sends to other nodes in an optimizer step, under full sharding."""

    on_demand: float  # sums of gradients and published shards, once
    collective: float  # two gathers and a sum in every microbatch
    microbatches: int  # microbatches of a rank in that step

    @classmethod
    def of(cls, question: Question) -> Traffic:
        """By the formulas of ``docs/several-nodes.md``."""
        model, place, width = question.model, question.place, compute_bytes(question.place)
        microbatches = -(-question.minibatch_size // question.samples.together)
        on_demand = (place.nodes - 1) / place.nodes * model.trained * (width + _FP32)
        collective = (2 * model.parameters + model.trained) * width * (place.devices - 1) / place.devices
        crosses = place.nodes > 1
        return cls(on_demand * crosses, microbatches * collective * crosses, microbatches)


def compute_bytes(place: Place) -> int:
    """Bytes of a parameter that computes: fp32 on processors, bf16 on GPUs."""
    return 4 if place.is_cpu else 2


@dataclass(frozen=True, eq=False)
class Facts:
    """All of it, and what follows."""

    question: Question
    plans: Plans
    memory: Memory
    traffic: Traffic

    @classmethod
    def of(cls, question: Question) -> Facts:
        """Work all of it out."""
        memory = Memory.of(question.model, question.place)
        try:
            return cls(question, Plans.of(question), memory, Traffic.of(question))
        except ValueError as error:
            raise OptionError(" ".join(str(error).split())) from error

    @cached_property
    def fits(self) -> bool:
        """Whether the model's states fit, before activations."""
        return self.memory.states <= self.memory.limit

    @cached_property
    def helps(self) -> bool:
        """Whether on-demand communication shortens the plan, and its window fits."""
        fits = self.memory.total <= self.memory.limit or not self.fits
        return fits and self.plans.over_collectives >= WORTH

    @cached_property
    def balancing_helps(self) -> bool:
        """Whether balancing for collectives shortens the plan."""
        return self.plans.collective.factor >= WORTH

    @property
    def enough_devices(self) -> int:
        """The fewest devices, of 2, 4, ... times as many, whose memory holds the states."""
        short = self.memory.states / max(self.memory.limit, 1.0)
        return self.question.place.devices * 2 ** max(math.ceil(math.log2(short)), 0)
