"""What is certain before training: who waits under which plan, what lies on a rank, and what crosses the network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_odc.advisor.inputs import Inputs, Model, Place
from lightning_odc.balance import Planner, microbatch_costs
from lightning_odc.data.gain import Gain, planned_gain

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
    def of(cls, inputs: Inputs) -> Plans:
        """Plan some steps of randomly drawn samples, the same ones under both policies."""
        samples = inputs.samples
        cost = inputs.model.cost
        devices = inputs.place.devices
        count = len(samples.lengths)
        steps = min(count // inputs.samples_per_step, _PLANNED_STEPS)
        generator = np.random.default_rng(inputs.seed)
        chosen = generator.choice(count, steps * inputs.samples_per_step, replace=False)
        drawn = samples.lengths[chosen]

        gains = []
        for policy in ("lb_micro", "lb_mini"):
            planner = Planner(
                devices, inputs.max_tokens, policy, cost, collation=samples.collation, allow_empty=True
            )
            capped = planner.capped_for(samples.lengths)
            gains.append(planned_gain(drawn, samples.together, inputs.batches_per_step, capped))
        needed = 0.0
        shared = 0.0
        long_steps = 0
        for part in np.split(drawn, steps):
            alone = [[[index] for index in range(len(part))]]
            (costs,) = microbatch_costs(alone, part, cost, collation=samples.collation)
            share = sum(costs) / devices
            longest = max(costs)
            shared += share
            needed += max(share, longest)
            long_steps += longest > share
        collective, on_demand = gains
        return cls(collective, on_demand, 1 - shared / needed, long_steps, steps)

    @property
    def over_collectives(self) -> float:
        """The time of the best plan for collectives, or of batches as they come if that is shorter, over on demand."""
        return min(self.collective.balanced / self.on_demand.balanced, self.on_demand.factor)


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank that do not depend on the samples, under Adam and full sharding."""

    parameters: float  # its shard of the parameters
    gradients: float  # gradients of this shard
    optimizer: float  # Adam's two moments
    window: float  # what on-demand communication adds: published shards and accumulators
    limit: float  # what a rank can take

    @classmethod
    def of(cls, model: Model, place: Place) -> Memory:
        """By the formulas of ``docs/several-nodes.md``; published parameters have the dtype that computes."""
        parameters = model.parameters / place.devices * _FP32
        gradients = model.trained / place.devices * _FP32
        window = 0.0
        if place.devices > 1:
            window = (model.parameters * place.width + model.trained * _FP32) / place.per_node
        return cls(parameters, gradients, gradients * _ADAM, window, place.memory)

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
    def of(cls, inputs: Inputs) -> Traffic:
        """By the formulas of ``docs/several-nodes.md``."""
        model = inputs.model
        place = inputs.place
        microbatches = inputs.batches_per_step
        if place.nodes == 1:
            return cls(0.0, 0.0, microbatches)
        on_demand = (place.nodes - 1) / place.nodes * model.trained * (place.width + _FP32)
        gathered = (2 * model.parameters + model.trained) * place.width
        collective = microbatches * gathered * (place.devices - 1) / place.devices
        return cls(on_demand, collective, microbatches)
