"""The advice, for people and for programs: whether it would help, what to write, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any

from lightning_odc.advisor.inputs import Inputs, parse_inputs
from lightning_odc.advisor.lengths import describe_tail, tail_of
from lightning_odc.advisor.options import AdviseOptions
from lightning_odc.advisor.plans import Memory, Plans, Traffic
from lightning_odc.console import OptionError
from lightning_odc.data.gain import Gain

WORTH = 1.03
"""A factor below this one is called none: what a plan leaves out is as large."""
_GIGA = 1e9
_LEAST_PART = 0.005
_MOST_OF_A_DEVICE = 0.5  # for a model that is not sharded; the rest is for activations
_LITTLE = 0.03
_TITLE = 17


@dataclass(frozen=True, eq=False)
class Advice:
    """What `lightning_odc.advise` returns. ``print(advice)`` is what ``lightning-odc advise`` prints.

    Attributes:
        inputs: Lengths, model and devices that it is about.
        plans: Who waits under which plan.
        memory: Bytes on a rank.
        traffic: Bytes between nodes.
    """

    inputs: Inputs
    plans: Plans
    memory: Memory
    traffic: Traffic

    @classmethod
    def on(cls, inputs: Inputs) -> Advice:
        """Work all of it out."""
        try:
            plans = Plans.of(inputs)
        except ValueError as error:
            raise OptionError(" ".join(str(error).split())) from error
        return cls(inputs, plans, Memory.of(inputs.model, inputs.place), Traffic.of(inputs))

    @property
    def fits(self) -> bool:
        """Whether the model's states fit, before activations."""
        return self.memory.states <= self.memory.limit

    @property
    def helps(self) -> bool:
        """Whether on-demand communication shortens the plan, over the best one for collectives, and its window fits."""
        window_fits = self.memory.total <= self.memory.limit or not self.fits
        return window_fits and self.plans.over_collectives >= WORTH

    @property
    def fits_whole(self) -> bool:
        """Whether a device can hold the whole model, its gradients and Adam, and has as much left for activations."""
        return self._whole <= self.memory.limit * _MOST_OF_A_DEVICE

    @property
    def _whole(self) -> float:
        return self.memory.states * self.inputs.place.devices

    @property
    def balancing_helps(self) -> bool:
        """Whether balancing for collectives shortens the plan."""
        return self.plans.collective.factor >= WORTH

    @property
    def gain(self) -> Gain:
        """What balancing on demand would gain over batches as they come, without the time of communication."""
        return self.plans.on_demand

    @property
    def line(self) -> str:
        """The ``Trainer`` to write, below the import that it needs."""
        place = self.inputs.place
        if place.devices == 1:
            strategy = '"auto"'
        elif self._plans_ddp:
            strategy = '"ddp"'
        elif self.helps:
            strategy = '"odc"'
        elif self.balancing_helps:
            strategy = 'lightning_odc.ODCStrategy(communication="collective", balance="lb_micro")'
        elif place.is_cpu:
            strategy = '"ddp"'  # Lightning's FSDP refuses processors
        else:
            strategy = '"fsdp"'
        kind = "gpu"
        if place.is_cpu:
            kind = "cpu"
        options = [f'accelerator="{kind}"', f"devices={place.per_node}"]
        if place.nodes > 1:
            options.append(f"num_nodes={place.nodes}")
        if not place.is_cpu:
            options.append('precision="bf16-mixed"')
        options.append(f"strategy={strategy}")
        line = f"Trainer({', '.join(options)})"
        if "odc" in strategy:
            line = f"import lightning_odc\n{line}"
        return line

    @property
    def _plans_ddp(self) -> bool:
        """Whether planned batches help, and the model needs no sharding."""
        return self.balancing_helps and self.fits_whole and self.inputs.place.devices > 1

    def __str__(self) -> str:
        parts = [self._verdict(), indent(self.line, "    ")]
        place = self.inputs.place
        if not self.fits:
            memory = self.memory
            short = memory.states / max(memory.limit, 1.0)
            enough = place.devices * 2 ** max(math.ceil(math.log2(short)), 0)
            parts[0] = (
                f"This would not fit: parameters, gradients and Adam take {_gb(memory.states)} per rank, before "
                f"activations, and a rank has {_gb(memory.limit)}. {enough} devices would hold them.\n{parts[0]}"
            )
        if self._plans_ddp:
            parts.append(
                f"The whole model fits on each device: {_gb(self._whole)} of {_gb(self.memory.limit)}, before "
                'activations. So give DDP planned batches: four edits,\nunder "Plain DDP, balanced" in '
                'docs/full-gain.md. With strategy="odc" instead, nothing else changes, and the model is sharded.'
            )
        if "lightning_odc" in self.line and not place.is_cpu:
            parts.append("Lightning-ODC's code for GPUs has not run on a GPU yet.")
        rows = [f"{title:<{_TITLE}}{text}" for title, text in self._rows()]
        parts.append("\n".join(rows))
        steps = math.ceil(len(self.inputs.samples.lengths) / self.inputs.samples_per_step)
        parts.append(
            f"These are plans for {self.plans.steps} of the {steps:,} steps of an epoch. Their time is counted in "
            "FLOPs, without communication.\nTo measure time on this machine: python -m benchmarks.harness, in a clone"
        )
        return "\n\n".join(parts)

    __repr__ = __str__

    def _verdict(self) -> str:
        """One or two sentences; that it would not help comes first."""
        plans = self.plans
        idle = plans.collective.idle
        demand = plans.on_demand.balanced_idle
        planned = _times_as_fast(plans.on_demand)
        if self.inputs.place.devices == 1:
            return "This would not help: one device has no other to wait for."
        if self.helps:
            return (
                f"This would help: ranks would wait {demand:.0%} of the time for each other, instead of {idle:.0%}. "
                f"{planned}, and {plans.over_collectives:.2f} times as fast as the best plan for collectives."
            )
        if plans.over_collectives >= WORTH:
            memory = self.memory
            states = _gb(memory.states)
            limit = _gb(memory.limit)
            why = f"it adds {_gb(memory.window)} per rank to the {states} of the model, too much for {limit}"
        elif self.balancing_helps:
            balanced = plans.collective.balanced_idle
            why = f"collectives wait only {balanced:.0%} of the time, too, once batches are balanced"
        else:
            if self.inputs.minibatch_size == 1:
                return (
                    "This would not help: one sample per device and step leaves nothing to share out. A larger "
                    "minibatch would."
                )
            if plans.on_demand.factor < 1 / WORTH:
                return f"This would not help. {planned}, though ranks would wait {demand:.0%}, not {idle:.0%} of it."
            wait = f"would wait {idle:.0%} of the time for each other"
            if idle < _LITTLE:
                return f"This would not help: batches take equally long on all ranks, so they {wait}."
            return f"This would not help: ranks {wait}, and no plan leaves much less."
        verdict = f"On-demand communication would not help: {why}."
        if self.balancing_helps:
            verdict += f" Balancing would. {_times_as_fast(plans.collective)}."
        return verdict

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Titles and lines; a line that goes on has no title."""
        samples = self.inputs.samples
        lengths = samples.lengths
        place = self.inputs.place
        plans = self.plans
        yield "lengths", samples.source
        ratio = lengths.max() / lengths.mean()
        yield "", f"{describe_tail(lengths)} ({ratio:.1f} x the mean)"
        if place.devices > 1:
            yield "ranks wait", f"{plans.collective.idle:>4.0%} of the time as batches come"
            yield "", f"{plans.collective.balanced_idle:>4.0%} balanced for collectives (lb_micro)"
            yield "", f"{plans.on_demand.balanced_idle:>4.0%} balanced on demand (lb_mini)"
            if plans.least_idle >= _LEAST_PART:
                steps = f"in {plans.long_steps} of {plans.steps} steps"
                why = f"{steps}, one sample is longer than an equal share of the work"
                yield "", f"{plans.least_idle:>4.0%} under any plan, at least: {why}"
        if samples.collation.is_table:
            shares = f"{self.gain.padding:.0%} of the computed tokens as batches come"
            yield "padding", f"{shares}, {self.gain.balanced_padding:.0%} balanced"
        model = self.inputs.model
        yield "model", f"{model.name}, {model.parameters / _GIGA:.3g} B parameters"
        memory = self.memory
        parts = f"parameters {_gb(memory.parameters)}, gradients {_gb(memory.gradients)}, Adam {_gb(memory.optimizer)}"
        yield "memory per rank", f"{_gb(memory.states)} of {_gb(memory.limit)}, before activations: {parts}"
        if memory.window:
            yield "", f"on demand {_gb(memory.window)} more: published parameters and sums of gradients"
        devices = f"{place.devices} x {place.device}"
        if place.nodes > 1:
            traffic = self.traffic
            yield "between nodes", f"a node sends {_gb(traffic.on_demand)} per step on demand"
            repeated = f"({traffic.microbatches} microbatches per step)"
            yield "", f"and {_gb(traffic.collective)} by collectives {repeated}"
            devices += f" on {place.nodes} nodes"
        size = self.inputs.minibatch_size
        each = f"{size} samples"
        if size == 1:
            each = "1 sample"
        yield "devices", f"{devices}; {each} per device and step"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON. Memory and traffic are in bytes; waits are parts of all ranks' time."""
        inputs = self.inputs
        return {
            "helps": self.helps,
            "fits": self.fits,
            "fits_whole": self.fits_whole,
            "trainer": self.line,
            "plans": asdict(self.plans) | {"over_collectives": self.plans.over_collectives},
            "memory": asdict(self.memory),
            "between_nodes": asdict(self.traffic),
            "lengths": {"source": inputs.samples.source, "tokens": tail_of(inputs.samples.lengths)},
            "model": {"name": inputs.model.name, "parameters": inputs.model.parameters},
            "cluster": {name: getattr(inputs.place, name) for name in ("device", "devices", "nodes")},
            "minibatch_size": inputs.minibatch_size,
        }


def advise(
    lengths: Any,
    *,
    model: Any,
    devices: int | None = None,
    device: Any = None,
    nodes: int | None = None,
    minibatch_size: int | None = None,
    max_tokens: int | None = None,
    trainer: Any = None,
    length_fn: Callable[[Any], Any] | None = None,
    max_length: int | None = None,
    seed: int = 0,
) -> Advice:
    """Plan with and without balancing, and say what it would bring and which ``Trainer`` to write. Nothing is trained.

    Args:
        lengths: Tokens of the samples, ``[n]``; or a ``DataLoader``; or the name of a distribution (``"longalign"``), a
            file (``.txt`` with one per line, ``.npy``, ``.json``, ``.jsonl``).
        model: A Hugging Face configuration, object, mapping or path; a module that has one; or a name such as ``"7b"``
            or ``"gpt2"``.
        devices: Devices of all nodes together; by default those of the trainer, else 8.
        device: ``"A100"``, ``"H100"``, ``"H200"``, ``"MI300X"`` or ``"cpu"`` (this machine), for its memory; by default
            that of the trainer, else ``"H100"``.
        nodes: The number of nodes.
        minibatch_size: Samples per device and optimizer step; by default those of the loader, else 4.
        max_tokens: Most tokens of a microbatch; by default those of the longest sample.
        trainer: A ``Trainer`` that says how many devices and nodes there are, and how many batches make up a step.
        length_fn: The length of a sample of the ``DataLoader``, where it is not known.
        max_length: The longest sample, where ``lengths`` is a name.
        seed: The seed of the order of samples.

    Returns:
        The advice; ``print`` it. ``advice.line`` is the ``Trainer`` to write, below the import that it needs.
        ``advice.helps``: whether on-demand communication gains anything. ``advice.as_dict()`` has all figures.

    Raises:
        ValueError: Invalid lengths, model, device or sizes. The message lists what is accepted.

    Example:
        >>> advice = advise([512, 4096, 800, 650] * 100, model="1.5b", devices=8, device="A100")
        >>> advice.helps
        True
    """
    try:
        options = AdviseOptions(
            lengths, model, device, devices, nodes, minibatch_size, max_tokens, max_length, seed
        )
        return Advice.on(parse_inputs(options, trainer, length_fn))
    except OptionError as error:  # it names options of the command line: "--max-length 0: use 1 or more"
        said = re.sub(r"--([a-z-]+) ", r"--\1=", str(error))
        said = re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), said)
        raise OptionError(said) from error


def _times_as_fast(gain: Gain) -> str:
    """The estimate and its baseline, and where padding is a part of it, its two factors."""
    estimate = f"A planned step is {gain.factor:.2f} times as fast as with batches as they come"
    if gain.padding == gain.balanced_padding:
        return estimate
    waiting = (1 - gain.balanced_idle) / (1 - gain.idle)
    padding = gain.factor / waiting
    return f"{estimate} ({padding:.2f} by less padding, times {waiting:.2f} by less waiting)"


def _gb(size: float) -> str:
    if size < _GIGA / 10:
        return f"{size / 1e6:.3g} MB"
    gigabytes = size / _GIGA
    if gigabytes >= 100:
        return f"{gigabytes:,.0f} GB"
    return f"{gigabytes:.3g} GB"
