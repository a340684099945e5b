"""A map-style data set, read for one rank: planned in the process that trains, read there or by workers.

A minibatch goes through three hands. `MapReading` plans it, as early as torch's ``DataLoader`` reads ahead, and hands
out this rank's `Assignment`. A `SampleReader` reads the samples and makes a `Minibatch`. When that arrives,
`MapReading.completed` adds what only the plan knows. A worker has a copy of the `SampleReader` and nothing else. It
lives for one pass, or with ``persistent_workers`` for all of them, so the reader holds nothing that changes between
passes.

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

import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_odc import host_memory
from lightning_odc.balance import LearntCost
from lightning_odc.balance.caps import Caps
from lightning_odc.balance.collation import Collation
from lightning_odc.data.checks import WorkerOptions
from lightning_odc.data.collation import find_collation
from lightning_odc.data.learning import DelayedCost
from lightning_odc.data.lengths import LengthArray, LengthFunction
from lightning_odc.data.memory_cap import DelayedCap
from lightning_odc.data.minibatch import AllRanks, Detail, Minibatch, Samples, Task
from lightning_odc.data.plan import MinibatchPlan, Schedule
from lightning_odc.data.position import Order
from lightning_odc.data.rng import isolated_rng, seed_rng, with_own_rng

Collate = Callable[[list[Any]], Any]

#: Private memory of a worker before it reads, of one that is forked and of one that imports torch itself: measured with
#: torch 2.13, 7 and 281 MiB.
_FORKED_BYTES, _FRESH_BYTES = 8 * 2**20, 280 * 2**20


class MapReading:
    """Plans minibatches and has one rank's part of them read; also the sampler of the ``DataLoader`` that reads.

    Args:
        schedule: The samples of every minibatch.
        rank: Whose part is read.
        reader: Reads a part.
        relative: Weights are relative to their mean over the minibatch.
        cost: The cost, if it is one that learns.
        cap: The caps, if they may fall.

    Attributes:
        order: What a position in it refers to.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        reader: SampleReader,
        relative: bool,
        cost: DelayedCost | None,
        cap: DelayedCap | None = None,
    ) -> None:
        recipe = schedule.recipe
        self.schedule = schedule
        self.order = Order(
            f"{recipe.order}{', as DistributedSampler' * recipe.shuffle}, lengths {schedule.lengths.digest}",
            schedule.samples_per_minibatch,
            recipe.batches,
        )
        self._rank = rank
        self._relative = relative
        self._cost = cost
        self._cap = cap
        self._reader = reader
        self._begin = 0, 0  # epoch and first minibatch of the next pass
        # By number: the minibatches that were handed out to be read and have not arrived.
        self._under_way: dict[int, tuple[MinibatchPlan, LearntCost | None]] = {}
        self._with_workers: DataLoader[Minibatch] | None = None  # where they are kept from pass to pass
        self._counted: tuple[int, int] | None = None  # epoch and its microbatches

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return len(self.schedule)

    @property
    def max_tokens(self) -> Caps:
        """The most tokens in a microbatch, by what is known now."""
        return self.schedule.planner.max_tokens if self._cap is None else self._cap.value

    def count_microbatches(self, epoch: int) -> int:
        """Microbatches per rank in an epoch, where all ranks have equally many. Plans the whole epoch, once."""
        if self._counted is None or self._counted[0] != epoch:
            assert self.schedule.recipe.equal_counts
            plans = (self.schedule.plan(epoch, step) for step in range(len(self)))
            self._counted = epoch, sum(len(plan.microbatches[0]) for plan in plans)
        return self._counted[1]

    def loader(
        self, epoch: int, first: int, options: WorkerOptions, reuse_workers: bool
    ) -> DataLoader[Minibatch]:
        """Minibatches of an epoch for this rank, from number ``first`` on.

        Args:
            epoch: The epoch of the pass.
            first: The number of its first minibatch.
            options: Options of torch's ``DataLoader``.
            reuse_workers: Workers that were kept are still alive.
        """
        self._begin = epoch, first
        if self._with_workers is not None and reuse_workers:
            return self._with_workers
        # A proxy: in a circle of references, workers that are kept would live until the garbage collector comes.
        sampler = weakref.proxy(self)
        loader = torch_loader(self._reader, self.schedule.recipe.seed + epoch, options, sampler)
        self._with_workers = loader if options.get("persistent_workers") else None
        return loader

    def __iter__(self) -> Iterator[Assignment]:
        return self._assignments(*self._begin)

    def _assignments(self, epoch: int, first: int) -> Iterator[Assignment]:
        """What this rank reads of each minibatch; runs ahead of training by what the ``DataLoader`` prefetches."""
        self._under_way.clear()
        begun = max(0 if one is None else one.begun for one in (self._cost, self._cap))
        for step in range(first, len(self)):
            learnt = None if self._cost is None else self._cost.at(begun + step - first)
            caps = None if self._cap is None else self._cap.at(begun + step - first)
            plan = self.schedule.plan(epoch, step, learnt, caps)
            self._under_way[step] = plan, learnt
            own = plan.microbatches[self._rank]
            lengths = [self.schedule.lengths.of(m) for m in own] if self._reader.compares_lengths else None
            weights = plan.weights_of(self._rank, self._relative)
            yield Assignment(epoch, own, weights, plan.text, lengths)

    def completed(self, minibatch: Minibatch, epoch: int, step: int) -> Minibatch:
        """A minibatch that has arrived, with what only its plan knows; under ``policy="steal"`` about all ranks."""
        plan, learnt = self._under_way.pop(step)
        details = self._details(epoch, plan.microbatches[self._rank])
        minibatch.origin = self.schedule.recipe.origin(details).counted(self._cost, self._cap)
        if self.schedule.recipe.policy == "steal" and self.schedule.num_replicas > 1:
            of_all = [self._details(epoch, of_rank) for of_rank in plan.microbatches]
            fetch = partial(self._fetch, epoch, plan.microbatches)
            minibatch.all_ranks = AllRanks(self.schedule.costs(plan, learnt), plan.weights, fetch, of_all)
        return minibatch

    def _details(self, epoch: int, microbatches: list[list[int]]) -> list[Detail]:
        return [self._detail(epoch, own) for own in microbatches]

    def _detail(self, epoch: int, indices: list[int]) -> Detail:
        lengths = self.schedule.collation.rows(self.schedule.lengths.of(indices))
        is_whole = bool(self.schedule.recipe.whole)  # then nothing may cut it
        samples = None if is_whole else Samples(indices, partial(self._part, epoch, indices))
        return Detail(lengths, (self.schedule.recipe.seed, epoch, indices[0], 1), samples)

    def _part(self, epoch: int, whole: list[int], indices: list[int]) -> Task:
        """Some samples of a microbatch, with their part of its weight."""
        weights = self.schedule.recipe.sample_weights(self.schedule.lengths.values[whole])
        weight = float(weights[[whole.index(index) for index in indices]].sum())
        return Task(self.read(epoch, indices), weight, self._detail(epoch, indices))

    def _fetch(self, epoch: int, microbatches: list[list[list[int]]], rank: int, number: int) -> Any:
        return self.read(epoch, microbatches[rank][number])

    def read(self, epoch: int, microbatch: Sequence[int]) -> Any:
        """Any microbatch, from the indices of its samples."""
        with isolated_rng():
            return self._reader.read(epoch, list(microbatch))


@dataclass(frozen=True)
class Assignment:
    """One rank's part of a minibatch, before its samples are read.

    Attributes:
        epoch: The epoch it belongs to.
        microbatches: Lists of sample indices.
        weights: One per microbatch.
        plan: Text that is equal on all ranks.
        lengths: What the samples' lengths must be, in the same form, if that is to be checked.
    """

    epoch: int
    microbatches: list[list[int]]
    weights: list[float]
    plan: str
    lengths: list[list[int]] | None = None


class SampleReader:
    """Turns an `Assignment` into a `Minibatch`; what ``DataLoader`` calls its data set.

    Args:
        dataset: The samples.
        collate_fn: Makes a microbatch of a list of samples.
        seed: The seed of random numbers, see Note [Random numbers follow the sample].
        length_of: Compares the lengths of samples with those of the assignment, if it has them.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate, seed: int, length_of: LengthFunction | None
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self._length_of = length_of

    @property
    def compares_lengths(self) -> bool:
        """Whether it compares each sample with the length that was looked up."""
        return self._length_of is not None

    def __getitem__(self, assignment: Assignment) -> Minibatch:
        """Read an assignment.

        Raises:
            ValueError: a sample is not as long as it was when lengths were looked up.
        """
        expected: Sequence[list[int] | None] = assignment.lengths or [None] * len(assignment.microbatches)
        with isolated_rng():
            microbatches = [
                self.read(assignment.epoch, indices, lengths)
                for indices, lengths in zip(assignment.microbatches, expected, strict=True)
            ]
        return Minibatch(microbatches, assignment.weights, assignment.plan)

    def collation(self, lengths: LengthArray) -> Collation | None:
        """What the ``collate_fn`` makes of a microbatch; see `find_collation`. The data set stays as it is.

        Where ``worker_init_fn`` prepares the data set in workers, it may fail here. Then nothing is known.
        """
        try:
            copied = SampleReader(with_own_rng(self._dataset), self._collate, self._seed, None)
        except Exception:  # a data set that refuses copies; this look was not asked for
            return None
        with isolated_rng():
            return find_collation(self._collate, lambda index: copied.samples(0, [index])[0], lengths)

    def read(self, epoch: int, indices: list[int], lengths: list[int] | None = None) -> Any:
        """Read one microbatch; it seeds the global generators."""
        samples = self.samples(epoch, indices)
        if lengths is not None:
            for index, sample, length in zip(indices, samples, lengths, strict=True):
                self._check_length(index, sample, length)
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

    def _check_length(self, index: int, sample: Any, expected: int) -> None:
        assert self._length_of is not None
        found = self._length_of(sample)
        if found != expected:
            raise ValueError(
                f"Sample {index} has length {found}, but had {expected} when the lengths were looked up. If the data "
                "set changed, delete the cached lengths (see BalancedDataLoader(cache_dir=...)); if its samples differ "
                "in length from epoch to epoch, say what to plan with: BalancedDataLoader(dataset, lengths=[...])."
            )


def collate(collate_fn: Collate, samples: list[Any]) -> Any:
    """``collate_fn(samples)``; where torch's default fails on unequal lengths, with a hint."""
    try:
        return collate_fn(samples)
    except RuntimeError as error:
        if collate_fn is default_collate:
            error.add_note(
                "Samples of different lengths cannot be stacked. Pass a collate_fn that pads them, or one that packs "
                "them: BalancedDataLoader(..., collate_fn=lightning_odc.data.packing.pack_samples)."
            )
        raise


def torch_loader(
    source: Any, seed: int, options: WorkerOptions, sampler: Any = None
) -> DataLoader[Minibatch]:
    """A ``DataLoader`` whose items are whole minibatches; its generator seeds workers, so the global one stays.

    Raises:
        MemoryError: host memory does not suffice for its workers.
    """
    _check_memory(options)
    generator = torch.Generator().manual_seed(seed % 2**63)
    return DataLoader(
        source, batch_size=None, sampler=sampler, collate_fn=_as_it_is, generator=generator, **options
    )


def named_deaths(minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
    """Yield the same minibatches. If a worker was killed, the error says whether memory had run out."""
    kills = host_memory.Kills()
    try:
        yield from minibatches
    except (
        RuntimeError,
        OSError,
        EOFError,
    ) as error:  # torch says it, or a connection to the worker breaks first
        is_plain = isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)
        if not is_plain and (verdict := kills.verdict()):
            error.add_note(verdict)
        raise


def _check_memory(options: WorkerOptions) -> None:
    """Refuse more workers than there is memory for, before the kernel ends one of them, or this rank."""
    workers = options.get("num_workers", 0)
    if not workers:
        return
    each = _FORKED_BYTES if _start_method(options) == "fork" else _FRESH_BYTES
    fitting = min(host_memory.available() // each // 2, workers - 1)
    short = host_memory.shortage(
        f"data workers (num_workers={workers}, {each >> 20} MiB each before they read anything)",
        workers * each,
        f"write num_workers={fitting}",
        each=each,
    )
    if short:
        raise MemoryError(short)


def _start_method(options: WorkerOptions) -> str:
    context: Any = options.get("multiprocessing_context") or multiprocessing.get_start_method(allow_none=True)
    context = context or multiprocessing.get_all_start_methods()[0]
    return str(context if isinstance(context, str) else context.get_start_method())


def _as_it_is(minibatch: Any) -> Minibatch:
    return cast(Minibatch, minibatch)
