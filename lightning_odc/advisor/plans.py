"""What is certain before training: who waits under which plan, what lies on a rank, and what crosses the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        samples, model, devices = inputs.samples, inputs.model, inputs.place.devices
        steps = min(len(samples.lengths) // inputs.samples_per_step, _PLANNED_STEPS)
        generator = np.random.default_rng(inputs.seed)
        drawn = samples.lengths[
            generator.choice(len(samples.lengths), steps * inputs.samples_per_step, replace=False)
        ]
        batches = -(-inputs.minibatch_size // samples.together)
        gains: dict[str, Gain] = {}
        for policy in ("lb_micro", "lb_mini"):
            shape: Any = {"collation": samples.collation, "allow_empty": True}
            planner = Planner(devices, inputs.max_tokens, policy, model.cost, **shape)
            capped = planner.capped_for(samples.lengths)
            gains[policy] = planned_gain(drawn, samples.together, batches, capped)
        needed, shared, long_steps = 0.0, 0.0, 0
        for part in np.split(drawn, steps):
            alone = [[[index] for index in range(len(part))]]
            (costs,) = microbatch_costs(alone, part, model.cost, collation=samples.collation)
            share, longest = sum(costs) / devices, max(costs)
            shared += share
            needed += max(share, longest)
            long_steps += longest > share
        return cls(gains["lb_micro"], gains["lb_mini"], 1 - shared / needed, long_steps, steps)

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
        shard, trained = model.parameters / place.devices, model.trained / place.devices
        window = (model.parameters * place.width + model.trained * _FP32) / place.per_node
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
    def of(cls, inputs: Inputs) -> Traffic:
        """By the formulas of ``docs/several-nodes.md``."""
        model, place = inputs.model, inputs.place
        microbatches = -(-inputs.minibatch_size // inputs.samples.together)
        if place.nodes == 1:
            return cls(0.0, 0.0, microbatches)
        on_demand = (place.nodes - 1) / place.nodes * model.trained * (place.width + _FP32)
        gathered = (2 * model.parameters + model.trained) * place.width
        return cls(on_demand, microbatches * gathered * (place.devices - 1) / place.devices, microbatches)
