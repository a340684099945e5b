"""The simulator's entry: from lengths, a model and a cluster to seconds, idle time, bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, check_choice
from lightning_odc.simulate.cluster import Cluster
from lightning_odc.simulate.memory import memory_of
from lightning_odc.simulate.model import Model
from lightning_odc.simulate.simulation import Simulation
from lightning_odc.simulate.stealing import steal
from lightning_odc.simulate.steps import Steps, with_barriers, with_one_meeting
from lightning_odc.simulate.transfers import Transfers
from lightning_odc.simulate.work import Plans, Work, plan_work

Communication = Literal["collective", "lockstep", "on_demand"]
COMMUNICATIONS: tuple[str, ...] = get_args(Communication)
Sharding = Literal["full", "hybrid", "flat"]
SHARDINGS: tuple[str, ...] = get_args(Sharding)


def simulate(
    lengths: Any,
    model: Model,
    cluster: Cluster,
    *,
    minibatch_size: int,
    policy: str | Plans = "lb_mini",
    communication: str = "on_demand",
    sharding: str = "full",
    keep_gathered: bool | float = True,
    **planning: Any,
) -> Simulation:
    """Training of minibatches of these lengths: `plan_work`, then `simulate_work`.

    Args:
        lengths: ``[n]`` tokens of the samples of the data set.
        model: What is trained.
        cluster: Cluster to run on.
        minibatch_size: Samples per device and minibatch.
        policy: See `plan_work`.
        communication: See `simulate_work`.
        sharding: See `simulate_work`.
        keep_gathered: See `simulate_work`.
        planning: Further arguments of `plan_work`, such as ``minibatches=100`` or ``max_tokens=8192``.

    Raises:
        ValueError: a value out of range, or an unknown name. The message shows the right line.

    Example:
        >>> from lightning_odc.balance import PolynomialCost
        >>> from lightning_odc.simulate import Unit
        >>> model = Model(PolynomialCost(linear=0.001), (Unit(1e6, 1.0),))
        >>> cluster = Cluster.of("A100", devices=2)
        >>> run = simulate([900, 500, 400, 200], model, cluster, minibatch_size=2, policy="lb_mini")
        >>> round(run.mean_seconds, 1)
        1.0
    """
    work = plan_work(lengths, model, cluster, minibatch_size=minibatch_size, policy=policy, **planning)
    options: Any = {"communication": communication, "sharding": sharding, "keep_gathered": keep_gathered}
    return simulate_work(work, model, cluster, **options)


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
    compute, counts, stolen = _as_run(work, cluster, communication)
    steps = _run(transfers, compute, counts)
    return Simulation(
        seconds=steps.seconds,
        busy=steps.busy,
        idle=steps.idle,
        causes=_causes(work, transfers, steps, compute, counts),
        traffic=transfers.bytes(float(counts.mean())),
        memory=memory,
        samples=int(work.samples.sum()),
        tokens=int(work.tokens.sum()),
        communication=communication,
        policy=work.policy,
        sharding=sharding,
        stolen=stolen,
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


def _as_run(work: Work, cluster: Cluster, communication: str) -> tuple[Floats, Ints, int]:
    """``[S, M, D]`` seconds and ``[S, D]`` counts of what devices really run, and how much of it was stolen."""
    compute = work.seconds * cluster.jitters(work.seconds.shape) if cluster.jitter else work.seconds
    if work.policy != "steal" or communication != "on_demand":
        return compute, work.counts, 0
    ran = [steal(*own, cluster.factors, cluster.row) for own in zip(compute, work.counts, strict=True)]
    most = max(len(seconds) for seconds, _, _ in ran)
    padded = [np.pad(seconds, ((0, most - len(seconds)), (0, 0))) for seconds, _, _ in ran]
    return np.array(padded), np.array([counts for _, counts, _ in ran]), sum(number for _, _, number in ran)


def _run(transfers: Transfers, compute: Floats, counts: Ints) -> Steps:
    exists = np.arange(compute.shape[1])[None, :, None] < counts[:, None, :]
    way = with_one_meeting if transfers.communication == "on_demand" else with_barriers
    return way(transfers.model, transfers, compute, exists)


def _causes(
    work: Work, transfers: Transfers, steps: Steps, compute: Floats, counts: Ints
) -> dict[str, float]:
    """See `Simulation.causes`: each is what remains when the ones before it are taken away."""
    loads = compute.sum(1)  # [S, D]
    mean, busiest = loads.mean(1), loads.max(1)
    useful = np.minimum(work.useful, mean)
    longest = np.minimum(np.maximum(work.longest, mean), busiest)
    inside = steps  # as if the network took no time
    if transfers.cluster.nodes > 1:
        free = transfers.cluster.but(network=float("inf"), network_latency=0.0)
        inside = _run(replace(transfers, cluster=free), compute, counts)
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
