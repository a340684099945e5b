"""Reads one rank's part of every minibatch: of a map-style data set (`MapReading`), or of a stream (`StreamReading`).

A minibatch of a map-style data set takes three steps. `MapReading.__iter__` plans it, as early as torch's
``DataLoader`` reads ahead, and hands out this rank's `Assignment`. A `SampleReader` reads the samples and makes a
`Minibatch`. When that arrives, `MapReading.completed` adds what only the plan knows.

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
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_odc import host_memory
from lightning_odc.balance import LearntCost, epoch_order
from lightning_odc.balance.arrays import Caps, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.data.collation import find_collation
from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthArray, LengthFunction, Lengths, check_longest, plain
from lightning_odc.data.minibatch import AllRanks, Detail, Minibatch, Samples, Task
from lightning_odc.data.plan import BatchOptions, EpochPlan, MinibatchPlan, RunInfo
from lightning_odc.data.rng import RandomState, isolated_rng, seed_rng, with_own_rng

Collate = Callable[[list[Any]], Any]
World = tuple[int, int]
"""The number of ranks that share a minibatch, and this rank."""


class WorkerOptions(TypedDict, total=False):
    """Arguments of ``torch.utils.data.DataLoader`` about the processes that read samples, with torch's defaults."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any


class MapReading:
    """Plans minibatches of a map-style data set; also the sampler of the ``DataLoader`` that reads."""

    def __init__(
        self,
        reader: SampleReader,
        lengths: Lengths,
        options: BatchOptions,
        info: RunInfo,
        world: World,
        unroll: bool,
    ) -> None:
        self.collation = reader.collation(lengths.values)  # `None`: not known, and taken for packing
        info = replace(info, collation=self.collation or PACKED)
        self.epochs = EpochPlan(lengths, options, world[0], info)
        cap = None if unroll or info.repeats else self.epochs.delayed_cap()
        self.learning = Learning(options.delayed_cost(*world, info), cap)
        self.order = Order(
            f"{options.order}{', as DistributedSampler' * options.shuffle}, lengths {lengths.digest}",
            self.epochs.samples_per_minibatch,
            options.batches,
        )
        self.world = world
        self._rank = world[1]
        self._unroll = unroll  # weights are relative to the mean over the minibatch
        self._reader = reader
        self._begin = 0, 0  # epoch and first minibatch of the next pass
        # By number: the minibatches that were handed out to be read and have not arrived.
        self._under_way: dict[int, tuple[MinibatchPlan, LearntCost | None]] = {}
        self._with_workers: DataLoader[Minibatch] | None = None  # where they are kept from pass to pass
        self._counted: tuple[int, int] | None = None  # epoch and its microbatches

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return len(self.epochs)

    @property
    def max_tokens(self) -> Caps:
        """The most tokens in a microbatch, by what is known now."""
        cap = self.learning.cap
        return self.epochs.planner.max_tokens if cap is None else cap.value

    def count_microbatches(self, epoch: int) -> int:
        """Microbatches per rank in an epoch, where all ranks have equally many. Plans the whole epoch, once."""
        if self._counted is None or self._counted[0] != epoch:
            assert self.epochs.options.equal_counts
            plans = (self.epochs.plan(epoch, step) for step in range(len(self)))
            self._counted = epoch, sum(len(plan.microbatches[0]) for plan in plans)
        return self._counted[1]

    def plan_now(self, epoch: int, step: int) -> MinibatchPlan:
        """The plan of a minibatch by what has been learnt until now."""
        cost, cap = self.learning.cost, self.learning.cap
        learnt = None if cost is None else cost.cost.snapshot()
        return self.epochs.plan(epoch, step, learnt, None if cap is None else cap.value)

    def loader(
        self, epoch: int, first: int, options: WorkerOptions, reuse_workers: bool
    ) -> DataLoader[Minibatch]:
        """Minibatches of an epoch for this rank, from number ``first`` on; by kept workers if they are still alive."""
        self._begin = epoch, first
        if self._with_workers is not None and reuse_workers:
            return self._with_workers
        # A proxy: in a circle of references, workers that are kept would live until the garbage collector comes.
        sampler = weakref.proxy(self)
        loader = torch_loader(self._reader, self.epochs.options.seed + epoch, options, sampler)
        self._with_workers = loader if options.get("persistent_workers") else None
        return loader

    def __iter__(self) -> Iterator[Assignment]:
        """What this rank reads of each minibatch; runs ahead of training by what the ``DataLoader`` prefetches."""
        epoch, first = self._begin
        self._under_way.clear()
        cost, cap = self.learning.cost, self.learning.cap
        begun = max(0 if part is None else part.begun for part in (cost, cap))
        for number, step in enumerate(range(first, len(self)), begun):
            learnt = None if cost is None else cost.at(number)
            plan = self.epochs.plan(epoch, step, learnt, None if cap is None else cap.at(number))
            self._under_way[step] = plan, learnt
            own = plan.microbatches[self._rank]
            lengths = [self.epochs.lengths.of(m) for m in own] if self._reader.length_of is not None else None
            yield Assignment(epoch, own, plan.weights_of(self._rank, self._unroll), plan.text, lengths)

    def completed(self, minibatch: Minibatch, step: int) -> Minibatch:
        """A minibatch that has arrived, with what only its plan knows; under ``policy="steal"`` about all ranks."""
        (plan, learnt), epoch = self._under_way.pop(step), self._begin[0]
        details = [self._detail(epoch, own) for own in plan.microbatches[self._rank]]
        minibatch.origin = self.epochs.options.origin(details).counted(self.learning.cost, self.learning.cap)
        if self.epochs.options.policy == "steal" and self.epochs.num_replicas > 1:

            def fetch(rank: int, number: int) -> Any:
                return self.read(epoch, plan.microbatches[rank][number])

            of_all = [[self._detail(epoch, own) for own in of_rank] for of_rank in plan.microbatches]
            minibatch.all_ranks = AllRanks(self.epochs.costs(plan, learnt), plan.weights, fetch, of_all)
        return minibatch

    def _detail(self, epoch: int, indices: list[int]) -> Detail:
        options = self.epochs.options
        lengths = self.epochs.planner.collation.rows(self.epochs.lengths.of(indices))
        # Nothing may cut what stays whole.
        samples = None if options.whole else Samples(indices, partial(self._part, epoch, indices))
        return Detail(lengths, (options.seed, epoch, indices[0], 1), samples)

    def _part(self, epoch: int, whole: list[int], indices: list[int]) -> Task:
        """Some samples of a microbatch, with their part of its weight."""
        weights = self.epochs.options.sample_weights(self.epochs.lengths.values[whole])
        weight = float(weights[[whole.index(index) for index in indices]].sum())
        return Task(self.read(epoch, indices), weight, self._detail(epoch, indices))

    def read(self, epoch: int, microbatch: Sequence[int]) -> Any:
        """Any microbatch, from the indices of its samples."""
        with isolated_rng():
            return self._reader.read(epoch, list(microbatch))


@dataclass(frozen=True)
class Assignment:
    """One rank's part of a minibatch, before its samples are read."""

    epoch: int  # the epoch it belongs to
    microbatches: list[list[int]]  # lists of sample indices
    weights: list[float]  # one per microbatch
    plan: str  # text that is equal on all ranks
    # what the samples' lengths must be, in the same form, if that is to be checked
    lengths: list[list[int]] | None = None


class SampleReader:
    """Turns an `Assignment` into a `Minibatch`; what ``DataLoader`` calls its data set."""

    # A worker has a copy of it, and nothing else. With ``persistent_workers`` that lives for all passes, so nothing
    # changes here between passes.
    def __init__(
        self, dataset: Any, collate_fn: Collate, seed: int, length_of: LengthFunction | None = None
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self.length_of = length_of  # where samples are compared with their assigned lengths

    def __getitem__(self, assignment: Assignment) -> Minibatch:
        """Read an assignment."""
        expected: Sequence[list[int] | None] = assignment.lengths or [None] * len(assignment.microbatches)
        with isolated_rng():
            microbatches = [
                self.read(assignment.epoch, indices, lengths)
                for indices, lengths in zip(assignment.microbatches, expected, strict=True)
            ]
        return Minibatch(microbatches, assignment.weights, assignment.plan)

    def collation(self, lengths: LengthArray) -> Collation | None:
        """What the ``collate_fn`` makes of a microbatch, see `find_collation`; ``None`` where only workers can read."""
        try:
            copied = SampleReader(with_own_rng(self._dataset), self._collate, self._seed)
        except Exception:  # a data set that refuses copies; this look was not asked for
            return None
        with isolated_rng():
            return find_collation(self._collate, lambda index: copied.samples(0, [index])[0], lengths)

    def read(self, epoch: int, indices: list[int], lengths: list[int] | None = None) -> Any:
        """Read one microbatch; it seeds the global generators."""
        samples = self.samples(epoch, indices)
        for index, sample, length in zip(indices, samples, lengths or (), strict=lengths is not None):
            if self.length_of is not None and (found := self.length_of(sample)) != length:
                raise ValueError(
                    f"Sample {index} has length {found}, but had {length} when the lengths were looked up. If samples "
                    "differ in length from epoch to epoch, say what to plan with: BalancedDataLoader(dataset, "
                    "lengths=[...])."
                )
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


# -- streams ----------------------------------------------------------------------------------------------


class StreamReading(IterableDataset[Minibatch]):
    """One rank's part of the minibatches of a stream; what ``DataLoader`` calls its data set."""

    # It has the attributes of a `MapReading`. As many minibatches as the window says are read ahead, and shuffled among
    # each other if the options say so. A cost that learns is `None` unless this runs in the process that trains.

    collation: Collation | None = None

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        length_of: LengthFunction,
        options: BatchOptions,
        info: RunInfo,
        world: World,
        unroll: bool,
    ) -> None:
        self.world = world
        self._num_replicas, self._rank = world
        self._size = options.minibatch_size * self._num_replicas
        self.learning = Learning(options.delayed_cost(*world, info))
        self.order = Order(options.order, self._size, options.batches)
        self.max_tokens = options.max_tokens
        self._dataset = dataset
        self._collate = collate_fn
        self._length_of = length_of
        self._options = options
        self._info = info
        self._unroll = unroll
        self._begin = 0, 0  # epoch, and the first minibatch to yield; those before it are read and dropped

    def __len__(self) -> int:
        """Minibatches per epoch, if the data set has a length; else ``TypeError``."""
        return self._options.count_minibatches(len(self._dataset), self._num_replicas)

    def count_microbatches(self, epoch: int) -> int:
        """Refused: it would have to be read."""
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
        one_pass = copy.copy(self)
        one_pass._begin = epoch, first
        return torch_loader(one_pass, self._options.seed + epoch, options)

    def completed(self, minibatch: Minibatch, step: int) -> Minibatch:
        """A minibatch that has arrived, counted."""
        assert minibatch.origin is not None
        minibatch.origin.counted(self.learning.cost)
        return minibatch

    def __iter__(self) -> Iterator[Minibatch]:
        """Read a window, cut it into minibatches of all ranks, and yield this rank's part of each."""
        epoch, first = self._begin
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        options, info, step = self._options, self._info, 0
        for samples in self._windows(epoch, options.window * self._size):
            try:
                found = [plain(self._length_of(sample)) for sample in samples]
                lengths = as_lengths(found, "the stream's samples")
                if step == 0:
                    info = replace(info, collation=self._find_collation(epoch, samples, lengths))
                if info.collation.fixed is None:  # else the collate_fn cuts what is longer
                    check_longest(lengths, options.max_tokens)
            except ValueError as error:
                error.add_note(
                    f"Samples are counted from minibatch {step} of the stream, where a window begins."
                )
                raise
            for group in options.minibatches(lengths, self._num_replicas):
                used = group[: options.count_samples(len(group), self._num_replicas)]
                if len(used) and step >= first:
                    own = [samples[index] for index in used]
                    yield self._minibatch(epoch, step, own, lengths[used], info)
                step += 1

    def _windows(self, epoch: int, size: int) -> Iterator[list[Any]]:
        """The samples of one window after another, of all ranks."""
        with isolated_rng():
            seed_rng(self._options.seed, epoch)
            source, rng = iter(self._dataset), RandomState()
        for number in count():
            with rng.active():
                window = list(islice(source, size))
            if window and self._options.shuffle:  # one order per epoch and window
                order = epoch_order(len(window), self._options.seed, epoch << 32 | number)
                yield [window[index] for index in order]
            elif window:
                yield window
            if len(window) < size:
                return

    def _find_collation(self, epoch: int, samples: list[Any], lengths: LengthArray) -> Collation:
        with isolated_rng():
            seed_rng(self._options.seed, epoch)
            collation = find_collation(self._collate, samples.__getitem__, lengths) or PACKED
        if self.learning.cost is not None and collation.kind != "packed":
            self.learning.cost.keep_apart()
        return collation

    def _minibatch(
        self, epoch: int, step: int, samples: list[Any], lengths: LengthArray, info: RunInfo
    ) -> Minibatch:
        """This rank's part of a minibatch of these samples."""
        options, cost = self._options, self.learning.cost
        learnt = None if cost is None else cost.at(cost.begun)
        name = options.name(epoch, step, Lengths(lengths, "samples"))
        planner = options.planner(self._num_replicas, lengths, info)
        indices = np.arange(len(lengths), dtype=np.int64)
        plan = MinibatchPlan.of(options, planner, indices, lengths, name, learnt, epoch + step)
        microbatches, details = [], []
        with isolated_rng():
            for own in plan.microbatches[self._rank]:
                seed = options.seed, epoch, step, own[0]
                seed_rng(*seed)
                microbatches.append(collate(self._collate, [samples[index] for index in own]))
                details.append(Detail(info.collation.rows(lengths[own]), (*seed, 1)))
        minibatch = Minibatch(microbatches, plan.weights_of(self._rank, self._unroll), plan.text)
        minibatch.origin = options.origin(details)
        return minibatch


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


# -- the processes that read ahead: torch's ``DataLoader``, whose items are whole minibatches --------------


def check_workers(options: WorkerOptions) -> None:
    """Let torch refuse options that do not go together, before anything is read."""
    nothing: Any = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns again when the loader is really made
        DataLoader[Any](nothing, **options)


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
        if not is_plain and (verdict := kills.verdict()):
            error.add_note(verdict)
        raise


class Position(NamedTuple):
    """What has been yielded."""

    epoch: int = 0  # the epoch that is under way
    minibatches: int = 0  # the number of its minibatches that are done
    microbatches: int = 0  # those done of the next minibatch, where they are yielded one by one

    @property
    def started(self) -> bool:
        """Whether anything of the epoch is done."""
        return self.minibatches > 0 or self.microbatches > 0


class Order(NamedTuple):
    """What a position refers to."""

    order: str  # text that is equal where samples come in the same order
    samples_per_minibatch: int  # samples of a minibatch on all ranks together
    batches: int = 1  # batches of the user's loader in a minibatch, see Note [Folded accumulation]


class Progress:
    """Decides where the next pass begins: where `set_epoch` or `load` put it, else an epoch after the pass before."""

    def __init__(self) -> None:
        self.latest = Position()  # up to where all has been yielded: what a checkpoint taken now must have
        self._next: Position | None = None
        self._saved: Order | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of ``epoch``; inside it, if a loaded position waits for that very epoch."""
        if self._next is None and self.latest.microbatches and epoch > self.latest.epoch:
            warnings.warn(
                f"Epoch {self.latest.epoch} ended inside a minibatch, without its optimizer step. With unroll=True "
                "every epoch has its own number of microbatches: write Trainer(reload_dataloaders_every_n_epochs=1).",
                stacklevel=2,
            )
        if self._next is None or self._next.epoch != epoch:
            self._next = self.latest = Position(epoch)

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where `state` was taken."""
        self._next = self.latest = Position(state["epoch"], state["minibatches"], state["microbatches"])
        self._saved = Order(*(state[name] for name in Order._fields)) if "order" in state else None

    def state(self, order: Order | None = None) -> dict[str, Any]:
        """What `load` takes; with the order of samples if anything of the epoch is done."""
        return {**self.latest._asdict(), **({} if order is None else order._asdict())}

    def begin(self, order: Order, minibatches: int) -> Position:
        """Where the pass that begins now begins; ``minibatches`` of an epoch, 0 where that is not known."""
        if self._next is not None:
            self.latest, self._next = self._next, None
        elif self.latest.started:
            self.latest = Position(self.latest.epoch + 1)
        if 0 < minibatches <= self.latest.minibatches:
            self.latest = Position(self.latest.epoch + 1)
        saved, self._saved = self._saved, None
        if saved is not None and self.latest.started:
            self.latest = translated(self.latest, saved, order)
        return self.latest


def translated(start: Position, saved: Order, now: Order) -> Position:
    """A saved position, in minibatches of the size there is now."""
    if saved.order != now.order:
        raise ValueError(
            "The loader's state was saved in the middle of an epoch in which samples come in another order "
            f"({saved.order}) than here ({now.order}). Use the same data set, seed, shuffle and window, or resume from "
            "a checkpoint saved at the end of an epoch."
        )
    if saved.batches != now.batches:
        raise ValueError(
            f"The checkpoint was saved in the middle of an epoch with accumulate_grad_batches={saved.batches}, and now "
            f"it is {now.batches}: Lightning counts optimizer steps of another size. Write "
            f"Trainer(accumulate_grad_batches={saved.batches}), or resume from a checkpoint saved at the end of an "
            "epoch."
        )
    if saved == now:
        return start
    warnings.warn(
        f"The loader's state was saved with {saved.samples_per_minibatch} samples per minibatch on all ranks, now "
        f"there are {now.samples_per_minibatch}: it goes on at the next minibatch that repeats no sample. "
        "Lightning's count of batches cannot follow; resume from a checkpoint saved at the end of an epoch instead.",
        stacklevel=2,
    )
    begun = start.minibatches + (start.microbatches > 0)
    return Position(start.epoch, math.ceil(begun * saved.samples_per_minibatch / now.samples_per_minibatch))
