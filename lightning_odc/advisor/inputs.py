"""What the advice depends on: lengths, a model and devices, read from the forms that users have, and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_odc import host_memory
from lightning_odc.advisor.configs import ACCEPTED, config_of, one_line
from lightning_odc.advisor.lengths import check_lengths, find_samples
from lightning_odc.advisor.options import GPU_MEMORY, AdviseOptions
from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import MICROBATCH, Cost
from lightning_odc.balance.transformer import shape_of, transformer
from lightning_odc.console import OptionError
from lightning_odc.data.collation import find_collation
from lightning_odc.data.gain import glance
from lightning_odc.data.lengths import LengthsUnknownError
from lightning_odc.data.model_cost import cost_of_model
from lightning_odc.data.reader import is_stream
from lightning_odc.data.rng import isolated_rng, with_own_rng

DEVICES_PER_NODE = 8
"""The devices of a node, where nothing says how many."""
_MOST_SAMPLES = 8192


@dataclass(frozen=True)
class Samples:
    """Lengths, and how batches are made of them."""

    lengths: Ints  # ``[n]`` tokens of the samples
    source: str  # how they were found, for people
    together: int = 1  # samples of a batch
    minibatch_size: int = 4  # samples per device and optimizer step, where the user does not say
    collation: Collation = PACKED  # what the ``collate_fn`` makes of a batch


@dataclass(frozen=True)
class Model:
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
    def width(self) -> int:
        """Bytes of a parameter that computes: fp32 on processors, bf16 on GPUs."""
        if self.is_cpu:
            return 4
        return 2

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.devices // self.nodes


@dataclass(frozen=True)
class Inputs:
    """Everything that the advice depends on."""

    samples: Samples
    model: Model
    place: Place
    minibatch_size: int  # samples per device and optimizer step
    max_tokens: int | None = None  # most tokens of a microbatch; ``None``: the longest sample
    seed: int = 0  # the seed of the order of samples

    @property
    def samples_per_step(self) -> int:
        """Samples of all devices in one optimizer step."""
        return self.minibatch_size * self.place.devices

    @property
    def batches_per_step(self) -> int:
        """Batches of a device in one optimizer step."""
        return math.ceil(self.minibatch_size / self.samples.together)


def parse_inputs(options: AdviseOptions, trainer: Any = None, length_fn: Any = None) -> Inputs:
    """Put everything together that a user gave; see `lightning_odc.advise` for the arguments."""
    place = _place(options, trainer)
    if hasattr(options.lengths, "dataset"):
        batches = 1
        if trainer is not None:
            batches = trainer.accumulate_grad_batches
        samples = inspect_loader(options.lengths, batches, length_fn)
    else:
        samples = read_lengths(options.lengths, options.max_length, options.seed)
    model = find_model(options.model, place)
    size = options.minibatch_size or samples.minibatch_size
    inputs = Inputs(samples, model, place, size, options.max_tokens, options.seed)
    if len(samples.lengths) < inputs.samples_per_step:
        raise OptionError(
            f"a step of {place.devices} devices x {size} samples is more than the {len(samples.lengths)} lengths there "
            "are: give more lengths, or a smaller --minibatch-size"
        )
    return inputs


def _place(options: AdviseOptions, trainer: Any) -> Place:
    """What the options say; where they say nothing, the trainer; and without a trainer, one node of 8 H100."""
    if trainer is None:
        nodes = options.nodes or 1
        devices = options.devices or DEVICES_PER_NODE * nodes
        device = options.device or "H100"
    else:
        nodes = options.nodes or trainer.num_nodes
        devices = options.devices or trainer.num_devices * trainer.num_nodes
        device = options.device or "cpu"
    if devices % nodes:
        raise OptionError(
            f"--devices {devices} --nodes {nodes}: all nodes have equally many devices, so write a multiple of {nodes}"
        )
    if options.device is None and trainer is not None:
        found = trainer.strategy.root_device
        if found.type == "cuda":
            known = torch.cuda.get_device_properties(found)
            return Place(known.name, devices, nodes, known.total_memory)
    name = str(device)
    gpu = name.upper()
    if gpu == "CPU":
        return Place("cpu", devices, nodes, host_memory.available(devices // nodes))
    if gpu not in GPU_MEMORY:
        accepted = ", ".join((*GPU_MEMORY, "cpu"))
        raise OptionError(f"--device {name!r} is unknown: choose from {accepted}")
    return Place(gpu, devices, nodes, GPU_MEMORY[gpu])


def find_model(given: Any, place: Place) -> Model:
    """Cost and size of a module as it is, or of what `config_of` accepts."""
    if isinstance(given, nn.Module):
        device_type = "cuda"
        if place.is_cpu:
            device_type = "cpu"
        known = cost_of_model(given, device_type)
        parameters = sum(one.numel() for one in given.parameters())
        trained = sum(one.numel() for one in given.parameters() if one.requires_grad)
        name = f"{type(given).__name__}, {known.source}"
        return Model(name, known.cost, parameters, trained)
    config, name = config_of(given)
    try:
        shape = shape_of(config)
        cost = transformer(config, dense=place.is_cpu)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise OptionError(
            f"--model {name}: no dense decoder-only transformer ({one_line(error)}). Write {ACCEPTED}"
        ) from error
    parameters = shape.layers * shape.layer_weights + shape.head_weights
    if not shape.tied:
        parameters += shape.head_weights  # of the embeddings
    cost = replace(cost, constant=MICROBATCH * cost.per_token)
    return Model(name, cost, parameters, parameters)


def read_lengths(given: Any, max_length: int | None = None, seed: int = 0) -> Samples:
    """Lengths that a user named or gave."""
    if not isinstance(given, str | Path):
        try:
            lengths = as_lengths(np.asarray(given))
        except (ValueError, TypeError, OverflowError) as error:
            raise OptionError(str(error)) from error
        return Samples(lengths, f"{len(lengths):,} lengths")
    check_lengths(str(given))
    found = find_samples(str(given), max_length, seed)
    return Samples(as_lengths(found.lengths), found.source)


def inspect_loader(dataloader: Any, batches: int, length_fn: Any = None) -> Samples:
    """Look at the samples of a loader, from a copy of its data set: its generators and counters stay."""
    dataset = dataloader.dataset
    if is_stream(dataset) or dataloader.batch_size is None:
        raise OptionError(
            "a stream and a batch sampler do not say how long samples are before they are read: pass lengths, "
            "advise([812, 4096, 77], model=...)"
        )
    most = min(len(dataset), _MOST_SAMPLES)
    try:
        values, indices = glance(dataloader, most, length_fn)
    except Exception as error:
        known = LengthsUnknownError(str(error))
        if isinstance(error, LengthsUnknownError):
            known = error
        said = " ".join(known.reason.split())
        raise OptionError(f"the loader: {said} Pass length_fn={known.length_fn}") from error
    if not len(values):
        raise OptionError(
            "the loader: its workers read the samples, so none was read here: pass lengths=[812, 4096, 77]"
        )
    copied = with_own_rng(dataset)
    with isolated_rng():
        collation = find_collation(dataloader.collate_fn, lambda place: copied[indices[place]], values)
    if collation is None:
        collation = PACKED
        how = "could not be recognized, and its batches are taken for packed ones"
    else:
        how = collation.describe()
    source = f"{len(values):,} of the loader's {len(dataset):,} samples; the collate_fn {how}"
    size = dataloader.batch_size
    return Samples(values, source, size, size * batches, collation)
