"""Plans which samples make up a minibatch, and on which rank.

`BatchOptions` are what the user chose, a `Decision` is what was decided, and `RunFacts` are what is known of the run.
Together they are a `Recipe`. By it, an `EpochPlan` cuts the epochs of a map-style data set into minibatches, and plans
one when it is asked for. A `MinibatchPlan` says what ranks do.

Note [Ranks take turns]
~~~~~~~~~~~~~~~~~~~~~~~
Loads cannot always be equal, and the planner gives equal remainders to equal ranks: of two samples on two ranks, rank 0
gets the longer one. So equal ranks swap their parts from minibatch to minibatch, and no rank always has the most time
or peak memory. In epoch ``e``, rank ``r`` gets part ``(r + e + step) % num_ranks`` of the plan. ::

    samples of 9 and 2 tokens in every minibatch, 2 ranks, epoch 0

    step                 0     1     2     3        tokens
    part 0 (9 tokens)    r0    r1    r0    r1       r0: 9 + 2 + 9 + 2 = 22
    part 1 (2 tokens)    r1    r0    r1    r0       r1: 2 + 9 + 2 + 9 = 22

This is a function of epoch and step alone, so a resumed run gets the same parts. If a cost differs from rank to rank,
the planner has placed the parts, and they stay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from lightning_odc.balance import (
    COLLECTIVE_SAFE,
    Cost,
    Plan,
    Planner,
    Policy,
    quadratic,
    regroup,
    resolve_cost,
)
from lightning_odc.balance.arrays import Cap, Ints, floats
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import SpeedCost
from lightning_odc.balance.evaluate import relative_costs
from lightning_odc.balance.learnt import MeasuredCost
from lightning_odc.balance.search import longest_first
from lightning_odc.data.decision import AS_WRITTEN, Decision, Whole
from lightning_odc.data.minibatch import LoaderFacts, Minibatch, Task
from lightning_odc.samples.lengths import Lengths
from lightning_odc.samples.weighting import LabelCounter, planned_counts
from lightning_odc.words import how_many

Weighting = Literal["auto", "label", "token", "next_token", "sample", "sum"]

World = tuple[int, int]
"""The number of ranks that share a minibatch, and this rank."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run that trains on a loader; the same on all ranks."""

    prior: Cost | None = None  # what `cost="auto"` begins with, if the model tells
    measured: bool = True  # whether who runs microbatches may measure how long they take
    # whether runs must be bit-equal, so that caps stay when a microbatch has run out of memory
    repeats: bool = False
    # whether ranks wait for each other in every microbatch, so that all need equally many
    meets: bool = False

    @property
    def first_cost(self) -> Cost:
        """What ``cost="auto"`` begins with; if the model says nothing, a cost that packs with care."""
        if self.prior is None:
            return resolve_cost("quadratic_dense")
        return self.prior


NOTHING_KNOWN = RunFacts()


@dataclass(frozen=True)
class BatchOptions:
    """How samples become minibatches, as the user wrote it for a `BalancedDataLoader`; the same on all ranks."""

    minibatch_size: int
    max_tokens: Cap = None
    policy: Policy = "lb_mini"
    cost: Any = "auto"
    weighting: Weighting = "auto"
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    window: int = 1
    regroup: bool = False
    # samples of a batch of the user's own loader, if there is one; a divisor of `minibatch_size`. `drop_last`
    # leaves out what does not fill a batch, and by default no microbatch is larger than the largest batch.
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.regroup and self.window == 1:
            raise ValueError(
                "regroup=True lets the minibatches of a window exchange samples: write window=16."
            )
        self.planner(1)  # refuses what it cannot plan with

    @property
    def is_auto(self) -> bool:
        """Whether the cost is what the model says, until measured times refute it."""
        return self.cost == "auto"

    @property
    def are_of_batches(self) -> bool:
        """Whether minibatches are made of the batches of a loader of the user's own."""
        return self.batch_size is not None

    @property
    def batches(self) -> int:
        """Batches of the user's own loader in a minibatch; 1 if there is no such loader."""
        return self.minibatch_size // self.samples_per_batch

    @property
    def samples_per_batch(self) -> int:
        """Samples of a batch of the user's own loader; of a minibatch if there is no such loader."""
        return self.batch_size or self.minibatch_size

    @property
    def order(self) -> str:
        """Text that is equal where samples come in the same order."""
        order = f"seed {self.seed}, shuffle {self.shuffle}"
        if self.window > 1:
            order += f", window {self.window}, regroup {self.regroup}"
        return order

    def count_samples(self, num_samples: int, num_replicas: int) -> int:
        """Samples of an epoch that are used; the others are dropped at its end."""
        if not self.drop_last:
            return num_samples
        unit = self.samples_per_batch * num_replicas
        return num_samples - num_samples % unit

    def count_minibatches(self, num_samples: int, num_replicas: int) -> int:
        """Minibatches of an epoch."""
        used = self.count_samples(num_samples, num_replicas)
        return -(-used // (self.minibatch_size * num_replicas))

    def minibatches(self, lengths: Ints, num_replicas: int) -> list[Ints]:
        """Positions of the samples of each minibatch of a window; see `lightning_odc.balance.regroup`."""
        size = self.minibatch_size * num_replicas
        if not self.regroup:
            return np.split(np.arange(len(lengths)), range(size, len(lengths), size))
        # Always by the quadratic cost: one that is learnt while training would regroup otherwise after a resume.
        return regroup(quadratic().samples(floats(lengths)), num_replicas, size)

    def planner(
        self,
        num_replicas: int,
        lengths: Ints | None = None,
        run: RunFacts = NOTHING_KNOWN,
        collation: Collation = PACKED,
    ) -> Planner:
        """What plans minibatches for so many ranks; ``lengths`` are those of the samples in the order they come."""
        cap = self.max_tokens
        if cap is None and lengths is not None:
            cap = self._largest_batch(lengths, num_replicas, collation)
        cost = self.cost
        if self.is_auto:  # what times show is given to each plan: see Note [Plans of what all ranks know]
            cost = run.first_cost
        return Planner(num_replicas, cap, self.policy, cost, collation=collation)

    def _largest_batch(self, lengths: Ints, num_replicas: int, collation: Collation) -> int:
        """The most tokens in a batch of the user's own loader, which fits."""
        rows = collation.row_lengths(lengths)
        size = self.batch_size or 1
        unit = size * num_replicas
        whole = len(rows) // unit * unit
        dealt = rows[:whole].reshape(-1, size, num_replicas)  # [batches, samples, ranks]
        tokens = dealt.sum(1)
        if collation.is_table:
            tokens = size * dealt.max(1)
        return max(int(rows.max()), int(tokens.max(initial=0)))


@dataclass(frozen=True)
class Recipe:
    """How samples become minibatches: what the user wrote, what was decided, and what is known."""

    options: BatchOptions
    decision: Decision = AS_WRITTEN
    run: RunFacts = NOTHING_KNOWN
    collation: Collation = PACKED  # what the `collate_fn` makes of the samples of a microbatch

    @property
    def is_whole(self) -> bool:
        """Whether the batches of the user's own loader are left as they are."""
        return isinstance(self.decision, Whole)

    @property
    def is_fixed(self) -> bool:
        """Whether they stay on their ranks, too."""
        decision = self.decision
        return isinstance(decision, Whole) and (self.run.meets or not decision.is_movable)

    @property
    def policy(self) -> Policy:
        """The policy: for collectives, where all ranks need equally many microbatches."""
        if (self.is_whole or self.run.meets) and self.options.policy not in COLLECTIVE_SAFE:
            return "lb_micro"
        return self.options.policy

    @property
    def weighting(self) -> Weighting:
        """What samples count."""
        rule = self.decision.rule
        return self.options.weighting if rule is None else rule.planned

    @property
    def counter(self) -> LabelCounter | None:
        """What is counted in microbatches instead of planned weights."""
        rule = self.decision.rule
        return None if rule is None else rule.counter

    @property
    def by_labels(self) -> bool:
        """Whether labels, where microbatches have them, count instead of the planned weights."""
        return self.weighting in ("auto", "label") and not self.counts_alike

    @property
    def counts_alike(self) -> bool:
        """Whether every batch is left as it is and counts 1, as under DDP, since no rule says what it counts."""
        return self.is_whole and self.weighting == "auto"

    def minibatch(self, tasks: Sequence[Task], plan: str | None) -> Minibatch:
        """A minibatch of these microbatches, which tells of the loader that made it."""
        made = Minibatch([task.microbatch for task in tasks], [task.weight for task in tasks], plan)
        details = [task.detail for task in tasks if task.detail is not None]
        made.origin = LoaderFacts(details, self.by_labels, self.counter, self.weighting == "sum")
        return made

    def name(self, epoch: int, step: int, lengths: Lengths) -> str:
        """What a minibatch is called, in the text of its plan."""
        return f"{self.policy}, seed {self.options.seed}, epoch {epoch}, minibatch {step}, lengths {lengths.digest}"

    def planner(self, num_replicas: int, lengths: Ints | None = None) -> Planner:
        """What plans minibatches for so many ranks; ``lengths`` are those of the samples in the order they come."""
        planner = self.options.planner(num_replicas, lengths, self.run, self.collation)
        return replace(planner, policy=self.policy)

    def measured_cost(self, num_replicas: int) -> MeasuredCost | None:
        """The cost for so many ranks, if measured times may correct it."""
        if not (self.options.is_auto and self.run.measured):
            return None
        cost = MeasuredCost(num_replicas, self.run.first_cost)
        if self.collation.kind != "packed":
            cost.separate_samples()
        return cost


class EpochPlan:
    """The minibatches of all epochs: a pure function of lengths, options, number of ranks and what was learnt."""

    def __init__(self, lengths: Lengths, recipe: Recipe, num_replicas: int) -> None:
        options = recipe.options
        self.lengths = lengths
        self.recipe = recipe
        self.options = options
        self.num_replicas = num_replicas
        self.samples_per_minibatch = options.minibatch_size * num_replicas
        if len(lengths) < num_replicas:
            raise ValueError(
                f"The data set has {how_many(len(lengths), 'samples')}, fewer than {num_replicas} ranks: some rank "
                f"would never have work. Write Trainer(devices={max(len(lengths), 1)}) or use more data."
            )
        if not len(self):
            size = options.samples_per_batch
            raise ValueError(
                f"drop_last=True leaves no minibatch: {len(lengths)} samples do not fill one of "
                f"{size * num_replicas} (minibatch_size={size} on {num_replicas} ranks). Write drop_last=False or a "
                "smaller minibatch_size."
            )
        # Minibatches are mostly asked for one after another, so the latest epoch and the latest window are kept.
        self._epoch: int | None = None
        self._order = np.arange(len(lengths))
        self._window: tuple[int, int] | None = None
        self._minibatches: list[Ints] = []
        self._is_complete = lengths.are_complete
        in_order = lengths.values[self.order(0)]
        planner = recipe.planner(num_replicas, in_order[in_order > 0])
        self.planner = planner.capped_for(lengths.known)

    def __len__(self) -> int:
        """Minibatches per epoch."""
        return self.options.count_minibatches(len(self.lengths), self.num_replicas)

    def order(self, epoch: int) -> Ints:
        """All sample indices in the order of an epoch; windows of minibatches are consecutive pieces of it."""
        if self.options.shuffle and self._epoch != epoch:
            generator = torch.Generator().manual_seed((self.options.seed + epoch) % 2**63)
            self._epoch = epoch
            # As torch's `DistributedSampler`: a minibatch has the samples that the ranks' batches of an optimizer step
            # hold together under stock Lightning.
            self._order = torch.randperm(len(self.lengths), generator=generator).numpy()
        return self._order

    def samples(self, epoch: int, step: int) -> Ints:
        """The samples of a minibatch."""
        window, within = divmod(step, self.options.window)
        if self._window != (epoch, window):
            size = self.samples_per_minibatch * self.options.window
            count = self.options.count_samples(len(self.lengths), self.num_replicas)
            used = self.order(epoch)[:count]
            # All ranks get equally many, as from a distributed sampler.
            if self.recipe.counts_alike or self.recipe.is_fixed:
                of_each_rank = -(-count // self.num_replicas)
                used = np.resize(used, of_each_rank * self.num_replicas)
            begin = window * size
            own = used[begin : begin + size]
            groups = self.options.minibatches(self.lengths.values[own], self.num_replicas)
            self._window = (epoch, window)
            self._minibatches = [own[group] for group in groups]
        return self._minibatches[within]

    def plan(self, epoch: int, step: int, learnt: Cost | None = None, cap: Cap = None) -> MinibatchPlan:
        """Plan which rank runs which samples in minibatch ``step``, with a cost and a cap that were learnt."""
        if not 0 <= step < len(self):
            raise IndexError(
                f"Minibatch {step} is not one of the {len(self)} of an epoch, which count from 0."
            )
        indices = self.samples(epoch, step)
        lengths = self.lengths.values[indices]
        name = self.recipe.name(epoch, step, self.lengths)
        known = self.planner
        planner = replace(known, cost=learnt or known.cost, max_tokens=cap or known.max_tokens)
        if not self._is_complete:  # see Note [Read first, planned then]
            own = self.recipe.planner(self.num_replicas, lengths).capped_for(lengths).max_tokens
            longest = int(known.collation.row_lengths(lengths).max())
            if own is not None and cap is not None:  # which may have fallen
                own = max(min(own, cap), longest)
            planner = replace(planner, max_tokens=own)
        return MinibatchPlan.of(self.recipe, planner, indices, lengths, name, turn=epoch + step)

    def costs(self, plan: MinibatchPlan, learnt: Cost | None = None) -> list[list[float]]:
        """Every microbatch's cost by rank, in tokens of this minibatch: comparable even after the cost has learnt."""
        lengths = [self.lengths.values[indices] for of_rank in plan.microbatches for indices in of_rank]
        cost = learnt or self.planner.cost
        costs = relative_costs(lengths, cost, self.num_replicas, collation=self.planner.collation)
        tokens = sum(sizes.sum() for sizes in lengths)
        scale = float(tokens) / sum(costs)
        remaining = iter(costs)
        return [[next(remaining) * scale for _ in of_rank] for of_rank in plan.microbatches]


@dataclass(frozen=True)
class MinibatchPlan:
    """What all ranks do in one minibatch."""

    microbatches: Plan  # of sample indices
    # one number per microbatch, for each rank; 0 for one that only keeps the ranks' counts equal
    weights: list[list[float]]
    text: str  # equal on all ranks that follow the same plan

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        planner: Planner,
        indices: Ints,
        lengths: Ints,
        name: str,
        turn: int,
    ) -> MinibatchPlan:
        """Distribute the samples ``indices`` of one minibatch; ``name`` begins the plan's text."""
        if recipe.is_whole:
            positions = whole_batches(recipe, planner, lengths)
        else:
            positions = planner.plan(lengths)
            cost = planner.cost
            if not isinstance(cost, SpeedCost) or len({*cost.speeds}) == 1:
                first = turn % planner.num_ranks  # see Note [Ranks take turns]
                positions = positions[first:] + positions[:first]
        counts = planned_counts(recipe.weighting, lengths)
        if recipe.weighting == "sum":  # as many as Lightning divides by: ranks, and accumulated batches
            counts *= planner.num_ranks * recipe.options.batches / len(lengths)
        # A rank that has too few samples for equal counts gets a microbatch of weight 0, of the shortest sample.
        shortest = int(indices[lengths.argmin()])
        microbatches = [[indices[own].tolist() or [shortest] for own in of_rank] for of_rank in positions]
        weights = [[float(counts[own].sum()) for own in of_rank] for of_rank in positions]
        if recipe.counts_alike:
            weights = [[1.0 for _ in of_rank] for of_rank in positions]
        content = repr((microbatches, weights)).encode()
        digest = hashlib.sha256(content).hexdigest()[:12]
        return cls(microbatches, weights, f"{name}, plan {digest}")


def dealt_out(samples: list[int], num_ranks: int, size: int) -> Plan:
    """Batches of samples for each rank, as a distributed sampler deals them out: every ``num_ranks``-th sample."""
    dealt = []
    for rank in range(num_ranks):
        own = samples[rank::num_ranks]
        dealt.append([own[first : first + size] for first in range(0, len(own), size)])
    return dealt


def whole_batches(recipe: Recipe, planner: Planner, lengths: Ints) -> Plan:
    """The batches that a distributed sampler deals out. Ranks swap some of them, so that loads are level."""
    ranks = planner.num_ranks
    count = len(lengths)
    options = recipe.options
    samples = list(range(count))
    if (
        recipe.is_fixed
    ):  # the step communicates: as the sampler does, repeat samples, so that counts are equal
        samples += [place % count for place in range(-count % ranks)]
    dealt = dealt_out(samples, ranks, options.samples_per_batch)
    if options.batches == 1 or recipe.is_fixed:
        return dealt
    batches = [batch for of_rank in dealt for batch in of_rank]
    sizes = [lengths[batch] for batch in batches]
    costs = relative_costs(sizes, planner.cost, ranks, collation=planner.collation)
    # The heaviest batch goes first, each to the rank with the least load that has room:
    #   costs of rank 0, rank 1     9 8 | 2 1     loads 17 and 3
    #   levelled                    9 1 | 8 2     loads 10 and 10
    # Each rank keeps its number of batches, because a loss that couples samples may also communicate.
    level: list[list[int]] = [[] for _ in dealt]
    limits = [len(of_rank) for of_rank in dealt]
    loads = [0.0 if limit else math.inf for limit in limits]
    longest_first(np.array([costs]), range(len(batches)), level, loads, limits)
    return [[batches[batch] for batch in sorted(of_rank)] for of_rank in level]
