"""How long a minibatch takes: with a barrier at every unit, or one meeting; communication runs beside computing.

Note [Hidden communication]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` gathers the next unit while one computes. With ``n`` equal units, nothing hides the first gather, and
the other ``n - 1`` gathers run while units compute. The visible part of a gather is the time beyond that of the
computing unit. The same holds for gathers and sums of the backward pass together. There is one root unit only: all of
it is visible.

An example: 3 layers of 2 s each in the forward pass, gathers of 3 s. Time is ``3 + 3 + 3 + 2 = 11``: the computing, 6,
and the visible part, ``3 x 3 - 2 x min(2, 3) = 5``.

Note [A busy owner]
~~~~~~~~~~~~~~~~~~~
All shards are equally large, so an owner serves as many bytes as an average rank moves. Yet several ranks may ask
the same owner at the same moment, and share its bandwidth. If all ranks move bytes all the time, each from or to a
random one of ``n`` owners, they keep ``1 - (1 - 1/n)^n`` of the owners busy: 1 for one, 0.75 for two, 0.63 for many.
Their transfers take longer by the inverse factor. Ranks that move bytes for a part of the time collide in that part
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.memory import kept_fraction
from benchmarks.simulate.model import Model
from benchmarks.simulate.transfers import Transfers
from benchmarks.simulate.work import Floats, Work

COMMUNICATIONS = ("collective", "on_demand")
SHARDINGS = ("full", "hybrid", "flat")


@dataclass(frozen=True)
class Simulation:
    """How long ``S`` minibatches take.

    Attributes:
        seconds: ``[S]``.
        computing: ``[S]`` seconds of it in which an average device computes.
    """

    seconds: Floats
    computing: Floats

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a minibatch."""
        return float(self.seconds.mean())

    @property
    def useful(self) -> float:
        """The part of the time in which devices compute."""
        return float(self.computing.mean()) / self.mean_seconds


def simulate_work(
    work: Work, model: Model, cluster: Cluster, *, communication: str = "on_demand", sharding: str = "full"
) -> Simulation:
    """Simulate planned work.

    Args:
        work: What `plan_work` returns.
        model: What is trained.
        cluster: The devices of the plan. Bandwidths, latencies and nodes may differ.
        communication: ``"on_demand"``, or ``"collective"``, where all ranks meet at every unit.
        sharding: ``"full"``: over all ranks, on demand with a copy of the published model on every node. ``"hybrid"``:
            over the ranks of a node. ``"flat"``: over all ranks, with one-sided reads and additions over the network in
            every microbatch, as in the implementation of the paper; this package does not do that.

    Raises:
        ValueError: an unknown name, work for other devices, or unequal numbers of microbatches where ranks meet at
            every unit.
    """
    _check("communication", communication, COMMUNICATIONS)
    _check("sharding", sharding, SHARDINGS)
    planned = work.seconds.shape[2]
    if planned != cluster.devices:
        raise ValueError(
            f"this work was planned for {planned} devices, and the cluster has {cluster.devices}: plan it again, "
            "plan_work(lengths, model, cluster, minibatch_size=4)."
        )
    kept = 0.0
    if communication == "on_demand":
        kept = kept_fraction(model, cluster, sharding, work.most_tokens)
    transfers = Transfers(model, cluster, communication, sharding, kept)
    if transfers.is_collective:
        seconds = with_barriers(transfers, work)
    else:
        seconds = with_one_meeting(transfers, work)
    return Simulation(seconds, work.seconds.sum(1).mean(1))


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: write one of {', '.join(map(repr, known))}.")


def with_barriers(transfers: Transfers, work: Work) -> Floats:
    """``[S]`` seconds of minibatches by collectives: all ranks meet at every unit of every microbatch."""
    if not work.are_equal:
        raise ValueError(
            "this plan gives ranks different numbers of microbatches, and communication='collective' would hang: "
            'write policy="lb_micro", or communication="on_demand".'
        )
    slowest = work.seconds.max(2)  # [S, M]
    together = slowest + _visible(transfers, slowest, is_first=True)  # nothing stays gathered
    seconds: Floats = np.where(work.exists[:, :, 0], together, 0.0).sum(1) + transfers.once().own
    return seconds


def with_one_meeting(transfers: Transfers, work: Work) -> Floats:
    """``[S]`` seconds of minibatches on demand: every rank runs at its own pace until all meet."""
    compute = work.seconds
    factor = busy_owners(transfers, work)[:, None, None]
    own = compute + _visible(transfers, compute, is_first=False, factor=factor)
    first = compute[:, :1]
    own[:, :1] = first + _visible(transfers, first, is_first=True, factor=factor)
    alone = np.where(work.exists, own, 0.0).sum(1)
    once = transfers.once()
    held_up = np.where(work.exists[:, 0], _late(transfers.model, once.arriving, compute[:, 0]), 0.0)
    seconds: Floats = (alone + held_up).max(1) + once.meeting + once.column + once.own
    return seconds


def busy_owners(transfers: Transfers, work: Work) -> Floats:
    """``[S]`` how many times as long bytes take because owners are busy; see Note [A busy owner]."""
    peers = transfers.owners - 1
    if peers < 2:
        return np.ones(len(work.seconds))
    every = 0.0  # seconds of all bytes of a microbatch but the first
    more = 0.0  # what the first one moves beyond that
    for unit in transfers.model.units:
        moved = transfers.of(unit)
        every += unit.count * (moved.forward + moved.backward)
        more += unit.count * (moved.first - moved.forward)
    moving = every * work.exists.sum(1) + more  # [S, D]
    computing = work.seconds.sum(1)
    time = np.maximum(computing.max(1), moving.max(1))
    part = np.minimum(moving.mean(1) / np.maximum(time, np.finfo(float).tiny), 1.0)
    longest = 1 / (1 - (1 - 1 / peers) ** peers)
    factors: Floats = 1 + part * (longest - 1)
    return factors


def _visible(
    transfers: Transfers, compute: Floats, *, is_first: bool, factor: Floats | float = 1.0
) -> Floats:
    """Seconds of communication that are not hidden; see Note [Hidden communication].

    Args:
        transfers: How long bytes take.
        compute: Seconds of microbatches, of any shape.
        is_first: Whether they are the first of their minibatch, which gather what then stays gathered.
        factor: How many times as long bytes take, of the same shape or one number.
    """
    model = transfers.model
    total = np.zeros_like(compute)
    for unit in model.units:
        moved = transfers.of(unit)
        forward = moved.forward * factor
        if is_first:
            forward = moved.first * factor
        backward = moved.backward * factor
        computing = unit.share * compute
        hidden = np.minimum(model.forward * computing, forward)
        hidden += np.minimum((1 - model.forward) * computing, backward)
        total += unit.count * (forward + backward) - (unit.count - 1) * hidden
    return total


def _late(model: Model, arriving: float, first: Floats) -> Floats:
    """``[S, D]`` seconds by which published shards that are still under way hold the first forward pass up.

    They come unit by unit. Of ``U`` units, number ``u`` is there at ``arriving (u+1)/U`` and has ``(U-u)/U`` of the
    pass behind it. The first or the last one decides.
    """
    units = sum(unit.count for unit in model.units)
    last = arriving - model.forward * first * (units - 1) / units
    late: Floats = np.maximum(arriving / units, last)
    return late
