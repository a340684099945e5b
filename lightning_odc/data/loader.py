"""``BalancedDataLoader``: one rank's share of every minibatch, balanced over ranks.

Lightning replaces every ``torch.utils.data.DataLoader`` by one with its own distributed sampler. In other objects with
a ``sampler`` and a ``dataset``, it replaces the sampler. `BalancedDataLoader` is neither, so Lightning leaves it
alone. It has the other attributes that Lightning looks for: ``__len__``; ``state_dict`` and ``load_state_dict``, saved
with the loops; ``batch_sampler.sampler.set_epoch``, called when an epoch starts; and ``_iterator``, whose workers are
stopped when training ends. Lightning calls ``iter`` before it loads the state and before it sets the epoch, so a pass
begins when its first minibatch is asked for.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from operator import length_hint
from types import SimpleNamespace
from typing import Any, Unpack

import torch.distributed as dist
from torch.utils.data import default_collate

from lightning_odc.arguments import Count, Index, checked
from lightning_odc.balance.arrays import Cap, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.planner import Policy
from lightning_odc.data.arguments import check_stream, check_world
from lightning_odc.data.decision import AS_WRITTEN, Decision, Phase
from lightning_odc.data.gain import Gain, planned_gain
from lightning_odc.data.map_schedule import MapSchedule
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import (
    NOTHING_KNOWN,
    BatchOptions,
    MinibatchPlan,
    Recipe,
    RunFacts,
    Weighting,
    World,
)
from lightning_odc.data.position import Position, Progress
from lightning_odc.data.ran import Ran, ran_of, warn_of_others
from lightning_odc.data.reader import (
    SampleReader,
    WorkerOptions,
    is_stream,
    named_deaths,
)
from lightning_odc.data.stream_schedule import StreamSchedule
from lightning_odc.samples.collation import collation_of
from lightning_odc.samples.lengths import (
    LengthFunction,
    Lengths,
    find_lengths,
    length_function,
)
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.samples.probe import Collate, Probe, first_of_stream, look
from lightning_odc.samples.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.samples.sharing import ALONE, Sharing, content_of
from lightning_odc.words import unknown_names

Schedule = MapSchedule | StreamSchedule


@checked
class BalancedDataLoader:
    """Yields this rank's `Minibatch` of every global minibatch. The work is balanced over ranks.

    A global minibatch is ``minibatch_size`` samples times the number of ranks. Every rank plans it alone, from the
    lengths of its samples, and arrives at the same plan. All ranks yield equally many minibatches.

    Args:
        dataset: A map-style data set, or an ``IterableDataset`` that yields the same samples on every rank.
        minibatch_size: Samples per rank and minibatch, on average over ranks.
        lengths: One number per sample; by default they are found out, see :func:`find_lengths`.
        length_fn: The length of a sample.
        max_tokens: The most tokens in a microbatch, padding included, on any rank. By default the length of the longest
            sample (of a stream: the longest of the minibatch). It falls when a microbatch has run out of memory.
        balance: The policy: ``"lb_mini"``, ``"lb_micro"``, ``"local_sort"`` or ``"steal"``.
        cost: The cost of a sample by its length. ``"auto"`` is the cost of the model. Times that ``ODCStrategy``
            measures show how fast each rank is. Others are those of :func:`lightning_odc.balance.plan_minibatch`.
        weighting: The count of a sample in the gradient: ``"token"`` (its length), ``"next_token"`` (one less, as a
            causal model predicts), or ``"sample"`` (one). ``"label"`` counts the labels of every microbatch, ``"sum"``
            is for a sum. ``"auto"``: a fit tests the loss; elsewhere integer labels are counted, or else tokens.
        collate_fn: Makes a microbatch of a list of samples; by default torch's ``default_collate``.
        packing: Put the samples of a microbatch into one row for a Hugging Face causal model, see `PackingCollator`.
            ``ODCStrategy`` checks before that the model keeps them apart.
        shuffle: Whether every epoch has a new order.
        seed: The seed of the order, and of random numbers in the data set; by default ``seed_everything``'s, or 0.
        drop_last: Leave out the samples that do not fill a last minibatch; otherwise it is smaller.
        window: Number of minibatches of an ``IterableDataset`` that are read ahead, and shuffled if ``shuffle``.
        regroup: Let the minibatches of a window exchange samples, so that large ones share a minibatch, and ranks
            wait less for them; see :func:`lightning_odc.balance.regroup`. Works for map-style data sets, too.
        num_replicas: Number of ranks that share the data; by default those of the process group.
        rank: Number of this rank.
        **workers: ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``timeout``,
            ``worker_init_fn`` and ``multiprocessing_context``, as in torch's ``DataLoader``.

    Attributes:
        dataset: The data set.
        yields_minibatches: Whether it yields `Minibatch`es, and not the batches of another loader.
        phase: What it has to do with a fit.
        decision: What the latest fit has decided.
        run: What is known of that fit.
        minibatches_per_step: The number of minibatches that share an optimizer step.
        world: The number of ranks that share the data, and this one; ``None``: as the process group says.
        progress: How far it is; ``ODCStrategy`` says what is done.

    Raises:
        ValueError: An invalid value, or values that contradict each other.
        LengthsUnknownError: Lengths are needed for the first time, and cannot be found out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        minibatch_size: Count,
        lengths: Any = None,
        length_fn: LengthFunction | None = None,
        max_tokens: Cap = None,
        balance: Policy = "lb_mini",
        cost: Any = "auto",
        weighting: Weighting = "auto",
        collate_fn: Collate | None = None,
        packing: bool = False,
        shuffle: bool = False,
        seed: Index | None = None,
        drop_last: bool = False,
        window: Count | None = None,
        regroup: bool = False,
        num_replicas: Count | None = None,
        rank: Index | None = None,
        **workers: Unpack[WorkerOptions],
    ) -> None:
        *named, _ = inspect.signature(type(self)).parameters
        known = [*named, *WorkerOptions.__annotations__]
        unknown = [name for name in workers if name not in known]
        if unknown:
            raise unknown_names("BalancedDataLoader", unknown, known)
        if seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.options = BatchOptions(
            minibatch_size=minibatch_size,
            max_tokens=max_tokens,
            policy=balance,
            cost=cost,
            weighting=weighting,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            window=1 if window is None else window,
            regroup=regroup,
        )
        self.phase = Phase.ALONE
        self.decision: Decision = AS_WRITTEN
        self.run = NOTHING_KNOWN
        self.minibatches_per_step = 1
        self.world = num_replicas, rank
        self.is_stream = is_stream(dataset)
        self.yields_minibatches = True
        self.worker_init_fn = workers.pop("worker_init_fn", None)  # Lightning may put one here
        self.packing = packing
        self.dataset = dataset
        self._given = lengths
        self._length_fn = length_fn
        self._unpacked = collate_fn or default_collate
        self._probes: dict[bool, Probe] = {}  # of batches that are packed, and of others
        self._workers = workers
        self.progress = Progress()
        self._schedule: Schedule | None = None
        self._resumed: dict[str, Any] = {}  # what had been learnt, until the next pass begins
        self._iterator: Iterator[Minibatch] | None = None
        self._instead: Any = None  # another loader, whose batches are yielded
        self._has_warned = False  # of microbatches that hold other numbers of samples than planned
        self._decide: Callable[[], None] | None = None  # while it waits
        self.sharing: Sharing | None = (
            None  # how ranks share what they read; see Note [Read first, planned then]
        )
        check_world(num_replicas, rank)
        if self.is_stream:
            check_stream(window, lengths, self.options)
        elif window is not None and not regroup:
            raise ValueError(
                "window=... is for an IterableDataset, or together with regroup=True: leave it out."
            )
        elif lengths is not None:
            self.lengths  # noqa: B018 - checked now

    @classmethod
    def of_batches(cls, dataset: Any, *, batch_size: int, batches: int, **options: Any) -> BalancedDataLoader:
        """One whose minibatches have so many batches of a loader of the user's own.

        Args:
            dataset: The loader's.
            batch_size: Samples of a batch of the loader.
            batches: Batches of a minibatch, on each rank.
            **options: Options of `BalancedDataLoader`.
        """
        made = cls(dataset, minibatch_size=batch_size * batches, **options)
        made.options = replace(made.options, batch_size=batch_size)
        return made

    # -- what a fit finds out and decides ----------------------------------------------------------------

    def wait_for(self, decide: Callable[[], None]) -> None:
        """Let a fit decide: it is asked before the next pass. It tells `progress` what is done from now on."""
        if self.phase is Phase.ALONE:  # the fit before may have been of another model
            self.decision = AS_WRITTEN
            self.run = NOTHING_KNOWN
            self._schedule = None
        self.phase = Phase.WAITS
        self._decide = decide
        self.progress.listen(True)

    def join(self, run: RunFacts) -> None:
        """Plan for a run of which this is known, on all ranks."""
        if run != self.run:
            self._schedule = None
        self.run = run

    def follow(self, decision: Decision) -> None:
        """Plan as it was decided from the next step on, on all ranks. In the same fit, caps that fell stay."""
        changes = decision != self.decision
        if changes and self._schedule is not None and self.phase is Phase.FOLLOWS:
            self._resumed = self._schedule.learning.state_dict()
        if changes or self._resumed:  # the next schedule takes it up
            self._schedule = None
        self.decision = decision
        self.phase = Phase.FOLLOWS
        self._decide = None

    def release(self) -> None:
        """The fit is over. Idempotent."""
        self.phase = Phase.ALONE
        self._decide = None
        self.progress.listen(False)
        if self._resumed:  # as above
            self._schedule = None

    def planned_gain(self) -> Gain | None:
        """What plans gain over batches as they come; ``None`` for a stream."""
        schedule = self._prepare()
        if isinstance(schedule, StreamSchedule):
            return None
        size = self.options.samples_per_batch
        in_order = self.lengths.values[schedule.epochs.order(0)]
        in_order = in_order[in_order > 0]
        as_they_come = self._find_collation(packs=False) or PACKED
        return planned_gain(in_order, size, self.options.batches, schedule.epochs.planner, as_they_come)

    def stand_aside(self, loader: Any) -> None:
        """Yield the batches of another loader instead; before the first one."""
        self._instead = loader
        self.yields_minibatches = False

    def probe(self) -> Probe:
        """A few samples, and what `collate` makes of them. The data set stays as it is.

        Of a stream, the samples are those of the first minibatches; one that can be read only once is refused.
        """
        if not self.is_stream:
            return self._probe(self.packs, with_samples=True)
        dataset = with_own_rng(self.dataset)
        with isolated_rng():
            seed_rng(self.options.seed)
            first = first_of_stream(dataset, self.options.minibatch_size * 2)
            if self._length_fn is None:  # plans are made by the same
                self._length_fn = length_function(first.__getitem__, len(first), self._unpacked)
            lengths = as_lengths([self._length_fn(sample) for sample in first])
        return look(first.__getitem__, lengths, self.collate)

    # -- what is known before it is read ------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """How samples become minibatches: the options, and what was decided."""
        return Recipe(self.options, self.decision, self.run)

    @property
    def learns(self) -> bool:
        """Whether measured times change plans."""
        return self._prepare().learning.cost is not None

    @property
    def memory_values(self) -> dict[str, float]:
        """What `DeviceIdleMonitor` logs of the memory of microbatches, by name."""
        return {} if self._schedule is None else self._schedule.learning.values()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens in a microbatch; ``None``: the longest sample of a minibatch."""
        return self._prepare().max_tokens

    @property
    def collate(self) -> Collate:
        """What makes a microbatch of samples."""
        return self._collate_fn(self.packs)

    @property
    def collation(self) -> Collation | None:
        """What `collate` was found to make of a microbatch; ``None``: not known, and taken for packing."""
        if self.is_stream:
            return None
        return self._find_collation(self.packs)

    @property
    def packs(self) -> bool:
        """Whether samples are packed."""
        return self.packing and not self.recipe.is_whole

    def _collate_fn(self, packs: bool) -> Collate:
        return PackingCollator(self._unpacked) if packs else self._unpacked

    def _find_collation(self, packs: bool) -> Collation | None:
        with suppress(Exception):  # where only workers can read samples; this look was not asked for
            return collation_of(self._probe(packs))
        return None

    def _probe(self, packs: bool, with_samples: bool = False) -> Probe:
        """A look at a few samples of a map-style data set, which stays as it is; and the samples if they are needed."""
        known = self._probes.get(packs)
        if known is not None and (known.samples or not with_samples):
            return known
        collate_fn = self._collate_fn(packs)
        reader = SampleReader(with_own_rng(self.dataset), collate_fn, self.options.seed)
        found = look(lambda index: reader.samples(0, [index])[0], self.lengths.values, collate_fn)
        self._probes.setdefault(packs, found)
        return found

    @cached_property
    def lengths(self) -> Lengths:
        """The length of every sample of a map-style data set; found out at the first use."""
        dataset = with_own_rng(self.dataset)
        sharing = self.sharing
        context: Any = self._workers.get("multiprocessing_context") or multiprocessing
        method = getattr(context, "get_start_method", lambda: context)
        pickles = bool(self._workers.get("num_workers")) and method() != "fork"
        # Which samples are in a minibatch depends on lengths; or workers could not get what measures them.
        if self.options.regroup or (pickles and self._length_fn and content_of(self._length_fn) is None):
            sharing = None
        return find_lengths(dataset, self._given, self._length_fn, self._unpacked, sharing)

    def plan(self, step: int, epoch: int | None = None) -> MinibatchPlan:
        """Who does what in a minibatch of a map-style data set; with ``cost="auto"`` by what was measured until now.

        Args:
            step: The number of the minibatch in its epoch.
            epoch: The number of the epoch; by default the one under way.
        """
        if epoch is None:
            epoch = self.progress.latest.epoch
        schedule = self._prepare()
        if isinstance(schedule, StreamSchedule):
            raise TypeError("An IterableDataset is planned as it is read: no plan can be asked for.")
        _, known = schedule.learning.known[-1]
        return schedule.epochs.plan(epoch, step, *known)

    # -- what it yields -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Minibatches per epoch; the same on all ranks.

        Raises:
            TypeError: the data set is a stream without a length.
        """
        if self._instead is not None:
            return len(self._instead)
        return len(self._prepare())

    def __iter__(self) -> Iterator[Minibatch]:
        if self._instead is not None:
            yield from self._instead
            return
        if self.phase is Phase.WAITS:
            assert self._decide is not None
            self._decide()
        schedule = self._prepare()
        position = self.progress.begin(schedule.order, length_hint(schedule))
        epoch = position.epoch
        while position.epoch == epoch:  # until it ends
            position = yield from self._planned(position)
        self.progress.ends(epoch)

    def _planned(self, start: Position) -> Generator[Minibatch, None, Position]:
        """What one schedule yields; returns where the next one begins, or the next epoch."""
        schedule = self._prepare()
        self._resumed = {}
        for packs, probe in self._probes.items():
            self._probes[packs] = replace(probe, samples=[])
        # Minibatches that are planned before the current one has run. In a stream, Lightning may look one ahead.
        ahead = 1
        if not self.is_stream:
            ahead = self._workers.get("num_workers", 0) * (self._workers.get("prefetch_factor") or 2)
        per_step = self.minibatches_per_step
        schedule.learning.lag = per_step + ahead
        options = WorkerOptions(worker_init_fn=self.worker_init_fn, **self._workers)
        alive = self._iterator is not None  # Lightning stops kept workers by the iterator, and takes it away
        arriving = self._iterator = iter(schedule.loader(start.epoch, start.minibatches, options, alive))
        try:
            for done, arrived in enumerate(named_deaths(arriving), start.minibatches):
                minibatch = arrived
                if isinstance(schedule, MapSchedule):
                    minibatch = schedule.completed(arrived, done)
                origin = minibatch.origin
                assert origin is not None
                origin.number = schedule.learning.begin_minibatch()
                origin.learning = schedule.learning
                self._has_warned = self._has_warned or warn_of_others(origin)
                after = Position(start.epoch, done + 1)
                self.progress.yields(after)
                yield minibatch
                # What was read ahead by a schedule that is no longer right is dropped, between two steps.
                if self._schedule is not schedule and after.minibatches % per_step == 0:
                    return after
        finally:
            if self._iterator is arriving and not self._workers.get("persistent_workers"):
                self._iterator = None
        return Position(start.epoch + 1)

    def _prepare(self) -> Schedule:
        """The schedule for what is known, and the ranks there are now. It holds what was learnt, too, so it stays."""
        world = current_world(*self.world)
        if self._schedule is None or self._schedule.world != world:
            self._schedule = self._new_schedule(world)
            if self.phase is not Phase.WAITS:  # else what was learnt is compared when all is decided
                self._schedule.learning.load_state_dict(self._resumed)
        return self._schedule

    def _new_schedule(self, world: World) -> Schedule:
        recipe = self.recipe
        if self.is_stream:
            if self._workers.get("num_workers"):  # a worker that plans is not told how long microbatches took
                recipe = replace(recipe, run=replace(self.run, measured=False))
            return StreamSchedule(self.dataset, self.collate, self._length_fn, recipe, world)
        recipe = replace(recipe, collation=self.collation or PACKED)
        measured = None
        if self.lengths.is_checked or not self.lengths.are_complete:
            measured = self.lengths
        reader = SampleReader(self.dataset, self.collate, self.options.seed, measured)
        ran = Ran()
        if not recipe.counts_alike:
            with suppress(Exception):  # as above
                ran = ran_of(self._probe(self.packs))
        return MapSchedule(reader, ran, self.lengths, recipe, world, self.sharing or ALONE)

    def find_place(self) -> Position:
        """Where the next pass begins after `load_state_dict`, in minibatches of the size there is now."""
        self.progress.translate(self._prepare().order)
        return self.progress.latest

    # -- where it is --------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of ``epoch``. Without it, passes are epochs 0, 1, 2 and so on."""
        self.progress.set_epoch(epoch)
        sampler = getattr(self._instead, "sampler", None)
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and what was learnt; see Note [Done with its step]."""
        order = None
        if self.progress.latest.minibatches:
            order = self._prepare().order
        state = self.progress.state(order)
        memory = {} if self._schedule is None else self._schedule.learning.state_dict()
        if memory:
            state["memory"] = memory
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass where the state was taken; it is compared with data and settings when the pass begins."""
        self.progress.load(state_dict)
        self._resumed = state_dict.get("memory", {})
        if self._resumed:
            self._schedule = None
            self._prepare()


def current_world(num_replicas: int | None, rank: int | None) -> World:
    """Number of ranks and own rank: as given, else of the process group, else as ``torchrun`` says, else 1 and 0."""
    if num_replicas is not None and rank is not None:
        return num_replicas, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return 1, 0
