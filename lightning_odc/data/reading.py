"""Shares of minibatches read by torch's ``DataLoader``: its workers, pinning and prefetching, one item per share."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict, cast

import torch
from torch.utils.data import DataLoader

from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthFunction
from lightning_odc.data.minibatch import AllShares, Minibatch, Origin
from lightning_odc.data.plan import Schedule
from lightning_odc.data.position import Order
from lightning_odc.data.shares import Collate, ShareReader, ShareSampler
from lightning_odc.data.stream import Stream, StreamReader


class WorkerOptions(TypedDict, total=False):
    """Arguments of ``torch.utils.data.DataLoader`` about the processes that read samples, with torch's defaults."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any


class Reading(ABC):
    """How one rank reads its shares.

    Attributes:
        order: what a position in it refers to.
        max_tokens: the most tokens in a microbatch, where that is known.
    """

    order: Order
    max_tokens: int | None

    @abstractmethod
    def __len__(self) -> int:
        """Minibatches per epoch; ``TypeError`` where nobody knows."""

    @abstractmethod
    def count_microbatches(self, epoch: int) -> int:
        """Microbatches per rank in an epoch; ``TypeError`` where nobody knows."""

    @abstractmethod
    def loader(self, epoch: int, first: int, options: WorkerOptions, fresh: bool) -> DataLoader[Minibatch]:
        """The shares of an epoch, from minibatch ``first`` on.

        Args:
            epoch: of the pass.
            first: number of its first minibatch.
            options: for torch's ``DataLoader``.
            fresh: start workers even if others were to be kept.
        """

    @abstractmethod
    def completed(self, share: Minibatch, epoch: int, step: int) -> Minibatch:
        """A share that has arrived from a worker, with what need not travel there."""


def _announce(origin: Origin, learning: Learning | None) -> Origin:
    """Say who wants to know how long the microbatches take."""
    if learning is not None:
        origin.number, origin.learning = learning.begin(), learning
    return origin


class MapReading(Reading):
    """Reads a map-style data set.

    Args:
        schedule: which samples are in which minibatch.
        rank: whose shares.
        dataset: the samples.
        collate_fn: makes a microbatch of a list of samples.
        length_of: compares the lengths of samples with the schedule's; ``None``: they are taken on trust.
        relative: weights relative to their mean over the minibatch.
        learning: of a cost that learns.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        dataset: Any,
        collate_fn: Collate,
        length_of: LengthFunction | None,
        relative: bool,
        learning: Learning | None,
    ) -> None:
        recipe = schedule.recipe
        self.schedule = schedule
        self._rank = rank
        self._learning = learning
        self.order = Order(
            f"{recipe.order}, lengths {schedule.lengths.digest}", schedule.samples_per_minibatch
        )
        self.max_tokens = recipe.max_tokens or int(schedule.lengths.values.max())
        self._counted: tuple[int, int] | None = None
        self._sampler = ShareSampler(
            schedule, rank, relative=relative, lengths_too=length_of is not None, learning=learning
        )
        self._reader = ShareReader(dataset, collate_fn, recipe.seed, length_of)
        self._kept: DataLoader[Minibatch] | None = None

    def __len__(self) -> int:
        return len(self.schedule)

    def count_microbatches(self, epoch: int) -> int:
        if self._counted is None or self._counted[0] != epoch:
            self._counted = epoch, self.schedule.count_microbatches(epoch)
        return self._counted[1]

    def completed(self, share: Minibatch, epoch: int, step: int) -> Minibatch:
        """With ``policy="steal"``, a share comes with the means to run what others were planned to do."""
        plan, learnt, details = self._sampler.planned.pop(step)
        share.origin = _announce(Origin(details[self._rank]), self._learning)
        if self.schedule.recipe.policy == "steal" and self.schedule.num_replicas > 1:
            fetch = partial(_fetch, self, epoch, plan.microbatches)
            share.all_shares = AllShares(self.schedule.costs(plan, learnt), plan.weights, fetch, details)
        return share

    def read(self, epoch: int, microbatch: Sequence[int]) -> Any:
        """Any microbatch, from the indices of its samples."""
        return self._reader.read(epoch, list(microbatch))

    def loader(self, epoch: int, first: int, options: WorkerOptions, fresh: bool) -> DataLoader[Minibatch]:
        self._sampler.begin = epoch, first
        if self._kept is not None and not fresh:
            return self._kept
        reader: Any = self._reader
        loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_as_it_is,
            generator=_generator(self.schedule.recipe.seed, epoch),
            **options,
        )
        self._kept = loader if options.get("persistent_workers") else None
        return loader


class StreamReading(Reading):
    """Reads an iterable data set, by one worker at most.

    Args:
        stream: what to read.
        rank: whose shares.
        relative: weights relative to their mean over the minibatch.
        learning: of a cost that learns; then without a worker.
    """

    def __init__(self, stream: Stream, rank: int, relative: bool, learning: Learning | None) -> None:
        self.order = Order(stream.recipe.order, stream.samples_per_minibatch)
        self.max_tokens = stream.recipe.max_tokens
        self._stream = stream
        self._rank = rank
        self._relative = relative
        self._learning = learning

    def __len__(self) -> int:
        return len(self._stream)

    def completed(self, share: Minibatch, epoch: int, step: int) -> Minibatch:
        assert share.origin is not None
        _announce(share.origin, self._learning)
        return share

    def count_microbatches(self, epoch: int) -> int:
        raise TypeError("The microbatches of an iterable data set cannot be counted before they are read.")

    def loader(self, epoch: int, first: int, options: WorkerOptions, fresh: bool) -> DataLoader[Minibatch]:
        options = {
            **options,
            "persistent_workers": False,
        }  # a worker that is kept would not learn of the new epoch
        if options.get("num_workers", 0) > 1:
            options["num_workers"] = 1
            warnings.warn(
                "BalancedDataLoader reads an iterable data set with one worker, since all ranks must see one stream: "
                "write num_workers=1.",
                stacklevel=2,
            )
        return DataLoader(
            StreamReader(
                self._stream, self._rank, epoch, first, relative=self._relative, learning=self._learning
            ),
            batch_size=None,
            collate_fn=_as_it_is,
            generator=_generator(self._stream.recipe.seed, epoch),
            **options,
        )


def check_options(options: WorkerOptions) -> None:
    """Let torch refuse options that do not go together, before anything is read.

    Raises:
        TypeError: an unknown option.
        ValueError: what torch says.
    """
    unknown = sorted(set(options) - set(WorkerOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"BalancedDataLoader does not know {', '.join(unknown)}. It takes `minibatch_size` (samples per rank and "
            "minibatch) instead of a batch size or sampler, and of torch's options "
            f"{', '.join(WorkerOptions.__annotations__)}."
        )
    nothing: Any = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns again when the loader is really made
        DataLoader[Any](nothing, **options)


def _fetch(
    reading: MapReading, epoch: int, microbatches: list[list[list[int]]], rank: int, number: int
) -> Any:
    return reading.read(epoch, microbatches[rank][number])


def _generator(seed: int, epoch: int) -> torch.Generator:
    """For the seeds of workers, so that making them leaves the global generator alone."""
    return torch.Generator().manual_seed((seed + epoch) % 2**63)


def _as_it_is(share: Any) -> Minibatch:
    return cast(Minibatch, share)
