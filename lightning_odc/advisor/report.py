"""The advice, for people and for programs: whether it would help, what to write, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any

import numpy as np

from lightning_odc.advisor.plans import WORTH, Facts
from lightning_odc.balance.arrays import Ints
from lightning_odc.data.gain import Gain

_GIGA = 1e9
_LEAST_PART = 0.005
_LITTLE = 0.03
_TITLE = 17


@dataclass(frozen=True, eq=False)
class Advice:
    """What `lightning_odc.advise` returns. ``print(advice)`` is what ``lightning-odc advise`` prints.

    Attributes:
        facts: What is certain: plans, memory and bytes between nodes.
    """

    facts: Facts

    @property
    def helps(self) -> bool:
        """Whether on-demand communication shortens the plan, over the best one for collectives."""
        return self.facts.helps

    @property
    def gain(self) -> Gain:
        """What balancing on demand would gain over batches as they come, without the time of communication."""
        return self.facts.plans.on_demand

    @property
    def line(self) -> str:
        """The ``Trainer`` to write, below the import that it needs."""
        place = self.facts.question.place
        nodes = f", num_nodes={place.nodes}" if place.nodes > 1 else ""
        kind = 'accelerator="cpu"' if place.is_cpu else 'accelerator="gpu"'
        precision = "" if place.is_cpu else ', precision="bf16-mixed"'
        strategy = self._strategy()
        imported = "import lightning_odc\n" * ("odc" in strategy)
        return f"{imported}Trainer({kind}, devices={place.per_node}{nodes}{precision}, strategy={strategy})"

    def _strategy(self) -> str:
        """The value of ``Trainer(strategy=...)``. Lightning's FSDP refuses processors."""
        place = self.facts.question.place
        if place.devices == 1:
            return '"auto"'
        if self.helps:
            return '"odc"'
        if self.facts.balancing_helps:
            return 'lightning_odc.ODCStrategy(communication="collective", balance="lb_micro")'
        return '"ddp"' if place.is_cpu else '"fsdp"'

    def __str__(self) -> str:
        rows = [f"{title:<{_TITLE}}{text}" for title, text in self._rows()]
        untried = ""
        if "lightning_odc" in self.line and not self.facts.question.place.is_cpu:
            untried = "Lightning-ODC's code for GPUs has not run on a GPU yet."
        plans, question = self.facts.plans, self.facts.question
        steps = -(-len(question.samples.lengths) // question.samples_per_step)
        limits = (
            f"These are plans for {plans.steps} of the {steps:,} steps of an epoch. Their time is counted in FLOPs, "
            "without communication.\nTo measure time on this machine: lightning-odc bench train"
        )
        parts = [self._verdict(), indent(self.line, "    "), untried, "\n".join(rows), limits]
        return "\n\n".join(filter(None, parts))

    __repr__ = __str__

    def _verdict(self) -> str:
        """One or two sentences; that it would not help, or not fit, comes first."""
        facts = self.facts
        said = self._gained()
        if facts.fits:
            return said
        memory = facts.memory
        return (
            f"This would not fit: parameters, gradients and Adam take {_gb(memory.states)} per rank, before "
            f"activations, and a rank has {_gb(memory.limit)}. {facts.enough_devices} devices would hold them.\n{said}"
        )

    def _gained(self) -> str:
        plans, memory = self.facts.plans, self.facts.memory
        idle, demand = plans.collective.idle, plans.on_demand.balanced_idle
        if self.facts.question.place.devices == 1:
            return "This would not help: one device has no other to wait for."
        if self.helps:
            return (
                f"This would help: ranks would wait {demand:.0%} of the time for each other, instead of {idle:.0%}. A "
                f"planned step is {plans.on_demand.factor:.2f} times as fast as with batches as they come, and "
                f"{plans.over_collectives:.2f} times as fast as the best plan for collectives."
            )
        if plans.over_collectives >= WORTH:
            states, limit = _gb(memory.states), _gb(memory.limit)
            why = f"it adds {_gb(memory.window)} per rank to the {states} of the model, too much for {limit}"
        elif self.facts.balancing_helps:
            balanced = plans.collective.balanced_idle
            why = f"collectives wait only {balanced:.0%} of the time, too, once batches are balanced"
        else:
            return f"This would not help: {self._why_not()}"
        return (
            f"On-demand communication would not help: {why}. Balancing would: a planned step is "
            f"{plans.collective.factor:.2f} times as fast as with batches as they come."
        )

    def _why_not(self) -> str:
        """Why no plan is faster than batches as they come."""
        idle = self.facts.plans.collective.idle
        if self.facts.question.minibatch_size == 1:
            return "one sample per device and step leaves nothing to share out. A larger minibatch would."
        if idle < _LITTLE:
            return f"batches take equally long on all ranks, so they would wait {idle:.0%} of the time for each other."
        return f"ranks would wait {idle:.0%} of the time for each other, and no plan leaves much less."

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Titles and lines; a line that goes on has no title."""
        question, memory, traffic = self.facts.question, self.facts.memory, self.facts.traffic
        skew = skew_of(question.samples.lengths)
        yield "lengths", question.samples.source
        figures = ", ".join(f"{name} {skew[name]:,.0f}" for name in ("median", "mean", "90%", "longest"))
        yield "", f"{figures} ({skew['longest / mean']:.1f} x the mean)"
        yield from self._waits()
        if question.samples.collation.is_table:
            gain = self.gain
            shares = f"{gain.padding:.0%} of the computed tokens as batches come"
            yield "padding", f"{shares}, {gain.balanced_padding:.0%} balanced"
        yield "model", f"{question.model.name}, {question.model.parameters / _GIGA:.3g} B parameters"
        parts = f"parameters {_gb(memory.parameters)}, gradients {_gb(memory.gradients)}, Adam {_gb(memory.optimizer)}"
        yield "memory per rank", f"{_gb(memory.states)} of {_gb(memory.limit)}, before activations: {parts}"
        if memory.window:
            yield "", f"on demand {_gb(memory.window)} more: published parameters and sums of gradients"
        if question.place.nodes > 1:
            yield "between nodes", f"a node sends {_gb(traffic.on_demand)} per step on demand"
            yield (
                "",
                f"and {_gb(traffic.collective)} by collectives ({traffic.microbatches} microbatches per step)",
            )
        nodes = f" on {question.place.nodes} nodes" if question.place.nodes > 1 else ""
        each = f"{question.minibatch_size} sample{'s' * (question.minibatch_size > 1)} per device and step"
        yield "devices", f"{question.place.devices} x {question.place.device}{nodes}; {each}"

    def _waits(self) -> Iterator[tuple[str, str]]:
        plans = self.facts.plans
        if self.facts.question.place.devices == 1:
            return
        yield "ranks wait", f"{plans.collective.idle:>4.0%} of the time as batches come"
        yield "", f"{plans.collective.balanced_idle:>4.0%} balanced for collectives (lb_micro)"
        yield "", f"{plans.on_demand.balanced_idle:>4.0%} balanced on demand (lb_mini)"
        if plans.least_idle >= _LEAST_PART:
            why = f"in {plans.long_steps} of {plans.steps} steps, one sample is longer than an equal share of the work"
            yield "", f"{plans.least_idle:>4.0%} under any plan, at least: {why}"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON. Memory and traffic are in bytes; waits are parts of all ranks' time."""
        facts, question = self.facts, self.facts.question
        plans, place = facts.plans, question.place
        return {
            "helps": self.helps,
            "fits": facts.fits,
            "trainer": self.line,
            "waits": {
                "as_they_come": plans.collective.idle,
                "collective": plans.collective.balanced_idle,
                "on_demand": plans.on_demand.balanced_idle,
                "least": plans.least_idle,
            },
            "times_as_fast": {
                "collective": plans.collective.factor,
                "on_demand": plans.on_demand.factor,
                "over_collectives": plans.over_collectives,
            },
            "padding": {"as_they_come": self.gain.padding, "balanced": self.gain.balanced_padding},
            "memory": asdict(facts.memory),
            "between_nodes": asdict(facts.traffic),
            "lengths": {"source": question.samples.source, "tokens": skew_of(question.samples.lengths)},
            "model": {"name": question.model.name, "parameters": question.model.parameters},
            "cluster": {"device": place.device, "devices": place.devices, "nodes": place.nodes},
            "minibatch_size": question.minibatch_size,
            "steps_planned": plans.steps,
        }


def skew_of(lengths: Ints) -> dict[str, float]:
    """Figures that describe the tail of ``[n]`` lengths."""
    mean = float(lengths.mean())
    median, ninth = np.quantile(lengths, [0.5, 0.9]).tolist()
    longest = float(lengths.max())
    figures = {"count": len(lengths), "median": median, "mean": mean, "90%": ninth, "longest": longest}
    return {**figures, "longest / mean": longest / mean, "deviation / mean": float(lengths.std()) / mean}


def _gb(size: float) -> str:
    if size < _GIGA / 10:
        return f"{size / 1e6:.3g} MB"
    return f"{size / _GIGA:,.0f} GB" if size >= 100 * _GIGA else f"{size / _GIGA:.3g} GB"
