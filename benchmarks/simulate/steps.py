"""How long a minibatch takes: barriers at every unit, or one meeting; communication beside computing or after it.

Note [Hidden communication]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` gathers the next unit while one computes. With ``n`` equal units, nothing hides the first gather, and
the other ``n - 1`` gathers run while units compute. The visible part of a gather is the time beyond that of the
computing unit. The same holds for gathers and sums of the backward pass together. There is one root unit only: all of
it is visible.

An example: 3 layers of 2 s each in the forward pass, gathers of 3 s. Time is ``3 + 3 + 3 + 2 = 11``: the computing, 6,
and the visible part, ``3 x 3 - 2 x min(2, 3) = 5``. If nothing can be hidden (``overlap=0``), all 9 are visible.

Note [A busy owner]
~~~~~~~~~~~~~~~~~~~
All shards are equally large, so an owner serves as many bytes as an average rank moves. Yet several ranks may ask
the same owner at the same moment, and share its bandwidth. If all ranks move bytes all the time, each from or to a
random one of ``n`` owners, they keep ``1 - (1 - 1/n)^n`` of the owners busy: 1 for one, 0.75 for two, 0.63 for many.
Their transfers take longer by the inverse factor. Ranks that move bytes for a part of the time collide in that part
only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulate.model import Model
from benchmarks.simulate.transfers import Transfers
from lightning_odc.balance.arrays import Bools, Floats


@dataclass(frozen=True)
class Steps:
    """Minibatches, step by step.

    Attributes:
        seconds: ``[S]``.
        busy: ``[S, D]``.
        idle: ``[S, D]`` for each cause.
        waits: ``[S]`` seconds of waiting at every unit that the one meeting on demand would not need.
        step: Seconds of optimizer, settle and publish.
    """

    seconds: Floats
    busy: Floats
    idle: dict[str, Floats]
    waits: Floats
    step: float


Factor = Floats | float


def seen(model: Model, transfers: Transfers, compute: Floats, first: bool, factor: Factor = 1.0) -> Floats:
    """Seconds of communication that are not hidden; see Note [Hidden communication].

    Args:
        model: What is moved.
        transfers: How long it takes.
        compute: Seconds of microbatches, of any shape.
        first: Whether they are the first of their minibatch, which gather what then stays gathered.
        factor: How many times as long bytes take, of the same shape or one number.
    """
    total = np.zeros_like(compute)
    overlap = transfers.cluster.device.overlap
    for unit in model.units:
        moved = transfers.of(unit)
        forward = (moved.gather if first else moved.again) * factor
        regathered = moved.again if transfers.passes(unit) > 1 else 0.0
        backward = (regathered + moved.add) * factor
        both = unit.count * (forward + backward)
        ahead = np.minimum(model.forward * unit.share * compute, forward)
        behind = np.minimum((1 - model.forward) * unit.share * compute, backward)
        total += both - overlap * (unit.count - 1) * (ahead + behind)
    return total


def with_barriers(model: Model, transfers: Transfers, compute: Floats, exists: Bools) -> Steps:
    """Collectives, or lockstep: all ranks meet at every unit of every microbatch.

    Args:
        model: What is moved.
        transfers: How long it takes.
        compute: ``[S, M, D]`` seconds.
        exists: ``[S, M, D]`` where there is a microbatch.
    """
    slowest = compute.max(2)  # [S, M]
    together = slowest + seen(model, transfers, slowest, first=True)
    own = compute + seen(model, transfers, compute, first=True)
    time = np.where(exists[:, :, 0], together, 0.0).sum(1)
    alone = np.where(exists, own, 0.0).sum(1)
    once = transfers.once()
    after = once.own + once.column + once.meeting
    idle = {
        "units": time[:, None] - alone,
        "settle": np.full_like(alone, once.meeting),
        "network": np.full_like(alone, once.column),
    }
    waits = slowest.sum(1) - compute.sum(1).max(1)
    return Steps(time + after, alone + once.own, idle, waits, once.own + once.meeting)


def with_one_meeting(model: Model, transfers: Transfers, compute: Floats, exists: Bools) -> Steps:
    """Simulate on-demand communication: every rank runs at its own pace until all meet; see `with_barriers`."""
    factor = collisions(model, transfers, compute, exists)[:, None, None]
    own = compute + seen(model, transfers, compute, first=False, factor=factor)
    own[:, :1] = compute[:, :1] + seen(model, transfers, compute[:, :1], first=True, factor=factor)
    alone = np.where(exists, own, 0.0).sum(1)
    once = transfers.once()
    begin = np.where(exists[:, 0], _late(model, once.arriving, compute[:, 0]), 0.0)
    end = (alone + begin).max(1)
    idle = {
        "settle": end[:, None] - alone - begin + once.meeting,
        "network": begin + once.column,
    }
    seconds = end + once.meeting + once.column + once.own
    return Steps(seconds, alone + once.own, idle, np.zeros(len(compute)), once.own + once.meeting)


def collisions(model: Model, transfers: Transfers, compute: Floats, exists: Bools) -> Floats:
    """``[S]`` how many times as long bytes take because owners are busy; see Note [A busy owner]."""
    peers = transfers.owners - 1
    if peers < 2:
        return np.ones(len(compute))
    serial = replace(transfers.cluster, device=replace(transfers.cluster.device, overlap=0.0))
    all_of_it = replace(transfers, cluster=serial)
    moved = np.where(exists, seen(model, all_of_it, compute, first=False), 0.0).sum(1)
    moved += seen(model, all_of_it, compute[:, 0], first=True) - seen(
        model, all_of_it, compute[:, 0], first=False
    )
    time = np.maximum(compute.sum(1).max(1), moved.max(1))
    part = moved.mean(1) / np.maximum(time, np.finfo(float).tiny)
    most = 1 / (1 - (1 - 1 / peers) ** peers)
    factors: Floats = 1 + np.minimum(part, 1.0) * (most - 1)
    return factors


def _late(model: Model, arriving: float, first: Floats) -> Floats:
    """``[S, D]`` seconds by which published shards that are still under way hold the first forward pass up.

    They come unit by unit. Of ``U`` units, number ``u`` is there at ``arriving (u+1)/U`` and has ``(U-u)/U`` of the
    pass behind it. The first or the last one decides.
    """
    units = sum(unit.count for unit in model.units)
    last = arriving - model.forward * first * (units - 1) / units
    late: Floats = np.maximum(arriving / units, last)
    return late
