"""An iterable data set, read for one rank: a bounded window of samples is read ahead and balanced.

Note [One stream on all ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks plan alone, and a plan needs the lengths of all samples of the minibatch. So every rank reads the whole stream,
in the same order, and keeps its part. If a data set gives every rank different samples, ranks plan different
minibatches. The engine detects that at the end of the first step, by the plan's text. For the same reason at most one
worker reads the stream, and while it reads, the global generators have the same seeds on all ranks. That worker plans,
too, and lives for one pass: a worker that is kept would not know the next epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc.balance import epoch_order
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.data.checks import WorkerOptions
from lightning_odc.data.collation import find_collation
from lightning_odc.data.learning import DelayedCost
from lightning_odc.data.lengths import LengthArray, LengthFunction, Lengths, check_longest, checked, plain
from lightning_odc.data.map_style import Collate, collate, torch_loader
from lightning_odc.data.minibatch import Detail, Minibatch
from lightning_odc.data.plan import Facts, MinibatchPlan, Recipe
from lightning_odc.data.position import Order
from lightning_odc.data.rng import PrivateRng, isolated_rng, seed_rng


class StreamReading:
    """Has one rank's part of the minibatches of a stream read, by one worker at most.

    Args:
        stream: The stream, for this rank.

    Attributes:
        order: What a position in it refers to.
        max_tokens: The most tokens in a microbatch, where that is known.
    """

    def __init__(self, stream: Stream) -> None:
        self.order = Order(stream.recipe.order, stream.samples_per_minibatch, stream.recipe.batches)
        self.max_tokens = stream.recipe.max_tokens
        self._stream = stream

    def __len__(self) -> int:
        return len(self._stream)

    def count_microbatches(self, epoch: int) -> int:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise TypeError("The microbatches of an iterable data set cannot be counted before they are read.")

    def loader(
        self, epoch: int, first: int, options: WorkerOptions, reuse_workers: bool
    ) -> DataLoader[Minibatch]:
        """As `MapReading.loader`; no worker is kept."""
        options = {**options, "persistent_workers": False}
        if options.get("num_workers", 0) > 1:
            options["num_workers"] = 1
            warnings.warn(
                "BalancedDataLoader reads an iterable data set with one worker, since all ranks must see one stream: "
                "write num_workers=1.",
                stacklevel=2,
            )
        stream = replace(self._stream, epoch=epoch, first=first)
        return torch_loader(stream, stream.recipe.seed + epoch, options)

    def completed(self, minibatch: Minibatch, epoch: int, step: int) -> Minibatch:
        """A minibatch that has arrived, counted."""
        assert minibatch.origin is not None
        minibatch.origin.counted(self._stream.cost)
        return minibatch


@dataclass(frozen=True, eq=False)
class Stream(IterableDataset[Minibatch]):
    """One rank's part of the minibatches in one pass over an iterable data set.

    Attributes:
        dataset: Yields samples, the same on every rank.
        recipe: How samples become minibatches; so many of them as its window says are read ahead and held, and
            shuffled among each other if it says so.
        length_of: The length of a sample.
        collate_fn: Makes a microbatch of a list of samples.
        num_replicas: The number of ranks that share a minibatch.
        rank: Whose part is yielded.
        relative: Weights are relative to their mean over the minibatch.
        cost: The cost, if it is one that learns; then this runs in the process that trains.
        facts: What was found out about the run; what the ``collate_fn`` does is found out with the first minibatch.
        epoch: The epoch of the pass; handed to ``dataset.set_epoch`` where there is one.
        first: The number of the first minibatch to yield; those before it are read and dropped.
    """

    dataset: Iterable[Any]
    recipe: Recipe
    length_of: LengthFunction
    collate_fn: Collate
    num_replicas: int
    rank: int
    relative: bool
    cost: DelayedCost | None
    facts: Facts
    epoch: int = 0
    first: int = 0

    @property
    def samples_per_minibatch(self) -> int:
        return self.recipe.minibatch_size * self.num_replicas

    def __len__(self) -> int:
        """Minibatches per epoch, if the data set has a length; else ``TypeError``."""
        return self.recipe.count_minibatches(len(self.dataset), self.num_replicas)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Minibatch]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        facts = self.facts
        for step, samples in enumerate(self._minibatches()):
            lengths = self._lengths_of(step, samples)
            if step == 0:
                facts = replace(facts, collation=self._collation(samples, lengths))
                if self.cost is not None and facts.collation.kind != "packed":
                    self.cost.keep_apart()
            if facts.collation.fixed is None:  # else the collate_fn cuts what is longer
                with _named_in_stream(step):
                    check_longest(lengths, self.recipe.max_tokens)
            if step >= self.first:
                yield self._minibatch(step, samples, lengths, facts)

    def _collation(self, samples: list[Any], lengths: LengthArray) -> Collation:
        with isolated_rng():
            seed_rng(self.recipe.seed, self.epoch)
            return find_collation(self.collate_fn, samples.__getitem__, lengths) or PACKED

    def _minibatches(self) -> Iterator[list[Any]]:
        """The samples of one minibatch after another, of all ranks."""
        size, step = self.samples_per_minibatch, 0
        for window in self._windows(self.recipe.window * size):
            alike = np.ones(len(window), dtype=np.int64)
            lengths = self._lengths_of(step, window) if self.recipe.regroup else alike
            for group in self.recipe.minibatches(lengths, self.num_replicas):
                used = group[: self.recipe.count_samples(len(group), self.num_replicas)]
                if len(used):
                    yield [window[index] for index in used]
                    step += 1

    def _windows(self, size: int) -> Iterator[list[Any]]:
        rng = PrivateRng(self.recipe.seed, self.epoch)
        with rng.active():
            source = iter(self.dataset)
        for number in count():
            with rng.active():
                window = list(islice(source, size))
            if self.recipe.shuffle:  # one order per epoch and window
                order = epoch_order(len(window), self.recipe.seed, self.epoch << 32 | number)
                yield [window[index] for index in order]
            else:
                yield window
            if len(window) < size:
                return

    def _lengths_of(self, step: int, samples: list[Any]) -> LengthArray:
        """The lengths of samples, checked; ``step`` is the minibatch to name where one is wrong."""
        with _named_in_stream(step):
            found = [plain(self.length_of(sample)) for sample in samples]
            return checked(found, name="the stream's samples")

    def _minibatch(self, step: int, samples: list[Any], lengths: LengthArray, facts: Facts) -> Minibatch:
        """This rank's part of a minibatch of these samples."""
        learnt = None if self.cost is None else self.cost.at(self.cost.begun)
        name = self.recipe.name(self.epoch, step, Lengths(lengths, "samples"))
        indices = np.arange(len(lengths), dtype=np.int64)
        planner = self.recipe.planner(self.num_replicas, lengths, facts)
        turn = self.epoch + step
        plan = MinibatchPlan.of(self.recipe, planner, indices, lengths, name, learnt, turn)
        microbatches, details = [], []
        with isolated_rng():
            for own in plan.microbatches[self.rank]:
                seed = self.recipe.seed, self.epoch, step, own[0]
                seed_rng(*seed)
                microbatches.append(collate(self.collate_fn, [samples[index] for index in own]))
                details.append(Detail(facts.collation.rows(lengths[own]), (*seed, 1)))
        minibatch = Minibatch(microbatches, plan.weights_of(self.rank, self.relative), plan.text)
        minibatch.origin = self.recipe.origin(details)
        return minibatch


@contextmanager
def _named_in_stream(step: int) -> Iterator[None]:
    """Say of an error about samples in which minibatch they are."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"In minibatch {step} of the stream; samples are counted from its beginning.")
        raise
