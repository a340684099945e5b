"""``BalancedDataLoader``: one rank's share of every minibatch, balanced over ranks.

Lightning replaces every ``torch.utils.data.DataLoader`` by one with its own distributed sampler. In other objects with
a ``sampler`` and a ``dataset``, it replaces the sampler. `BalancedDataLoader` is neither, so Lightning leaves it
alone. It has the other attributes that Lightning looks for: ``__len__``; ``state_dict`` and ``load_state_dict``, saved
with the loops; ``batch_sampler.sampler.set_epoch``, called when an epoch starts; and ``_iterator``, whose workers are
stopped when training ends. Lightning calls ``iter`` before it loads the state and before it sets the epoch, so a pass
begins when its first minibatch is asked for.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from operator import length_hint
from types import SimpleNamespace
from typing import Any, Literal, Unpack

import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate

from lightning_odc.balance.arrays import Caps, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.data.gain import Gain, planned_gain
from lightning_odc.data.lengths import (
    LengthFunction,
    Lengths,
    check_longest,
    find_lengths,
    measure,
    plain,
)
from lightning_odc.data.minibatch import Microbatch, Minibatch
from lightning_odc.data.packing import PackingCollator, packs
from lightning_odc.data.plan import NOTHING_KNOWN, BatchOptions, MinibatchPlan, RunInfo, Weighting
from lightning_odc.data.reading import (
    Collate,
    MapReading,
    Position,
    Progress,
    SampleReader,
    StreamReading,
    WorkerOptions,
    World,
    check_workers,
    named_deaths,
)
from lightning_odc.data.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.data.split import TrialSamples, spread_out
from lightning_odc.data.weighting import Rule

Reading = MapReading | StreamReading
Packing = bool | Literal["auto"]


class BalancedDataLoader:
    """Yields this rank's `Minibatch` of every global minibatch. The work is balanced over ranks.

    A global minibatch is ``minibatch_size`` samples times the number of ranks. Every rank plans it alone, from the
    lengths of its samples, and arrives at the same plan. All ranks yield equally many minibatches.

    Args:
        dataset: A map-style data set, or an ``IterableDataset`` that yields the same samples on every rank.
        minibatch_size: Samples per rank and minibatch, on average over ranks.
        lengths: One number per sample, or a row of numbers for each, for example text tokens and image patches;
            by default they are found out, see :func:`find_lengths`.
        length_fn: The length of a sample, or a tuple of numbers.
        max_tokens: The most tokens in a microbatch, padding included. A list has one number for each rank, for devices
            with different memory. By default the length of the longest sample (of a stream: the longest of the
            minibatch). For rows of numbers, a cap is a tuple with one for each: ``(4096, 512)``, or a list of tuples.
            Every cap falls when a microbatch has run out of memory.
        policy: ``"lb_mini"``, ``"lb_micro"``, ``"local_sort"`` or ``"steal"``.
        cost: The cost of a sample by its length. ``"auto"`` is the cost of the model, until times that ``ODCStrategy``
            measures refute it. ``"fitted"`` is learnt from these times from the beginning, for each rank. Others are
            those of :func:`lightning_odc.balance.plan_minibatch`.
        weighting: The count of a sample in the gradient: ``"token"`` (its length), ``"next_token"`` (one less, as a
            causal model predicts), ``"sample"`` (one), or a function from an array of lengths to one of weights.
            ``"label"`` counts the labels of every microbatch, ``"sum"`` is for a loss that is a sum. ``"auto"``:
            ``ODCStrategy`` tries the loss and finds out; elsewhere labels are counted if a batch has integer ones, and
            tokens otherwise. With ``unroll`` weights are planned before labels are read, so ``"auto"`` is
            ``"next_token"`` if the collator packs and ``"token"`` if not. That is an estimate if labels are masked, or
            if padded rows shift theirs.
        collate_fn: Makes a microbatch of a list of samples; by default torch's ``default_collate``.
        packing: Put the samples of a microbatch into one row for a Hugging Face causal model, see `PackingCollator`:
            ``True``, or ``"auto"``, which packs if ``ODCStrategy`` finds that the model keeps them apart and that it is
            faster.
        shuffle: Whether every epoch has a new order.
        seed: The seed of the order, and of random numbers in the data set; by default ``seed_everything``'s, or 0.
        drop_last: Leave out the samples that do not fill a last minibatch; otherwise it is smaller.
        unroll: Yield every `Microbatch` by itself, for strategies that do not support a `Minibatch`.
        window: Number of minibatches of an ``IterableDataset`` that are read ahead, and shuffled if ``shuffle``.
        regroup: Let the minibatches of a window exchange samples, so that large ones meet and ranks wait less for
            them; see :func:`lightning_odc.balance.regroup`. Works for map-style data sets, too.
        num_replicas: Number of ranks that share the data; by default those of the process group.
        rank: Number of this rank.
        **workers: ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``timeout``,
            ``worker_init_fn`` and ``multiprocessing_context``, as in torch's ``DataLoader``.

    Attributes:
        yields_minibatches: Whether it yields `Minibatch`es, and not `Microbatch`es.
        minibatches_per_step: Number of minibatches per optimizer step; set by ``ODCStrategy`` and used by a cost that
            learns.

    Raises:
        ValueError: An invalid value, or values that contradict each other.
        LengthsUnknownError: Lengths are needed for the first time, and cannot be found out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        minibatch_size: int,
        lengths: Any = None,
        length_fn: LengthFunction | None = None,
        max_tokens: Caps = None,
        policy: str = "lb_mini",
        cost: Any = "auto",
        weighting: Weighting = "auto",
        collate_fn: Collate | None = None,
        packing: Packing = False,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        unroll: bool = False,
        window: int | None = None,
        regroup: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        **workers: Unpack[WorkerOptions],
    ) -> None:
        *named, _ = inspect.signature(type(self)).parameters
        known = [*named, *WorkerOptions.__annotations__]
        unknown = [name for name in workers if name not in known]
        if unknown:
            raise TypeError(" ".join(did_you_mean("BalancedDataLoader", name, known) for name in unknown))
        if packing not in (True, False, "auto"):
            raise ValueError(f'packing={packing!r} is unknown: write packing=True, False or "auto".')
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        windows = 1 if window is None else window
        counted = minibatch_size, max_tokens, policy, cost, weighting
        self.options = BatchOptions(*counted, shuffle, seed, drop_last, windows, regroup)
        self.asked_weighting: Weighting = weighting  # that of the options may be what a trial has found
        self.unroll = unroll
        self.yields_minibatches = not unroll
        self.minibatches_per_step = 1
        self.worker_init_fn = workers.pop("worker_init_fn", None)  # Lightning may put one here
        self.packing: Packing = packing
        self._samples = dataset
        self._given = lengths
        self._length_fn = length_fn
        self._unpacked = collate_fn or default_collate
        self._packs = packing is True
        self._packing_asked: tuple[bool, RunInfo] | None = None  # what the choice was made for
        self._world = num_replicas, rank
        self._workers = workers
        self._progress = Progress()
        self._info = NOTHING_KNOWN
        self._reading: Reading | None = None
        self._iterator: Iterator[Minibatch] | None = None
        self._instead: Any = None  # another loader, whose batches are yielded
        check_world(num_replicas, rank)
        check_workers(workers)
        if unroll:
            _check_unroll(self.options)
        if self.is_stream:
            _check_stream(window, lengths, self.options, workers.get("num_workers", 0))
        elif window is not None and not regroup:
            raise ValueError(
                "window=... is for an IterableDataset, or together with regroup=True; leave it out, this data set can "
                "be indexed."
            )
        elif lengths is not None:
            self.lengths  # noqa: B018 - checked now

    # -- what a strategy finds out ------------------------------------------------------------------------

    def adapt(self, info: RunInfo, begins: bool = True) -> None:
        """Take over what a strategy knows; the same on all ranks, and before the first minibatch."""
        self.minibatches_per_step = info.minibatches_per_step
        cap = None if self._reading is None else self._reading.learning.cap
        # A fit that begins may be of another model, of whose memory nothing is known.
        if info != self._info or (begins and cap is not None and cap.ran_out):
            self._info, self._reading = info, None

    def share_among(self, num_replicas: int, rank: int) -> None:
        """Share the data among groups of ranks, of which this rank is in the group ``rank``."""
        self._world = num_replicas, rank

    def choose_packing(self, keeps_apart: bool) -> bool:
        """Pack under ``packing="auto"`` if plans then take less time; returns whether samples are packed now."""
        asked = keeps_apart, self._info
        if self.packing == "auto" and self._packing_asked != asked:
            self._packing_asked = asked
            packed = self._planned_time(packs=True) if keeps_apart else math.inf
            self._packs = packed < self._planned_time(packs=False)
            self._reading = None
        return self._packs

    def _planned_time(self, packs: bool) -> float:
        """The time of balanced minibatches by their cost; infinity where it is not known, or samples do not pack."""
        self._packs, self._reading = packs, None
        try:
            gain = self.planned_gain(self.options.batches)
        except ValueError:
            if not packs:
                raise
            return math.inf  # a sample that only fits where the user's own collate_fn cuts it
        return math.inf if gain is None or (packs and self.collation is None) else gain.balanced

    def count_by(self, rule: Rule | None) -> None:
        """Let microbatches count what a trial of the loss has found, or as asked; before the first minibatch."""
        weighting: Any = self.asked_weighting
        if rule is not None:
            is_counted = rule.counter is not None or rule.weighting == "num_items"
            weighting = "token" if is_counted else rule.weighting
        self._change(weighting=weighting, counter=rule and rule.counter, whole="")

    def keep_whole(self, movable: bool) -> None:
        """Leave the user's own batches whole, before the first minibatch; ``movable``: ranks may swap them."""
        policy = self.options.policy if self.options.equal_counts else "lb_micro"
        self.packing = self._packs = False
        self._change(policy=policy, whole="movable" if movable else "fixed")

    def _change(self, **changes: Any) -> None:
        options = replace(self.options, **changes)
        if options != self.options:
            self.options, self._reading = options, None

    def stand_aside(self, loader: Any) -> None:
        """Yield the batches of another loader instead; before the first one."""
        self._instead, self.yields_minibatches = loader, False

    def trial_samples(self) -> TrialSamples:
        """What a loss is tried with; the data set stays as it is. refuses a stream that can be read only once."""
        dataset = with_own_rng(self._samples)
        with isolated_rng():
            if self.is_stream:
                seed_rng(self.options.seed)
                stream = iter(dataset)
                if stream is dataset or stream is iter(dataset):
                    raise ValueError("the stream can be read only once")
                read = list(islice(stream, self.options.minibatch_size * 2))
                lengths = as_lengths([plain((self._length_fn or measure)(sample)) for sample in read])
                chosen = spread_out(lengths)
                samples = [read[index] for index in chosen]
            else:
                lengths = self.lengths.values
                chosen = spread_out(lengths)
                samples = SampleReader(dataset, self._collate, self.options.seed).samples(0, chosen)
        return TrialSamples(samples, lengths[chosen], self._collate)

    # -- what is known before it is read ------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether samples come one after another, and not by index."""
        return is_stream(self._samples)

    @property
    def learns(self) -> bool:
        """Whether measured times change plans."""
        return self._prepare().learning.cost is not None

    @property
    def cost(self) -> Any:
        """What plans are made by: as given, or for a cost that learns the `FittedCost` with what was learnt so far."""
        if not (self.options.learns or self.options.is_auto):
            return self.options.cost
        learning = self._prepare().learning
        return self._info.first_cost if learning.cost is None else learning.cost.in_use

    @property
    def memory_values(self) -> dict[str, float]:
        """What `DeviceIdleMonitor` logs of the memory of microbatches, by name."""
        cap = None if self._reading is None else self._reading.learning.cap
        return {} if cap is None else cap.values()

    @property
    def max_tokens(self) -> Caps:
        """The most tokens in a microbatch, or a list by rank, as given; ``None``: the longest sample of a minibatch."""
        return self._prepare().max_tokens

    @property
    def collation(self) -> Collation | None:
        """What ``collate_fn`` was found to make of a microbatch; ``None``: not known, and taken for packing."""
        return self._prepare().collation

    @cached_property
    def lengths(self) -> Lengths:
        """The length of every sample of a map-style data set; found out at the first use."""
        found = find_lengths(self._samples, self._given, self._length_fn)
        try:
            check_longest(found.values, self.options.max_tokens)
        except ValueError:  # may be cut by the collate_fn; what its rows are is checked with the first plan
            collation = self._find_collation(self._collate, found)
            if collation is None or collation.fixed is None:
                raise
        return found

    def _find_collation(self, collate_fn: Collate, lengths: Lengths) -> Collation | None:
        return SampleReader(self._samples, collate_fn, self.options.seed).collation(lengths.values)

    def planned_gain(self, batches: int = 1) -> Gain | None:
        """What plans gain over ``batches`` as they come, with the samples of a minibatch; ``None`` for a stream."""
        reading = self._prepare()
        if not isinstance(reading, MapReading):
            return None
        size = self.options.batch_size or max(self.options.minibatch_size // batches, 1)
        unbalanced = self._find_collation(self._unpacked, self.lengths) if self._packs else reading.collation
        in_order = self.lengths.values[reading.epochs.order(0)]
        return planned_gain(in_order, size, batches, reading.epochs.planner, unbalanced or PACKED)

    def plan(self, step: int, epoch: int | None = None) -> MinibatchPlan:
        """Who does what in minibatch number ``step`` of a map-style data set, by default in the epoch under way.

        With a cost that learns: by what has been learnt until now.
        """
        return self._map_reading().plan_now(self._progress.latest.epoch if epoch is None else epoch, step)

    def read(self, microbatch: Sequence[int], epoch: int | None = None) -> Any:
        """Any microbatch of a map-style data set, from the indices that a `MinibatchPlan` has for it, on any rank."""
        return self._map_reading().read(self._progress.latest.epoch if epoch is None else epoch, microbatch)

    def _map_reading(self) -> MapReading:
        reading = self._prepare()
        if isinstance(reading, MapReading):
            return reading
        raise TypeError(
            "An IterableDataset is planned as it is read: no plan and no sample can be asked for."
        )

    # -- what it yields -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Minibatches per epoch, or microbatches of the epoch under way if ``unroll``; the same on all ranks.

        Raises:
            TypeError: the data set is a stream without a length, or a stream that is unrolled.
        """
        if self._instead is not None:
            return len(self._instead)
        reading = self._prepare()
        if self.unroll:
            latest = self._progress.latest
            return reading.count_microbatches(latest.epoch + (latest.minibatches >= len(reading)))
        return len(reading)

    def __iter__(self) -> Iterator[Minibatch | Microbatch]:
        if self._instead is not None:
            yield from self._instead
            return
        reading, workers = self._prepare(), self._workers.get("num_workers", 0)
        start = self._progress.begin(reading.order, length_hint(reading))
        # Minibatches that are planned before the current one has run. In a stream, Lightning may look one ahead.
        ahead = 1 if self.is_stream else workers * (self._workers.get("prefetch_factor") or 2)
        reading.learning.begin(self.minibatches_per_step + ahead)
        options = WorkerOptions(worker_init_fn=self.worker_init_fn, **self._workers)
        alive = self._iterator is not None  # Lightning stops kept workers by the iterator, and takes it away
        arriving = self._iterator = iter(reading.loader(start.epoch, start.minibatches, options, alive))
        try:
            for done, arrived in enumerate(named_deaths(arriving), start.minibatches):
                minibatch, after = reading.completed(arrived, done), Position(start.epoch, done + 1)
                if not self.unroll:
                    self._progress.latest = after
                    yield minibatch
                    continue
                for number, (batch, weight) in enumerate(minibatch.weighted(), 1):
                    if number > start.microbatches:  # else it was yielded before a checkpoint
                        last = number == len(minibatch)
                        self._progress.latest = after if last else start._replace(microbatches=number)
                        yield Microbatch(batch, weight, last)
                start = after
        finally:
            if self._iterator is arriving and not self._workers.get("persistent_workers"):
                self._iterator = None
        self._progress.latest = Position(start.epoch + 1)

    def _prepare(self) -> Reading:
        """What reads, for the number of ranks there is now. It holds what was learnt, too, so it stays."""
        world = current_world(*self._world)
        if self._reading is not None and self._reading.world == world:
            return self._reading
        options, info = self.options, self._info
        if self.unroll and options.by_labels:  # nothing counts the labels of a microbatch
            packs_rows = self._packs or packs(self._unpacked)
            options = replace(options, weighting="next_token" if packs_rows else "token")
        if self.is_stream:
            # A worker that plans is not told how long microbatches took, so a cost cannot learn there.
            info = replace(info, measured=info.measured and not self._workers.get("num_workers"))
            length_of = self._length_fn or measure
            source = self._samples, self._collate, length_of
            self._reading = StreamReading(*source, options, info, world, self.unroll)
        else:
            compared_by = measure if self.lengths.source == "samples" else None
            reader = SampleReader(self._samples, self._collate, options.seed, compared_by)
            self._reading = MapReading(reader, self.lengths, options, info, world, self.unroll)
        return self._reading

    @property
    def _collate(self) -> Collate:
        return PackingCollator(self._unpacked) if self._packs else self._unpacked

    # -- where it is --------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of ``epoch``. Without it, passes are epochs 0, 1, 2 and so on."""
        self._progress.set_epoch(epoch)
        if callable(set_epoch := getattr(getattr(self._instead, "sampler", None), "set_epoch", None)):
            set_epoch(epoch)

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> dict[str, Any]:
        """The position of the last yielded minibatch (not of those read ahead), and what was learnt."""
        order = self._prepare().order if self._progress.latest.started else None
        learnt = {} if self._reading is None else self._reading.learning.state_dict()
        return {**self._progress.state(order), **learnt}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass where the state was taken; it is compared with data and settings when the pass begins."""
        state = dict(state_dict)
        learnt: dict[str, Any] = {name: state.pop(name) for name in ("learning", "memory") if name in state}
        self._progress.load(state)
        if learnt:
            self._prepare().learning.load_state_dict(learnt)


# -- what it refuses ---------------------------------------------------------------------------------------

#: Names that the other of two classes has for the same thing.
_ELSEWHERE = {
    ("ODCStrategy", "policy"): "balance",
    ("BalancedDataLoader", "balance"): "policy",
    ("BalancedDataLoader", "batch_size"): "minibatch_size",
}
_TEACH = "BalancedDataLoader(..., num_replicas=8, rank=3), or neither to take them from torch.distributed"


def check_world(num_replicas: int | None, rank: int | None) -> None:
    """Refuse a rank that cannot be."""
    if (num_replicas is None) != (rank is None):
        raise ValueError(f"num_replicas={num_replicas} and rank={rank} must be given together: {_TEACH}.")
    if num_replicas is None or rank is None:
        return
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank={rank} is not one of num_replicas={num_replicas} ranks, which count from 0: {_TEACH}."
        )


def current_world(num_replicas: int | None, rank: int | None) -> World:
    """Number of ranks and own rank: as given, else of the process group, else as ``torchrun`` says, else 1 and 0."""
    if num_replicas is not None and rank is not None:
        return num_replicas, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return 1, 0


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after another, and not by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def did_you_mean(owner: str, name: str, known: Sequence[str]) -> str:
    """What to say about an argument that is not one of the known ones."""
    close = _ELSEWHERE.get((owner, name)) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    if close:
        return f"{owner} does not know {name}=: did you mean {close}=?"
    return f"{owner} does not know {name}=. Its arguments are {', '.join(known)}."


def _check_unroll(options: BatchOptions) -> None:
    """Refuse to unroll minibatches in which ranks have different numbers of microbatches."""
    if not options.equal_counts:
        raise ValueError(
            f"unroll=True needs equally many microbatches on all ranks; policy={options.policy!r} does not give that. "
            'Write policy="lb_micro" (or "local_sort"), or unroll=False with ODCStrategy.'
        )
    if options.learns:
        raise ValueError(
            "A cost that learns needs the times of microbatches, and with unroll=True it does not get them. Write "
            'cost="auto", or unroll=False with ODCStrategy(communication="on_demand").'
        )


def _check_stream(window: int | None, lengths: Any, options: BatchOptions, num_workers: int) -> None:
    """Refuse for a stream what needs indices or plans made elsewhere, and a missing window."""
    if window is None:
        raise ValueError(
            "An IterableDataset is balanced in a window of minibatches that every rank reads whole. Say how many: "
            "BalancedDataLoader(dataset, window=1, ...)."
        )
    if options.policy == "steal":
        raise ValueError(
            'policy="steal" reads the samples of other ranks by index, and an IterableDataset has none: write '
            'policy="lb_mini".'
        )
    if options.learns and num_workers:
        raise ValueError(
            "The worker that reads an IterableDataset plans it, too, and does not learn how long microbatches took: "
            'write num_workers=0, or cost="auto".'
        )
    if lengths is not None:
        raise ValueError(
            "lengths=[...] goes by index, and an IterableDataset has none. Write length_fn=lambda sample: ..., or let "
            "it yield samples that have a length."
        )
