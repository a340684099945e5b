"""Simulate every setting with the same minibatches, and choose the best of those that fit into memory.

Note [Sampled minibatches]
~~~~~~~~~~~~~~~~~~~~~~~~~~
An epoch of a million samples has thousands of steps, and a few dozen of them show the time of one. All settings run the
same steps, so their speed-ups are ratios of sums over pairs, as in Note [Confidence intervals] of
`lightning_odc.bench.results`, with the same intervals. The intervals cover that other steps have other samples. They do
not cover what the model of a step leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_odc.advisor.question import Question
from lightning_odc.balance import COLLECTIVE_SAFE, POLICIES, Planner
from lightning_odc.bench.results import Interval, bootstrap
from lightning_odc.console import OptionError
from lightning_odc.data.gain import Gain, planned_gain
from lightning_odc.simulate import (
    COMMUNICATIONS,
    Simulation,
    Unbalanced,
    Work,
    memory_of,
    plan_work,
    simulate_work,
)

AS_THEY_COME = "as_they_come"
"""The policy of a loader that balances nothing."""
WORTH = 1.03
"""A speed-up below this one is called none: what a step's model leaves out is as large."""
SHARDINGS = ("full", "hybrid")
"""What `ODCStrategy` offers: ``FULL_SHARD`` and ``HYBRID_SHARD``."""
_AS_FAST = 1.01
_PLANNED_SAMPLES, _FEWEST_STEPS, _MOST_STEPS = 8192, 4, 48


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to train, simulated.

    Attributes:
        communication: One of `COMMUNICATIONS`.
        policy: One of `POLICIES`, or `AS_THEY_COME`.
        sharding: One of `SHARDINGS`.
        simulation: What came out.
        work: The planned steps.
    """

    communication: str
    policy: str
    sharding: str
    simulation: Simulation
    work: Work

    def __str__(self) -> str:
        hybrid = ", hybrid" if self.sharding == "hybrid" else ""
        return f"{self.communication}+{self.policy}{hybrid}"

    @property
    def seconds(self) -> float:
        """Seconds of an average optimizer step."""
        return self.simulation.mean_seconds


@dataclass(frozen=True, eq=False)
class Answer:
    """Every setting, and what follows.

    Attributes:
        question: What was asked.
        settings: All of them, the fastest first.
        steps: Steps that were simulated.
        gain: What balancing alone would gain, without the time of communication, from lengths.
    """

    question: Question
    settings: Sequence[Setting]
    steps: int
    gain: Gain

    def speed_up(self, slow: Setting, fast: Setting) -> Interval:
        """Low end, value and high end of the time of one setting over that of another."""
        pairs = list(zip(slow.simulation.seconds, fast.simulation.seconds, strict=True))
        return bootstrap(pairs, lambda drawn: drawn[..., 0].sum(-1) / drawn[..., 1].sum(-1))

    @cached_property
    def fitting(self) -> list[Setting]:
        """The settings that fit into memory; all of them where none does."""
        return [one for one in self.settings if one.simulation.memory.fits] or list(self.settings)

    @property
    def fits(self) -> bool:
        """Whether any setting fits."""
        return self.fitting[0].simulation.memory.fits

    @cached_property
    def baseline(self) -> Setting:
        """Stock sharding and batches as they come."""
        return next(
            one
            for one in self.settings
            if (one.communication, one.policy, one.sharding) == ("collective", AS_THEY_COME, "full")
        )

    @cached_property
    def by_collectives(self) -> Setting:
        """The fastest that collectives can do."""
        return _simplest(
            [one for one in self.fitting if one.communication == "collective"] or [self.baseline]
        )

    @cached_property
    def on_demand(self) -> Setting:
        """The fastest on demand, of what ``strategy="odc_plain"`` and ``"odc"`` choose by themselves."""
        wanted = (AS_THEY_COME, "steal" if self.is_cpu else "lb_mini")
        found = [one for one in self.settings if one.communication == "on_demand" and one.policy in wanted]
        return _simplest([one for one in found if one in self.fitting] or found)

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are processors."""
        return "cpu" in self.question.cluster.device.name.lower()

    @property
    def helps(self) -> bool:
        """Whether on-demand communication gains more than nothing over the best that collectives can do."""
        low, middle, _ = self.speed_up(self.by_collectives, self.on_demand)
        return self.on_demand in self.fitting and low > 1 and middle >= WORTH

    @property
    def recommended(self) -> Setting:
        """The setting to use: on demand if that helps, else the simplest one that is as fast as collectives can be."""
        if self.helps:
            return self.on_demand
        is_close = self.speed_up(self.baseline, self.by_collectives)[1] < WORTH
        return self.baseline if is_close and self.baseline in self.fitting else self.by_collectives


def _simplest(found: Sequence[Setting]) -> Setting:
    """The fastest, or one with plain sharding that is as fast.

    Args:
        found: Settings, the fastest first.
    """
    close = (one for one in found if one.seconds <= found[0].seconds * _AS_FAST)
    return min(close, key=lambda one: SHARDINGS.index(one.sharding))


def steps_of(question: Question) -> int:
    """How many steps to simulate: fewer of larger ones, and never more than an epoch has."""
    wanted = min(max(_PLANNED_SAMPLES // question.samples_per_step, _FEWEST_STEPS), _MOST_STEPS)
    return max(min(wanted, len(question.lengths) // question.samples_per_step), 1)


def work_of(question: Question, policy: str, steps: int) -> Work:
    """Planned steps, the same samples under every policy.

    Args:
        question: What was asked.
        policy: One of `POLICIES`, or `AS_THEY_COME`.
        steps: How many.
    """
    loader: Any = policy
    if policy == AS_THEY_COME:
        loader = Unbalanced(question.cluster.devices, question.together)
    return plan_work(
        question.lengths,
        question.model,
        question.cluster,
        minibatch_size=question.minibatch_size,
        policy=loader,
        max_tokens=question.max_tokens,
        collation=question.collation,
        minibatches=steps,
        seed=question.seed,
    )


def answer(question: Question) -> Answer:
    """Simulate every setting.

    Raises:
        OptionError: the lengths are fewer than a step has samples, or a sample is above ``max_tokens``.
    """
    if len(question.lengths) < question.samples_per_step:
        raise OptionError(
            f"a step of {question.cluster.devices} devices x {question.minibatch_size} samples is more than the "
            f"{len(question.lengths)} lengths there are: give more lengths, or a smaller --minibatch-size"
        )
    steps = steps_of(question)
    try:
        settings = sorted(_settings(question, steps), key=lambda one: one.seconds)
    except ValueError as error:
        raise OptionError(" ".join(str(error).split())) from error
    return Answer(question, settings, steps, _gain(question, steps))


def _settings(question: Question, steps: int) -> Iterator[Setting]:
    shardings = SHARDINGS if question.cluster.nodes > 1 else SHARDINGS[:1]
    for policy in (AS_THEY_COME, *POLICIES):
        work = work_of(question, policy, steps)
        for communication in COMMUNICATIONS:
            if communication != "on_demand" and policy not in (AS_THEY_COME, *COLLECTIVE_SAFE):
                continue
            for sharding in shardings:
                done = simulate_work(
                    work, question.model, question.cluster, communication=communication, sharding=sharding
                )
                yield Setting(communication, policy, sharding, done, work)


def _gain(question: Question, steps: int) -> Gain:
    """What `lightning_odc.data.gain` says, as at the start of a fit."""
    generator = np.random.default_rng(question.seed)
    count = min(len(question.lengths), steps * question.samples_per_step)
    drawn = question.lengths[generator.choice(len(question.lengths), count, replace=False)]
    planner = Planner(
        question.cluster.devices,
        question.max_tokens,
        cost=question.model.cost,
        collation=question.collation,
        starts=0,
    )
    batches = max(question.minibatch_size // question.together, 1)
    return planned_gain(drawn, question.together, batches, planner.capped_for(question.lengths))


def enough_devices(question: Question) -> int | None:
    """The fewest devices, of 2, 4, ... times as many, that hold the model and its longest sample; ``None``: none do."""
    longest = int(question.lengths.max())
    for factor in (2**power for power in range(11)):
        cluster = question.cluster.but(devices=question.cluster.devices * factor)
        if memory_of(question.model, cluster, max_tokens=longest, communication="collective").fits:
            return cluster.devices
    return None
