"""What an existing ``Trainer`` and ``DataLoader`` say about themselves, without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.numbers import first_number
from lightning_odc.console import OptionError
from lightning_odc.data.checks import is_stream
from lightning_odc.data.collation import find_collation
from lightning_odc.data.gain import glance
from lightning_odc.data.lengths import measure
from lightning_odc.data.rng import isolated_rng, with_own_rng
from lightning_odc.simulate import DEVICES

_MOST_SAMPLES = 8192


@dataclass(frozen=True)
class Fitting:
    """What a trainer trains on.

    Attributes:
        device: A name of `DEVICES`, ``"cpu"``, or a `Cluster`.
        devices: Devices of all nodes; ``None`` without a trainer.
        nodes: The number of nodes.
        batches: Batches of an optimizer step.
    """

    device: Any
    devices: int | None = None
    nodes: int = 1
    batches: int = 1


def fitting_cluster(trainer: Any, device: Any = None) -> Fitting:
    """What a trainer says.

    Args:
        trainer: A ``Trainer``, which may have run or not.
        device: The device that the user named; by default the trainer's.

    Raises:
        OptionError: `lightning_odc.simulate` does not know its GPUs; the message has the line to write.
    """
    nodes = trainer.num_nodes
    device = device or _name_of(trainer.strategy.root_device.type)
    return Fitting(device, trainer.num_devices * nodes, nodes, trainer.accumulate_grad_batches)


def _name_of(kind: str) -> str:
    if kind == "cpu":
        return "cpu"
    own = torch.cuda.get_device_name() if kind == "cuda" else kind
    found = next((name for name in DEVICES if name.lower() in own.lower()), None)
    if found is None:
        raise OptionError(
            f"the trainer's device ({own}) is not known: name one that is like it, by device=: "
            f"{', '.join(DEVICES)}, cpu"
        )
    return found


@dataclass(frozen=True)
class Loader:
    """What a loader says.

    Attributes:
        lengths: ``[n]`` tokens of the samples that were looked at.
        source: How they were found, for people.
        together: Samples of a batch.
        minibatch_size: Samples per device and optimizer step.
        collation: What the ``collate_fn`` makes of a batch.
    """

    lengths: Ints
    source: str
    together: int = 1
    minibatch_size: int = 4
    collation: Collation = PACKED


def looked_at(dataloader: Any, batches: int, length_fn: Any = None) -> Loader:
    """Look at the samples of a loader, from a copy of its data set: its generators and counters stay.

    Args:
        dataloader: A loader of a data set that has indices.
        batches: Batches of an optimizer step.
        length_fn: The length of a sample, if it is not known.

    Raises:
        OptionError: nothing tells how long samples are.
    """
    dataset = dataloader.dataset
    if is_stream(dataset) or dataloader.batch_size is None:
        raise OptionError(
            "a stream and a batch sampler do not say how long samples are before they are read: pass lengths, "
            "advise([812, 4096, 77], model=...)"
        )
    try:
        values, indices = glance(dataloader, min(len(dataset), _MOST_SAMPLES), length_fn or measure)
    except Exception as error:
        said = " ".join(str(error).split())
        raise OptionError(
            f'the loader: {said} Or pass length_fn=lambda sample: len(sample["tokens"])'
        ) from error
    if not len(values):
        raise OptionError(
            "the loader: its workers read the samples, so none was read here: pass lengths=[812, 4096, 77]"
        )
    copied = with_own_rng(dataset)
    with isolated_rng():
        collation = find_collation(dataloader.collate_fn, lambda place: copied[indices[place]], values)
    how = (
        collation.describe()
        if collation
        else "could not be recognized, and its batches are taken for packed ones"
    )
    return Loader(
        first_number(values),
        f"{len(values):,} of the loader's {len(dataset):,} samples; the collate_fn {how}",
        dataloader.batch_size,
        dataloader.batch_size * batches,
        collation or PACKED,
    )
