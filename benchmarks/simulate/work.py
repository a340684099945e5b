"""What every device has to compute: the seconds of all planned microbatches, as arrays."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.model import Model
from lightning_odc.balance.arrays import Floats, Ints, Plan, as_lengths, check_choice, check_count
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import MinibatchCosts
from lightning_odc.balance.planner import POLICIES, Planner, epoch_order


class Plans(Protocol):
    """What makes plans: a `Planner`, an `Unbalanced`, or another object."""

    def plan(self, lengths: Any) -> Plan:
        """The plan of one minibatch; see `Planner.plan`."""


@dataclass(frozen=True)
class Unbalanced:
    """An ordinary ``DataLoader``: rank ``r`` takes samples ``r``, ``r + num_ranks``, ... in the order they come.

    Attributes:
        num_ranks: How many ranks share a minibatch.
        together: Samples of a microbatch: the ``batch_size`` of the loader.
    """

    num_ranks: int
    together: int = 1

    def plan(self, lengths: Any) -> Plan:
        """The plan of one minibatch; ranks end with empty microbatches where samples do not suffice for all."""
        plan: Plan = []
        for rank in range(self.num_ranks):
            own = np.arange(rank, len(lengths), self.num_ranks).tolist()
            plan.append([own[i : i + self.together] for i in range(0, len(own), self.together)])
        most = max(map(len, plan))
        return [microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in plan]


@dataclass(frozen=True)
class Work:
    """What every device has to compute: ``S`` minibatches, ``M`` microbatches at most, ``D`` devices.

    Attributes:
        seconds: ``[S, M, D]`` of each microbatch on its device, without waiting and communication; 0: there is none.
        counts: ``[S, D]`` microbatches.
        tokens: ``[S]`` tokens of the samples.
        samples: ``[S]``.
        useful: ``[S]`` mean over devices of the seconds that are not padding.
        longest: ``[S]`` seconds of the longest sample on the fastest device. No plan is faster.
        most_tokens: The most tokens that a microbatch computes.
        padding: Part of the computed tokens.
        policy: What it is called.
    """

    seconds: Floats
    counts: Ints
    tokens: Ints
    samples: Ints
    useful: Floats
    longest: Floats
    most_tokens: int
    padding: float
    policy: str

    @property
    def are_equal(self) -> bool:
        """Whether all devices have equally many microbatches in every minibatch, as collectives need."""
        return bool((self.counts == self.counts[:, :1]).all())


def plan_work(
    lengths: Any,
    model: Model,
    cluster: Cluster,
    *,
    minibatch_size: int,
    policy: str | Plans = "lb_mini",
    max_tokens: int | None = None,
    collation: Collation = PACKED,
    minibatches: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Work:
    """Plan minibatches with the package's planner.

    Args:
        lengths: ``[n]`` tokens of the samples of the data set. A minibatch that needs more than there are takes some
            twice.
        model: What it costs is what the planner plans by.
        cluster: How many devices there are, and how slow.
        minibatch_size: Samples per device and minibatch, as in `BalancedDataLoader`.
        policy: One of `POLICIES`, or what makes plans: an `Unbalanced`, a `Planner`.
        max_tokens: Most tokens of a microbatch; by default the longest sample.
        collation: What the ``collate_fn`` makes of a microbatch.
        minibatches: How many; by default one epoch.
        shuffle: Whether samples come in the order of `epoch_order`.
        seed: Seed of that order.

    Raises:
        ValueError: lengths, sizes or a policy that cannot be planned. The message shows the right line.
    """
    array = as_lengths(lengths)
    if array.ndim != 1:
        raise ValueError(
            f"the simulator takes one length per sample, got shape {list(array.shape)}: lengths[:, 0]."
        )
    size = check_count("minibatch_size", minibatch_size) * cluster.devices
    count = max(len(array) // size, 1) if minibatches is None else check_count("minibatches", minibatches)
    plans: Plans
    if isinstance(policy, str):
        check_choice("policy", policy, POLICIES)
        made: Any = {"max_tokens": max_tokens, "policy": policy, "cost": model.cost}
        plans = Planner(cluster.devices, **made, allow_empty=True, collation=collation).capped_for(array)
    else:
        plans = policy
    drawn = [array[own] for own in _minibatches(len(array), size, count, shuffle, seed)]
    name = policy if isinstance(policy, str) else str(getattr(policy, "policy", type(policy).__name__))
    return work_of(
        ((plans.plan(own), own) for own in drawn), model, cluster, collation=collation, policy=name
    )


def _minibatches(samples: int, size: int, count: int, shuffle: bool, seed: int) -> Iterable[Ints]:
    """Sample indices ``[size]`` of that many minibatches, epoch after epoch. The rest of an epoch is dropped."""
    epoch, left = 0, np.zeros(0, dtype=np.int64)
    for _ in range(count):
        if len(left) < size:
            left = left if samples < size else left[:0]
        while len(left) < size:
            order = epoch_order(samples, seed, epoch) if shuffle else np.arange(samples)
            left, epoch = np.concatenate([left, order]), epoch + 1
        yield left[:size]
        left = left[size:]


def work_of(
    planned: Iterable[tuple[Plan, Any]],
    model: Model,
    cluster: Cluster,
    *,
    collation: Collation = PACKED,
    policy: str = "given",
) -> Work:
    """The work of plans that were made elsewhere.

    Args:
        planned: Plan of every minibatch, and ``[n]`` the lengths of the samples that its indices name.
        model: What it costs.
        cluster: The devices.
        collation: What the ``collate_fn`` makes of a microbatch.
        policy: What to call it.

    Raises:
        ValueError: no plan, or one for another number of devices.
    """
    with _without_collections():
        parts = [_Part.of(plan, as_lengths(lengths), model, cluster, collation) for plan, lengths in planned]
    if not parts:
        raise ValueError("there is no minibatch to simulate: minibatches=8.")
    most = max(len(part.seconds) for part in parts)
    seconds = np.zeros((len(parts), most, cluster.devices))
    for index, part in enumerate(parts):
        seconds[index, : len(part.seconds)] = part.seconds
    computed, tokens = sum(part.computed for part in parts), np.array([part.tokens for part in parts])
    return Work(
        seconds=seconds * cluster.factors,
        counts=np.array([part.counts for part in parts]),
        tokens=tokens,
        samples=np.array([part.samples for part in parts]),
        useful=np.array([part.useful for part in parts]) * float(cluster.factors.mean()),
        longest=np.array([part.longest for part in parts]) * float(cluster.factors.min()),
        most_tokens=max(part.most_tokens for part in parts),
        padding=1 - float(tokens.sum()) / computed,
        policy=policy,
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Plans are thousands of lists, none in a cycle: to search them for cycles takes as long as to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Part:
    """One minibatch on devices of slowness 1.

    Attributes:
        seconds: ``[M, D]``.
        counts: ``[D]`` microbatches.
        computed: Tokens, with padding.
        useful: Mean over devices of the seconds without padding.
    """

    seconds: Floats
    counts: Ints
    tokens: int
    samples: int
    computed: int
    most_tokens: int
    useful: float
    longest: float

    @classmethod
    def of(cls, plan: Plan, lengths: Ints, model: Model, cluster: Cluster, collation: Collation) -> _Part:
        """Flat arrays of samples and microbatches, rank by rank.

        For example, the plan ``[[[0, 2]], [[1], [3]]]`` has samples ``[0, 2, 1, 3]``, microbatches of ``[2, 1, 1]``
        samples, on devices ``[0, 1, 1]``, at places ``[0, 0, 1]`` of their device.
        """
        devices = cluster.devices
        if len(plan) != devices:
            raise ValueError(
                f"a plan is for {len(plan)} ranks, and there are {devices} devices: devices={len(plan)}."
            )
        flat = np.array([i for rank in plan for microbatch in rank for i in microbatch], dtype=np.int64)
        sizes = np.array([len(microbatch) for rank in plan for microbatch in rank], dtype=np.int64)
        counts = np.array([len(rank) for rank in plan], dtype=np.int64)
        terms = MinibatchCosts.of(model.cost, lengths, 1, collation)
        plain = np.minimum(MinibatchCosts.of(model.cost, lengths, 1).samples[0], terms.samples[0])
        rows_of = collation.row_lengths(lengths)
        own = _Flat(rows_of[flat], terms.samples[0][flat], plain[flat], sizes, terms)
        rows = own.padded() if collation.is_table else own.packed()
        places = np.concatenate([np.arange(count) for count in counts])
        seconds = np.zeros((max(int(counts.max()), 1), devices))
        seconds[places, np.repeat(np.arange(devices), counts)] = rows[0]
        return cls(
            seconds=seconds,
            counts=counts,
            tokens=int(lengths[flat].sum()),
            samples=len(flat),
            computed=int(rows[1].sum()),
            most_tokens=int(rows[1].max(initial=0)),
            useful=float(rows[2].sum()) / devices,
            longest=float((own.costs.max() if len(flat) else 0.0) + terms.overhead[0]),
        )


@dataclass(frozen=True)
class _Flat:
    """Samples in the order of their microbatches.

    Attributes:
        rows: ``[n]`` tokens of each sample alone in its microbatch.
        costs: ``[n]`` seconds of each alone, without overhead.
        plain: ``[n]`` the same without padding.
        sizes: ``[m]`` samples of each microbatch.
        terms: The costs.
    """

    rows: Ints
    costs: Floats
    plain: Floats
    sizes: Ints
    terms: MinibatchCosts

    def packed(self) -> tuple[Floats, Floats, Floats]:
        """``[m]`` seconds, tokens, and seconds without padding, which are the same."""
        tokens = self._sums(self.rows)
        pairs = (tokens**2 - self._sums(self.rows.astype(np.float64) ** 2)) / 2
        seconds = self._sums(self.costs) + self.terms.pair[0] * pairs + self.terms.overhead[0]
        return seconds, tokens, seconds

    def padded(self) -> tuple[Floats, Floats, Floats]:
        """The work if every row is padded to the longest; an empty microbatch costs its overhead."""
        filled = self.sizes > 0
        starts = (np.cumsum(self.sizes) - self.sizes)[filled]
        longest, costs = np.zeros(len(self.sizes)), np.zeros(len(self.sizes))
        longest[filled] = np.maximum.reduceat(self.rows, starts)
        costs[filled] = np.maximum.reduceat(self.costs, starts)
        seconds = self.sizes * costs + self.terms.overhead[0]
        return seconds, self.sizes * longest, self._sums(self.plain) + self.terms.overhead[0]

    def _sums(self, values: Sequence[float] | Floats | Ints) -> Floats:
        """``[m]`` sums over the samples of each microbatch."""
        members = np.repeat(np.arange(len(self.sizes)), self.sizes)
        sums: Floats = np.bincount(members, weights=values, minlength=len(self.sizes)).astype(np.float64)
        return sums
