"""The question: lengths, a model and devices, read from the forms that users have, and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_odc import host_memory
from lightning_odc.advisor.options import GPU_MEMORY, AdviseOptions
from lightning_odc.advisor.samples import SampleFacts, inspect_loader, read_lengths
from lightning_odc.balance.costs import MICROBATCH, Cost
from lightning_odc.balance.transformer import shape_of, transformer
from lightning_odc.bench.configs import ACCEPTED, config_of, one_line
from lightning_odc.console import OptionError
from lightning_odc.strategy.model_facts import cost_of_model

DEVICES_PER_NODE = 8
"""The devices of a node, where nothing says how many."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model."""

    name: str  # what it is, for people
    cost: Cost  # what a microbatch costs, in FLOPs or another unit
    parameters: int  # how many it has
    trained: int  # how many of them are trained


@dataclass(frozen=True)
class Place:
    """What a model is trained on."""

    device: str
    devices: int  # devices of all nodes together
    nodes: int
    memory: float  # bytes that a rank can take

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on processors."""
        return self.device == "cpu"

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.devices // self.nodes


@dataclass(frozen=True)
class Question:
    """Everything that the advice depends on."""

    samples: SampleFacts  # lengths, and how a loader makes batches of them
    model: ModelFacts
    place: Place
    minibatch_size: int  # samples per device and optimizer step
    max_tokens: int | None = None  # most tokens of a microbatch; ``None``: the longest sample
    seed: int = 0  # the seed of the order of samples

    @property
    def samples_per_step(self) -> int:
        """Samples of all devices in one optimizer step."""
        return self.minibatch_size * self.place.devices


def ask(options: AdviseOptions, trainer: Any = None, length_fn: Any = None) -> Question:
    """Put everything together that a user gave; see `lightning_odc.advise` for the arguments."""
    batches = 1 if trainer is None else trainer.accumulate_grad_batches
    place = _place(options, trainer)
    if hasattr(options.lengths, "dataset"):
        samples = inspect_loader(options.lengths, batches, length_fn)
    else:
        samples = read_lengths(options.lengths, options.max_length, options.seed, options.tokenizer)
    question = Question(
        samples=samples,
        model=_model(options.model, place),
        place=place,
        minibatch_size=options.minibatch_size or samples.minibatch_size,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    if len(samples.lengths) < question.samples_per_step:
        raise OptionError(
            f"a step of {place.devices} devices x {question.minibatch_size} samples is more than the "
            f"{len(samples.lengths)} lengths there are: give more lengths, or a smaller --minibatch-size"
        )
    return question


def _place(options: AdviseOptions, trainer: Any) -> Place:
    """What the options say; where they say nothing, the trainer; and without a trainer, one node of 8 H100."""
    nodes = options.nodes or (1 if trainer is None else trainer.num_nodes)
    found = DEVICES_PER_NODE * nodes if trainer is None else trainer.num_devices * trainer.num_nodes
    devices = options.devices or found
    if devices % nodes:
        raise OptionError(
            f"--devices {devices} --nodes {nodes}: all nodes have equally many devices, so write a multiple of {nodes}"
        )
    if options.device is None and trainer is not None and trainer.strategy.root_device.type == "cuda":
        known = torch.cuda.get_device_properties(trainer.strategy.root_device)
        return Place(known.name, devices, nodes, known.total_memory)
    device = options.device or ("H100" if trainer is None else "cpu")
    if str(device).lower() == "cpu":
        return Place("cpu", devices, nodes, host_memory.available(devices // nodes))
    name = str(device).upper()
    if name not in GPU_MEMORY:
        raise OptionError(f"--device {device!r} is unknown: choose from {', '.join((*GPU_MEMORY, 'cpu'))}")
    return Place(name, devices, nodes, GPU_MEMORY[name])


def _model(given: Any, place: Place) -> ModelFacts:
    """Cost and size of a module as it is, or of what `config_of` accepts."""
    if isinstance(given, nn.Module):
        counts = [(one.numel(), one.requires_grad) for one in given.parameters()]
        known = cost_of_model(given, "cpu" if place.is_cpu else "cuda")
        trained = sum(count for count, is_trained in counts if is_trained)
        name = f"{type(given).__name__}, {known.source}"
        return ModelFacts(name, known.cost, sum(count for count, _ in counts), trained)
    config, name = config_of(given)
    try:
        shape, cost = shape_of(config), transformer(config, dense=place.is_cpu)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise OptionError(
            f"--model {name}: no dense decoder-only transformer ({one_line(error)}). Write {ACCEPTED}"
        ) from error
    embeddings = shape.head_weights * (1 if shape.tied else 2)
    parameters = shape.layers * shape.layer_weights + embeddings
    return ModelFacts(name, replace(cost, constant=MICROBATCH * cost.per_token), parameters, parameters)
