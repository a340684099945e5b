"""The minibatches of a stream for one rank, planned in windows as it is read.

Note [One stream on all ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks plan alone, and a plan needs the lengths of all samples of the minibatch. So every rank reads the whole stream,
in the same order, and keeps its part. If a data set gives every rank different samples, ranks plan different
minibatches. The engine detects that at the end of the first step, by the plan's text. For the same reason at most one
worker reads the stream, and while it reads, the global generators have the same seeds on all ranks. That worker plans,
too, and lives for one pass: a worker that is kept would not know the next epoch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc.balance import epoch_order
from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.balance.collation import PACKED
from lightning_odc.data.learning import Learning
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import MinibatchPlan, Recipe, World
from lightning_odc.data.position import Order
from lightning_odc.data.ran import Ran, ran_of
from lightning_odc.data.reader import WorkerOptions, collate, torch_loader
from lightning_odc.samples.collation import collation_of
from lightning_odc.samples.lengths import LengthFunction, Lengths, length_function
from lightning_odc.samples.probe import Collate, look
from lightning_odc.samples.rng import RandomState, isolated_rng, seed_rng


class StreamSchedule(IterableDataset[Minibatch]):
    """One rank's part of the minibatches of a stream; what ``DataLoader`` calls its data set."""

    # It has the attributes of a `MapSchedule`. As many minibatches as the window says are read ahead, and shuffled
    # among each other if the options say so. A cost that learns is `None` unless this runs in the process that trains.

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        length_fn: LengthFunction | None,
        recipe: Recipe,
        world: World,
    ) -> None:
        num_replicas, rank = world
        options = recipe.options
        self.world = world
        self.learning = Learning(num_replicas, recipe.measured_cost(num_replicas))
        self._num_replicas = num_replicas
        self._rank = rank
        self._size = options.minibatch_size * num_replicas
        self.order = Order(options.order, self._size, options.batches)
        self.max_tokens = options.max_tokens
        self._dataset = dataset
        self._collate = collate_fn
        self._length_fn = length_fn  # `None`: found out with the first window
        self._recipe = recipe
        self._options = options
        self._epoch = 0  # of the pass
        self._first = 0  # minibatch to yield; those before it are read and dropped
        self._ran = Ran()  # found out with the first window
        self._stand_in: list[Any] = []  # a sample that is not left out

    def __len__(self) -> int:
        """Minibatches per epoch, if the data set has a length; else ``TypeError``."""
        return self._options.count_minibatches(len(self._dataset), self._num_replicas)

    def loader(
        self, epoch: int, first: int, options: WorkerOptions, reuse_workers: bool
    ) -> DataLoader[Minibatch]:
        """As `MapSchedule.loader`; no worker is kept."""
        options = {**options, "persistent_workers": False}
        if options.get("num_workers", 0) > 1:
            options["num_workers"] = 1
            warnings.warn(
                "BalancedDataLoader reads an iterable data set with one worker, since all ranks must see one stream: "
                "write num_workers=1.",
                stacklevel=2,
            )
        one_pass = copy.copy(self)
        one_pass._epoch = epoch
        one_pass._first = first
        return torch_loader(one_pass, self._options.seed + epoch, options)

    def __iter__(self) -> Iterator[Minibatch]:
        """Read a window, cut it into minibatches of all ranks, and yield this rank's part of each."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        options = self._options
        recipe = self._recipe
        step = 0
        for samples in self._windows(options.window * self._size):
            if self._length_fn is None:
                self._length_fn = length_function(samples.__getitem__, len(samples), self._collate)
            found = [self._length_fn(sample) for sample in samples]
            lengths = as_lengths(found, f"the stream's samples from minibatch {step} on")
            # again if nothing was left of the windows before
            if step == 0 or (self._ran.stand_in is None and not recipe.counts_alike):
                recipe = self._look(samples, lengths)
            for group in options.minibatches(lengths, self._num_replicas):
                used = group[: options.count_samples(len(group), self._num_replicas)]
                if len(used) and step >= self._first:
                    of_minibatch = [samples[index] for index in used]
                    yield self._minibatch(step, of_minibatch, lengths[used], recipe)
                step += 1

    def _windows(self, size: int) -> Iterator[list[Any]]:
        """The samples of one window after another, of all ranks."""
        with isolated_rng():
            seed_rng(self._options.seed, self._epoch)
            source = iter(self._dataset)
            rng = RandomState()
        for number in count():
            with rng.active():
                window = list(islice(source, size))
            if window and self._options.shuffle:  # one order per epoch and window
                order = epoch_order(len(window), self._options.seed, self._epoch << 32 | number)
                yield [window[index] for index in order]
            elif window:
                yield window
            if len(window) < size:
                return

    def _look(self, samples: list[Any], lengths: Ints) -> Recipe:
        """Find out what the ``collate_fn`` makes of the samples of a window."""
        probe = look(samples.__getitem__, lengths, self._collate)
        collation = collation_of(probe) or PACKED
        if self.learning.cost is not None and collation.kind != "packed":
            self.learning.cost.separate_samples()
        if not self._recipe.counts_alike:
            self._ran = ran_of(probe)
        if self._ran.stand_in is not None:
            self._stand_in = [copy.deepcopy(samples[self._ran.stand_in])]
            self._ran = replace(self._ran, stand_in=-1)  # the last one, behind those of a minibatch
        return replace(self._recipe, collation=collation)

    def _minibatch(self, step: int, samples: list[Any], lengths: Ints, recipe: Recipe) -> Minibatch:
        """This rank's part of a minibatch of these samples."""
        options = self._options
        learnt = self.learning.at(self.learning.begun).cost
        planner = recipe.planner(self._num_replicas, lengths)
        plan = MinibatchPlan.of(
            recipe,
            replace(planner, cost=learnt or planner.cost),
            np.arange(len(lengths)),
            lengths,
            recipe.name(self._epoch, step, Lengths(lengths)),
            turn=self._epoch + step,
        )
        tasks = []
        weights = plan.weights[self._rank]
        everything = [*samples, *self._stand_in]

        def read(positions: list[int]) -> Any:
            return collate(self._collate, [everything[position] for position in positions])

        with isolated_rng():
            for number, indices in enumerate(plan.microbatches[self._rank]):
                seed = options.seed, self._epoch, step, indices[0]
                seed_rng(*seed)
                task = self._ran.task(
                    read(indices), weights[number], indices, lengths[indices], (*seed, 1), recipe, read
                )
                if task.microbatch is not None or recipe.counts_alike:  # else nothing is left on any rank
                    tasks.append(task)
        return recipe.minibatch(tasks, plan.text)
