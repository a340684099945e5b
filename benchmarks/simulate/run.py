"""The simulator's entry: from planned work to seconds, idle time, bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.memory import memory_of
from benchmarks.simulate.model import Model
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.steps import Steps, with_barriers, with_one_meeting
from benchmarks.simulate.transfers import Transfers
from benchmarks.simulate.work import Work
from lightning_odc.balance.arrays import Floats, Ints, check_choice

Communication = Literal["collective", "lockstep", "on_demand"]
COMMUNICATIONS: tuple[str, ...] = get_args(Communication)
Sharding = Literal["full", "hybrid", "flat"]
SHARDINGS: tuple[str, ...] = get_args(Sharding)


def simulate_work(
    work: Work,
    model: Model,
    cluster: Cluster,
    *,
    communication: str = "on_demand",
    sharding: str = "full",
    keep_gathered: bool | float = True,
    sum_once: bool = False,
) -> Simulation:
    """Simulate planned work.

    Args:
        work: What `plan_work` returns.
        model: What is trained.
        cluster: The devices of the plan. Bandwidths, latencies and nodes may differ, the devices' slowness may not.
        communication: ``"on_demand"``; ``"collective"``, where all ranks meet at every unit; or ``"lockstep"``,
            one-sided with these meetings.
        sharding: ``"full"``: over all ranks, on demand with a copy of the published model on every node. ``"hybrid"``:
            over the ranks of a node. ``"flat"``: over all ranks, with one-sided reads and additions over the network in
            every microbatch, as in the implementation of the paper; this package does not do that.
        keep_gathered: Whether units stay gathered until the minibatch ends, on demand: ``True`` keeps what fits into
            memory, a number is bytes.
        sum_once: Whether hybrid sharding by collectives sums over nodes once per minibatch, and not in every
            microbatch.

    Raises:
        ValueError: an unknown name, or unequal numbers of microbatches where ranks meet at every unit.
    """
    check_choice("communication", communication, COMMUNICATIONS)
    check_choice("sharding", sharding, SHARDINGS)
    _check_work(work, cluster, communication)
    memory = memory_of(
        model,
        cluster,
        max_tokens=work.most_tokens,
        communication=communication,
        sharding=sharding,
        keep_gathered=keep_gathered,
        padding=work.padding,
    )
    transfers = Transfers(model, cluster, communication, sharding, memory.kept, sum_once)
    steps = _run(transfers, work.seconds, work.counts)
    return Simulation(
        seconds=steps.seconds,
        busy=steps.busy,
        idle=steps.idle,
        causes=_causes(work, transfers, steps),
        traffic=transfers.bytes(float(work.counts.mean())),
        memory=memory,
        samples=int(work.samples.sum()),
        tokens=int(work.tokens.sum()),
        communication=communication,
        policy=work.policy,
        sharding=sharding,
    )


def _check_work(work: Work, cluster: Cluster, communication: str) -> None:
    planned = work.seconds.shape[2]
    if planned != cluster.devices:
        raise ValueError(
            f"this work was planned for {planned} devices, and the cluster has {cluster.devices}: plan it again, "
            "plan_work(lengths, model, cluster, minibatch_size=4)."
        )
    if communication != "on_demand" and not work.are_equal:
        raise ValueError(
            f"policy={work.policy!r} gives ranks different numbers of microbatches, and "
            f'communication={communication!r} would hang: write policy="lb_micro", or communication="on_demand".'
        )


def _run(transfers: Transfers, compute: Floats, counts: Ints) -> Steps:
    exists = np.arange(compute.shape[1])[None, :, None] < counts[:, None, :]
    way = with_one_meeting if transfers.communication == "on_demand" else with_barriers
    return way(transfers.model, transfers, compute, exists)


def _causes(work: Work, transfers: Transfers, steps: Steps) -> dict[str, float]:
    """See `Simulation.causes`: each is what remains when the ones before it are taken away."""
    loads = work.seconds.sum(1)  # [S, D]
    mean, busiest = loads.mean(1), loads.max(1)
    useful = np.minimum(work.useful, mean)
    longest = np.minimum(np.maximum(work.longest, mean), busiest)
    inside = steps  # as if the network took no time
    if transfers.cluster.nodes > 1:
        free = transfers.cluster.but(network=float("inf"), network_latency=0.0)
        inside = _run(replace(transfers, cluster=free), work.seconds, work.counts)
    found = {
        "compute": useful,
        "padding": mean - useful,
        "longest_sample": longest - mean,
        "imbalance": busiest - longest,
        "waits": steps.waits,
    }
    rest = inside.seconds - busiest - steps.waits - inside.step
    network = steps.seconds - inside.seconds
    found |= {"communication": rest, "network": network, "step": np.full(1, inside.step)}
    return {cause: float(seconds.mean()) for cause, seconds in found.items()}
