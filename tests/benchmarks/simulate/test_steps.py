"""Steps by hand: barriers, one meeting, hidden and visible communication, several nodes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import Simulation, Unit, simulate_work, work_of
from benchmarks.simulate.transfers import MAILBOX_BYTES, RECORD_BYTES, Transfers
from tests.benchmarks.simulate.support import cluster_of, model_of

PLAN = [[[0], [1]], [[2], [3]]]
LENGTHS = [6, 1, 2, 4]  # device 0: 6 and 1 seconds; device 1: 2 and 4
FOUR = {"plan": [[[0]], [[1]], [[2]], [[3]]], "lengths": [12] * 4}
RECORDS = 2**2 * RECORD_BYTES  # seconds of the messages of two nodes at one byte per second
COLLECTIVE = {"communication": "collective"}


def run(cluster: Any, model: Any = None, plan: Any = PLAN, lengths: Any = LENGTHS, **how: Any) -> Simulation:
    model = model or model_of()
    work = work_of([(plan, lengths)], model, cluster, policy="x")
    return simulate_work(work, model, cluster, **how)


def busy_owner(devices: int, moved: float, compute: float) -> float:
    """Note [A busy owner]."""
    peers = devices - 1
    return 1 + moved / compute * (1 / (1 - (1 - 1 / peers) ** peers) - 1)


SECONDS = {
    # Name: the cluster; the model, if it is not one unit of 12 parameters; how it runs; seconds of the minibatch.
    # 12 parameters of one byte over 2 devices: 6 come from the other one, in 6 / 3 = 2 s.
    # A unit that is alone: forward 2; backward again 2, and 2 for its gradients. That twice.
    "collectives": (cluster_of(2, collective_link=3.0), None, COLLECTIVE, 10 + 2 * 6),
    "freed": (cluster_of(2, link=3.0), None, {"keep_gathered": 0}, 7 + 2 * 6),
    "kept": (cluster_of(2, link=3.0), None, {}, 7 + 2 + 2 * 2),
    "lockstep": (cluster_of(2, link=3.0), None, {"communication": "lockstep"}, 10 + 2 * 6),
    # First microbatch: 2, again 1, gradients 2; the second one: 1, 1 and 2.
    "a half is kept": (cluster_of(2, link=3.0), None, {"keep_gathered": 6}, 7 + 5 + 4),
    "frozen": (cluster_of(2, link=3.0), model_of(Unit(12, 1.0, trained=0.25)), {}, 7 + 0.5 + 2 * 0.5),
    "the root is gathered once": (
        cluster_of(2, collective_link=1.0),
        model_of(Unit(4, 0.5), Unit(4, 0.5)),
        COLLECTIVE,
        10 + 2 * (2 + 2 + 2 + 2 + 2),
    ),
    "gloo sends twice the bytes": (
        cluster_of(2, collective_link=3.0, sum_bytes=2.0),
        None,
        COLLECTIVE,
        10 + 2 * (2 + 2 + 4),
    ),
    "latency of a ring": (
        cluster_of(3, collective_latency=0.25),
        None,
        {"plan": [[[0]], [[1]], [[2]]], "lengths": [5] * 3, **COLLECTIVE},
        5 + 3 * 2 * 0.25,
    ),
    "latency once per owner": (
        cluster_of(3, link_latency=0.25),
        None,
        {"plan": [[[0]], [[1]], [[2]]], "lengths": [5] * 3},
        5 + 2 * 2 * 0.25 * busy_owner(3, 1.0, 5),
    ),
    # 12 bytes over 3 devices: 8 come from others, in 1 s; gathered once, added once: 2 s of 10.
    "ranks ask the same owner": (
        cluster_of(3, link=8.0),
        None,
        {"plan": [[[0]], [[1]], [[2]]], "lengths": [10] * 3},
        10 + 2 * busy_owner(3, 2, 10),
    ),
    # Three layers of 4 parameters, 2 bytes of each from the other device: 2 s. The forward pass takes 2 s of each
    # layer, the backward pass 4, and moves 2 + 2. Forward: 6 s, of which the first gather, 2, hides behind nothing.
    # Backward: 12 s of bytes, 8 of them hidden.
    "gathers hide": (
        cluster_of(2, collective_link=1.0, overlap=1.0),
        model_of(Unit(4, 1 / 3, 3)),
        {"plan": [[[0]], [[1]]], "lengths": [18, 18], **COLLECTIVE},
        18 + 2 + 4,
    ),
    "gathers do not hide": (
        cluster_of(2, collective_link=1.0, overlap=0.0),
        model_of(Unit(4, 1 / 3, 3)),
        {"plan": [[[0]], [[1]]], "lengths": [18, 18], **COLLECTIVE},
        18 + 6 + 12,
    ),
    # 2 nodes of 2: a rank has 6 of a node's 12 parameters and gets half of their sums from the other node: 3 s.
    # Its shards travel in the background for 3 s, and the one unit is there only when all of it is.
    "copies": (cluster_of(4, 2, network=1.0), None, FOUR, 12 + 3 + 3 + RECORDS),
    "copies, the first of four units": (
        cluster_of(4, 2, network=1.0),
        model_of(Unit(3, 1 / 4, 4)),
        FOUR,
        12 + 3 + 3 / 4 + RECORDS,
    ),
    "hybrid": (cluster_of(4, 2, network=1.0), None, FOUR | {"sharding": "hybrid"}, 12 + 6 + RECORDS),
    # Rings over 4 ranks: 3/4 of 12 bytes, over the network of both devices of a node: 9 / 2 s; three times.
    "full sharding by collectives": (cluster_of(4, 2, network=1.0), None, FOUR | COLLECTIVE, 12 + 3 * 4.5),
    # 12 bytes over 4 owners: 3 from each. Two of them are on the other node, at half of the network's bandwidth.
    "one-sided reads over the network": (
        cluster_of(4, 2, network=1.0, one_sided_network=0.5),
        None,
        FOUR | {"lengths": [1200] * 4, "sharding": "flat", "keep_gathered": 0},
        1200 + 3 * 12 * busy_owner(4, 36, 1200),
    ),
    "a rank without microbatches": (
        cluster_of(2, link=3.0),
        None,
        {"plan": [[[0]], []], "lengths": [4]},
        4 + 2 + 2,
    ),
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_a_minibatch(name: str) -> None:
    cluster, model, how, seconds = SECONDS[name]
    assert run(cluster, model, **how).seconds == pytest.approx([seconds])


def test_collectives_wait_in_every_microbatch_and_on_demand_once() -> None:
    slow = run(cluster_of(2), **COLLECTIVE)
    assert slow.seconds.tolist() == [6 + 4]
    assert slow.idle["units"].tolist() == [[3, 4]]
    assert slow.busy.tolist() == [[7, 6]]
    fast = run(cluster_of(2))
    assert fast.seconds.tolist() == [7]
    assert fast.idle["settle"].tolist() == [[0, 1]]
    assert fast.idle_fraction == pytest.approx(1 / 14)
    assert (fast.samples_per_second, fast.tokens_per_second) == (4 / 7, 13 / 7)


def test_causes_of_a_minibatch() -> None:
    causes = run(cluster_of(2), **COLLECTIVE).causes
    assert {name: cause for name, cause in causes.items() if cause} == {
        "compute": 6.5,
        "imbalance": 0.5,
        "waits": 3,
    }
    alone = run(cluster_of(2), plan=[[[0]], [[1]]], lengths=[6, 1]).causes
    assert (alone["compute"], alone["longest_sample"], alone["imbalance"]) == (3.5, 2.5, 0)
    copies = run(cluster_of(4, 2, network=1.0), **FOUR)
    assert copies.idle["network"].tolist() == [[6, 6, 6, 6]]
    assert (copies.causes["network"], copies.causes["communication"]) == (6 + RECORDS, 0)


def test_bytes_of_a_minibatch() -> None:
    model = model_of(Unit(4, 0.5), Unit(4, 0.5), compute_bytes=2)
    kept = run(cluster_of(2), model).traffic
    assert (kept["read"], kept["added"]) == (2 * 8 / 2, 2 * 8 / 2)
    freed = run(cluster_of(2), model, keep_gathered=0).traffic
    assert freed["read"] == 2 * 4 * 2 / 2 + 4 * 4 * 2 / 2
    frozen = model_of(Unit(12, 1.0, trained=0.25))
    one_sided, collective = (run(cluster_of(2), frozen, **how).traffic for how in ({}, COLLECTIVE))
    assert (one_sided["read"], one_sided["added"]) == (3 / 2, 2 * 3 / 2)
    assert collective["collective"] == 2 * (24 + 3) / 2
    summed = run(cluster_of(2, sum_bytes=2.0), **COLLECTIVE).traffic
    assert summed["collective"] == 2 * 4 * 12 / 2


def test_bytes_between_nodes() -> None:
    def sent(**how: Any) -> float:
        return run(cluster_of(4, 2, network=1.0), **how).traffic["network"]

    assert sent(**FOUR) == 2 * 12 / 2 / 2
    assert sent(**FOUR, **COLLECTIVE) == 3 * 4.5
    assert sent(**FOUR, sharding="flat", keep_gathered=0) == 3 * 6
    often = {"plan": [[[0], [1]]] * 4, "lengths": [6, 6], "sharding": "hybrid", **COLLECTIVE}
    assert (sent(**often), sent(**often, sum_once=True)) == (2 * 6, 6)


def test_an_optimizer_step_and_the_meeting() -> None:
    model = model_of(Unit(12, 1.0), parameter_bytes=4)
    cluster = cluster_of(2, memory_bandwidth=1.0, meeting=0.5)
    assert run(cluster, model, **COLLECTIVE).causes["step"] == 7 * 4 * 12 / 2
    fast = run(cluster, model)
    # Accumulators of 6 bytes are touched four times, and 6 bytes are published; two ranks meet.
    assert fast.causes["step"] == 7 * 4 * 12 / 2 + 4 * 6 + 6 + 2 * 0.5
    assert fast.idle["settle"].tolist() == [[1, 2]]


def test_the_meeting_over_nodes_grows_with_their_square() -> None:
    nodes = 2 * MAILBOX_BYTES // RECORD_BYTES
    cluster = cluster_of(2 * nodes, 2, network=1e6, meeting=1.0)
    once = Transfers(model_of(), cluster, "on_demand", "hybrid").once()
    assert once.meeting == 2 * 1.0 * 2 + nodes * 1.0 + nodes**2 * RECORD_BYTES / 1e6


def test_what_cannot_be_simulated_says_the_right_line() -> None:
    for how, says in (
        ({"communication": "nccl"}, "'collective', 'lockstep', 'on_demand'"),
        ({"sharding": "FULL_SHARD"}, "'full', 'hybrid', 'flat'"),
        ({"plan": [[[0]], [[1], [2], [3]]], "communication": "collective"}, 'policy="lb_micro"'),
    ):
        with pytest.raises(ValueError, match=says):
            run(cluster_of(2), **how)

    work = work_of([(PLAN, LENGTHS)], model_of(), cluster_of(2))
    with pytest.raises(ValueError, match="planned for 2 devices"):
        simulate_work(work, model_of(), cluster_of(4))
