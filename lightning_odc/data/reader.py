"""Reads samples and makes microbatches of them, also in other processes.

Note [Random numbers follow the sample]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before a sample is read, the generators of Python, numpy and torch are seeded from (seed, epoch, index of the sample),
and before ``collate_fn`` from (seed, epoch, index of the first sample). So what a random crop or mask does depends
neither on the rank or worker that reads the sample, nor on the policy that placed it, nor on whether training was
interrupted before. The generators of the process itself are left as they were. A data set with ``__getitems__`` reads
several samples at once, and is seeded once for them.

In the same way `ODCStrategy` seeds the generators before a microbatch goes through the model, and puts them back
afterwards: dropout, too, depends on the microbatch, and not on the rank. It seeds them from (what `torch.manual_seed`
got on rank 0, seed, epoch, index of the first sample, 1), so that another seed of the process means other dropout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_odc import host_memory
from lightning_odc.arguments import Count, Index, Like
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.samples.lengths import Lengths, LengthsUnknownError
from lightning_odc.samples.probe import Collate
from lightning_odc.samples.rng import isolated_rng, seed_rng
from lightning_odc.samples.sharing import Read, content_of

Seconds = Annotated[float, Like("0 (a number of seconds)", lambda value: value >= 0)]


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after another, and not by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Assignment(NamedTuple):
    """One rank's part of a minibatch, before its samples are read."""

    epoch: int  # the epoch it belongs to
    microbatches: list[list[int]]  # lists of sample indices
    is_planned: bool = True  # else its samples are read to be planned


class SampleReader:
    """Turns an `Assignment` into a `Minibatch`; what ``DataLoader`` calls its data set."""

    # A worker has a copy of it, and nothing else. With ``persistent_workers`` that lives for all passes, so nothing
    # changes here between passes.
    def __init__(self, dataset: Any, collate_fn: Collate, seed: int, lengths: Lengths | None = None) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self._lengths = lengths  # with which samples are compared

    def __getitem__(self, assignment: Assignment) -> Minibatch | list[Read]:
        """Read an assignment."""
        with isolated_rng():
            if not assignment.is_planned:
                return [
                    read for own in assignment.microbatches for read in self._measured(assignment.epoch, own)
                ]
            return Minibatch(
                [self.read(assignment.epoch, indices, {}) for indices in assignment.microbatches]
            )

    def _measured(self, epoch: int, indices: list[int]) -> list[Read]:
        """Samples that are to be planned; see Note [Read first, planned then]."""
        samples = self.samples(epoch, indices)
        lengths = list(map(self._length, indices, samples))
        return list(map(Read, indices, lengths, map(content_of, samples)))

    def _length(self, index: int, sample: Any) -> int:
        """The length of a sample, compared with the one that is known; 1 of a sample that has none."""
        assert self._lengths is not None
        assert self._lengths.length_of is not None
        length: int = self._lengths.values[index]
        found = 1
        with suppress(LengthsUnknownError):
            found = max(int(self._lengths.length_of(sample)), 1)
        if self._lengths.is_checked and length and found != length:  # a kept worker does not know all of them
            raise ValueError(
                f"Sample {index} has length {found}, but had {length} when the lengths were looked up. If "
                "samples differ in length from epoch to epoch, say what to plan with: "
                "BalancedDataLoader(dataset, lengths=[...])."
            )
        return found

    def read(self, epoch: int, indices: list[int], held: Mapping[int, bytes]) -> Any:
        """Read one microbatch, or take it from samples that are held; it seeds the global generators."""
        if held.keys() >= {*indices}:
            samples = [pickle.loads(held[index]) for index in indices]  # noqa: S301 - from ranks of this job
        else:
            samples = self.samples(epoch, indices)
        if self._lengths is not None and self._lengths.is_checked:
            for index, sample in zip(indices, samples, strict=True):
                self._length(index, sample)
        seed_rng(self._seed, epoch, indices[0])
        return collate(self._collate, samples)

    def samples(self, epoch: int, indices: list[int]) -> list[Any]:
        """The samples of an epoch, before they are collated; it seeds the global generators."""
        if callable(getattr(self._dataset, "__getitems__", None)):
            seed_rng(self._seed, epoch, indices[0])
            return list(self._dataset.__getitems__(indices))
        samples = []
        for index in indices:
            seed_rng(self._seed, epoch, index)
            samples.append(self._dataset[index])
        return samples


def collate(collate_fn: Collate, samples: list[Any]) -> Any:
    """``collate_fn(samples)``; where torch's default fails on unequal lengths, with a hint."""
    try:
        return collate_fn(samples)
    except RuntimeError as error:
        if collate_fn is default_collate:
            error.add_note(
                "Samples of different lengths cannot be stacked. Pass a collate_fn that pads them, or one that packs "
                "them: BalancedDataLoader(..., collate_fn=lightning_odc.samples.packing.pack_samples)."
            )
        raise


# -- the processes that read ahead: torch's ``DataLoader``, whose items are whole minibatches --------------


class WorkerOptions(TypedDict, total=False):
    """Arguments of ``torch.utils.data.DataLoader`` about the processes that read samples, with torch's defaults."""

    num_workers: Index
    pin_memory: bool
    prefetch_factor: Count | None
    persistent_workers: bool
    timeout: Seconds
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any


def torch_loader(
    source: Any, seed: int, options: WorkerOptions, sampler: Any = None
) -> DataLoader[Minibatch]:
    """A ``DataLoader`` whose items are whole minibatches; its generator seeds workers, so the global one stays."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return DataLoader(source, batch_size=None, sampler=sampler, generator=generator, **options)


def named_deaths(minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
    """Yield the same minibatches. If a worker was killed, the error says whether memory had run out."""
    kills = host_memory.Kills()
    try:
        yield from minibatches
    # torch says it, or a connection to the worker breaks first
    except (RuntimeError, OSError, EOFError) as error:
        is_plain = isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)
        verdict = "" if is_plain else kills.verdict()
        if verdict:
            error.add_note(verdict)
        raise
