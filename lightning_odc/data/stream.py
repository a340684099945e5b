"""Minibatches from an iterable data set: a bounded window of samples is read ahead and balanced.

Note [One stream on all ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks plan alone, and a plan needs the lengths of all samples of the minibatch. So every rank reads the whole stream,
in the same order, and keeps its share. A data set that gives every rank other samples makes ranks plan different
minibatches; the engine finds out at the end of the first step, by the plan's text. For the same reason one worker
at most reads the stream, and while it is read, the global generators are seeded alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_odc.balance import LearntCost, Planner, epoch_order
from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthArray, LengthFunction, Lengths, check_longest, checked
from lightning_odc.data.minibatch import Detail, Minibatch, Origin
from lightning_odc.data.plan import Plan, Recipe, make_plan, regrouped
from lightning_odc.data.rng import PrivateRng, isolated_rng, seed_rng
from lightning_odc.data.shares import Collate, collate


@dataclass(frozen=True)
class Stream:
    """How to read a stream; the same on all ranks.

    Attributes:
        dataset: yields samples, the same on every rank.
        recipe: how samples become minibatches; so many of them as its window says are read ahead and held, and
            shuffled among each other if it says so.
        length_of: the length of a sample.
        collate_fn: makes a microbatch of a list of samples.
        num_replicas: how many ranks share a minibatch.
    """

    dataset: Iterable[Any]
    recipe: Recipe
    length_of: LengthFunction
    collate_fn: Collate
    num_replicas: int

    @property
    def samples_per_minibatch(self) -> int:
        return self.recipe.minibatch_size * self.num_replicas

    @cached_property
    def _planner(self) -> Planner:
        return self.recipe.planner(self.num_replicas)

    def __len__(self) -> int:
        """Minibatches per epoch, if the data set has a length; else ``TypeError``."""
        whole, rest = divmod(len(self.dataset), self.samples_per_minibatch)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self.recipe.drop_last)

    def minibatches(self, epoch: int) -> Iterator[list[Any]]:
        """The samples of one minibatch after another."""
        size, recipe = self.samples_per_minibatch, self.recipe
        step = 0
        for window in self._windows(epoch, recipe.window * size):
            lengths = (
                self.lengths_of(step, window) if recipe.regroup else np.ones(len(window), dtype=np.int64)
            )
            for group in regrouped(lengths, recipe, self.num_replicas):
                if len(group) == size or not recipe.drop_last:
                    yield [window[index] for index in group]
                    step += 1

    def _windows(self, epoch: int, size: int) -> Iterator[list[Any]]:
        rng = PrivateRng(self.recipe.seed, epoch)
        with rng.active():
            source = iter(self.dataset)
        for number in count():
            with rng.active():
                window = list(islice(source, size))
            if self.recipe.shuffle:  # one order per epoch and window
                order = epoch_order(len(window), self.recipe.seed, epoch << 32 | number)
                yield [window[index] for index in order]
            else:
                yield window
            if len(window) < size:
                return

    def plan(self, epoch: int, step: int, lengths: LengthArray, learnt: LearntCost | None = None) -> Plan:
        """Who does what in a minibatch of samples of these lengths; indices are those of ``lengths``."""
        recipe = self.recipe
        digest = Lengths(lengths, "samples").digest
        name = f"{recipe.policy}, seed {recipe.seed}, epoch {epoch}, minibatch {step}, lengths {digest}"
        indices = np.arange(len(lengths), dtype=np.int64)
        return make_plan(self._planner, recipe, indices, lengths, name, learnt)

    def lengths_of(self, step: int, samples: list[Any]) -> LengthArray:
        """The lengths of samples, checked; ``step`` is the minibatch to name where one is wrong."""
        try:
            lengths = checked([self.length_of(sample) for sample in samples], name="the stream's samples")
            check_longest(lengths, self.recipe.max_tokens)
        except ValueError as error:
            error.add_note(f"In minibatch {step} of the stream; samples are counted from its beginning.")
            raise
        return lengths


class StreamReader(IterableDataset[Minibatch]):
    """One rank's shares of a pass over a stream.

    Args:
        stream: what to read.
        rank: whose shares.
        epoch: of the pass; handed to ``dataset.set_epoch`` where there is one.
        first: number of the first minibatch to return; those before it are read and dropped.
        relative: weights relative to their mean over the minibatch.
        learning: of a cost that learns; then this runs in the process that trains.
    """

    def __init__(
        self, stream: Stream, rank: int, epoch: int, first: int, *, relative: bool, learning: Learning | None
    ) -> None:
        self._stream = stream
        self._rank = rank
        self._epoch = epoch
        self._first = first
        self._relative = relative
        self._learning = learning

    def __iter__(self) -> Iterator[Minibatch]:
        set_epoch = getattr(self._stream.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        for step, samples in enumerate(self._stream.minibatches(self._epoch)):
            if step >= self._first:
                yield self._share(step, samples)

    def _share(self, step: int, samples: list[Any]) -> Minibatch:
        stream, learning = self._stream, self._learning
        lengths = stream.lengths_of(step, samples)
        learnt = None if learning is None else learning.cost_for(learning.begun)
        plan = stream.plan(self._epoch, step, lengths, learnt)
        microbatches, details = [], []
        with isolated_rng():
            for indices in plan.microbatches[self._rank]:
                seed = stream.recipe.seed, self._epoch, step, indices[0]
                seed_rng(*seed)
                microbatches.append(collate(stream.collate_fn, [samples[index] for index in indices]))
                details.append(Detail(lengths[indices].tolist(), (*seed, 1)))
        share = Minibatch(microbatches, plan.weights_of(self._rank, self._relative), plan.text)
        share.origin = Origin(details)
        return share
