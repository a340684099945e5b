"""The minibatches of a map-style data set for one rank: planned, handed out to be read, and completed.

`MapSchedule.__iter__` plans a minibatch as early as torch's ``DataLoader`` reads ahead, and hands out this rank's
`Assignment`. A `SampleReader` reads the samples and makes a `Minibatch`. When that arrives, `MapSchedule.completed`
adds what only the plan knows. Where lengths are not known, this comes first: Note [Read first, planned then].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from lightning_odc.data.learning import NO_CAP, Known, Learning
from lightning_odc.data.minibatch import Minibatch, Rereader, StealableWork, Task
from lightning_odc.data.plan import EpochPlan, MinibatchPlan, Recipe, World
from lightning_odc.data.position import Order
from lightning_odc.data.ran import Ran, ReadBatch
from lightning_odc.data.reader import Assignment, SampleReader, WorkerOptions, torch_loader
from lightning_odc.samples.lengths import Lengths
from lightning_odc.samples.rng import isolated_rng
from lightning_odc.samples.sharing import ALONE, Read, Sharing
from lightning_odc.samples.weighting import planned_counts


class MapSchedule:
    """Plans minibatches of a map-style data set; also the sampler of the ``DataLoader`` that reads."""

    def __init__(
        self,
        reader: SampleReader,
        ran: Ran,
        lengths: Lengths,
        recipe: Recipe,
        world: World,
        sharing: Sharing = ALONE,
    ) -> None:
        num_replicas, rank = world
        options = recipe.options
        self.epochs = EpochPlan(lengths, recipe, num_replicas)
        cap = None
        if not recipe.run.repeats:
            cap = self.epochs.planner.max_tokens
            if options.max_tokens is None and not lengths.are_complete:
                cap = NO_CAP  # that of each minibatch
        rows = self.epochs.planner.collation.row_lengths(lengths.known)
        self.learning = Learning(num_replicas, recipe.measured_cost(num_replicas), cap, int(rows.max()))
        order = options.order
        if options.shuffle:
            order += ", as DistributedSampler"
        order += f", lengths {lengths.sketch}"
        self.order = Order(order, self.epochs.samples_per_minibatch, options.batches)
        self.world = world
        self._recipe = recipe
        self._lengths = lengths
        self._rank = rank
        self._reader = reader
        self._ran = ran
        self._sharing = sharing
        self._epoch = 0  # of the pass that is under way, or begins next
        self._first = 0  # minibatch of that pass
        # By number: the minibatches that were handed out to be read and have not arrived.
        self._under_way: dict[int, tuple[MinibatchPlan | None, Known]] = {}
        self._with_workers: DataLoader[Minibatch] | None = None  # where they are kept from pass to pass

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return len(self.epochs)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens in a microbatch, by what is known now."""
        learnt = self.learning.max_tokens
        return self.epochs.planner.max_tokens if learnt in (None, NO_CAP) else learnt

    def loader(
        self, epoch: int, first: int, options: WorkerOptions, reuse_workers: bool
    ) -> DataLoader[Minibatch]:
        """Minibatches of an epoch for this rank, from number ``first`` on; by kept workers if they are still alive."""
        self._epoch = epoch
        self._first = first
        if self._with_workers is not None and reuse_workers:
            return self._with_workers
        # A proxy: in a circle of references, workers that are kept would live until the garbage collector comes.
        sampler = weakref.proxy(self)
        loader = torch_loader(self._reader, self._recipe.options.seed + epoch, options, sampler)
        self._with_workers = loader if options.get("persistent_workers") else None
        return loader

    def __iter__(self) -> Iterator[Assignment]:
        """What this rank reads of each minibatch; runs ahead of training by what the ``DataLoader`` prefetches."""
        epoch = self._epoch
        steps = range(self._first, len(self))
        self._under_way.clear()
        for number, step in enumerate(steps, self.learning.begun):
            known = self.learning.at(number)
            samples = self.epochs.samples(epoch, step)
            if self._lengths.values[samples].all():
                plan = self.epochs.plan(epoch, step, *known)
                self._under_way[step] = (plan, known)
                yield Assignment(epoch, plan.microbatches[self._rank])
            else:
                own = samples[self._rank :: self.epochs.num_replicas].tolist()
                self._under_way[step] = (None, known)
                yield Assignment(epoch, [own] if own else [], is_planned=False)

    def completed(self, arrived: Minibatch | list[Read], step: int) -> Minibatch:
        """A minibatch that has arrived, with what only its plan knows; under ``balance="steal"`` about all ranks."""
        epoch = self._epoch
        plan, known = self._under_way.pop(step)
        held: dict[int, bytes] = {}
        if not isinstance(arrived, Minibatch):
            for place, length, content in chain.from_iterable(self._sharing.exchange(arrived)):
                self._lengths.values[place] = length
                if content is not None:
                    held[place] = content
            plan = self.epochs.plan(epoch, step, *known)
        assert plan is not None
        read = partial(self._read, epoch, held)
        own = plan.microbatches[self._rank]
        batches = arrived if isinstance(arrived, Minibatch) else map(read, own)
        weighted = zip(own, batches, plan.weights[self._rank], strict=True)
        minibatch = self._recipe.minibatch([self._task(epoch, read, *one) for one in weighted], plan.text)
        if self._recipe.policy == "steal" and self.epochs.num_replicas > 1:

            def task(rank: int, number: int) -> Task:
                indices = plan.microbatches[rank][number]
                return self._task(epoch, read, indices, read(indices), plan.weights[rank][number])

            minibatch.all_ranks = StealableWork(self._rank, self.epochs.costs(plan, known.cost), task)
        return minibatch

    def _task(self, epoch: int, read: ReadBatch, indices: list[int], batch: Any, weight: float) -> Task:
        """A microbatch that was read, and what it counts: Note [What ran counts]."""
        recipe = self._recipe
        again = None
        if not recipe.counts_alike:  # else nothing may cut it
            again = Rereader(indices, partial(self._read_again, epoch), partial(self._others, indices[0]))
        lengths = self._lengths.values[indices]
        seed = (recipe.options.seed, epoch, indices[0], 1)
        return self._ran.task(batch, weight, indices, lengths, seed, recipe, read, again)

    def _others(self, index: int) -> tuple[list[int], list[int]]:
        """Some 16 samples and their lengths; other ones for another index."""
        lengths = self._lengths.values
        known = lengths.nonzero()[0]
        step = max(len(known) // 16, 1)
        indices = known[index % step :: step]
        return indices.tolist(), lengths[indices].tolist()

    def _read_again(self, epoch: int, indices: list[int]) -> Task:
        """A microbatch of any samples, which counts what they do."""
        weight = float(planned_counts(self._recipe.weighting, self._lengths.values[indices]).sum())
        read = partial(self._read, epoch, {})
        return self._task(epoch, read, indices, read(indices), weight)

    def _read(self, epoch: int, held: Mapping[int, bytes], indices: list[int]) -> Any:
        with isolated_rng():
            return self._reader.read(epoch, indices, held)
