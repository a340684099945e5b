"""Steps by hand: barriers, one meeting, hidden and visible communication, several nodes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import Simulation, Unit, simulate_work, work_of
from benchmarks.simulate.transfers import MAILBOX_BYTES, RECORD_BYTES, Transfers
from tests.benchmarks.simulate.support import FREE, cluster_of, model_of

PLAN = [[[0], [1]], [[2], [3]]]
LENGTHS = [6, 1, 2, 4]  # device 0: 6 and 1 seconds; device 1: 2 and 4


def run(cluster: Any, model: Any = None, plan: Any = PLAN, lengths: Any = LENGTHS, **how: Any) -> Simulation:
    model = model or model_of()
    return simulate_work(
        work_of([(plan, lengths)], model, cluster, policy=how.pop("policy", "x")), model, cluster, **how
    )


def test_collectives_wait_in_every_microbatch_and_on_demand_once() -> None:
    slow = run(cluster_of(2), communication="collective")
    assert slow.seconds.tolist() == [6 + 4]
    assert slow.idle["units"].tolist() == [[3, 4]]
    assert slow.busy.tolist() == [[7, 6]]
    fast = run(cluster_of(2), communication="on_demand")
    assert fast.seconds.tolist() == [7]
    assert fast.idle["settle"].tolist() == [[0, 1]]
    assert fast.idle_fraction == pytest.approx(1 / 14)


def test_causes_of_a_minibatch() -> None:
    causes = run(cluster_of(2), communication="collective").causes
    assert causes == {
        "compute": 6.5,
        "padding": 0,
        "longest_sample": 0,
        "imbalance": 0.5,
        "waits": 3,
        "communication": 0,
        "network": 0,
        "step": 0,
    }
    alone = run(cluster_of(2), plan=[[[0]], [[1]]], lengths=[6, 1]).causes
    assert (alone["compute"], alone["longest_sample"], alone["imbalance"]) == (3.5, 2.5, 0)


def test_bytes_that_nothing_hides() -> None:
    # 12 parameters of one byte over 2 devices: 6 come from the other one, in 6 / 3 = 2 s.
    # A unit that is alone: forward 2; backward again 2, and 2 for its gradients. That twice.
    collective = run(cluster_of(2, collective_link=3.0), communication="collective")
    assert collective.seconds.tolist() == [10 + 2 * 6]
    assert collective.causes["communication"] == 12
    freed = run(cluster_of(2, link=3.0), communication="on_demand", keep_gathered=0)
    assert freed.seconds.tolist() == [7 + 2 * 6]
    kept = run(cluster_of(2, link=3.0), communication="on_demand")
    assert kept.seconds.tolist() == [7 + 2 + 2 * 2]
    lockstep = run(cluster_of(2, link=3.0), communication="lockstep")
    assert lockstep.seconds.tolist() == [10 + 2 * 6]


def test_a_part_that_is_kept_is_read_once() -> None:
    half = run(cluster_of(2, link=3.0), keep_gathered=6)
    assert half.memory.kept == 0.5
    # First microbatch: 2, again 1, gradients 2; the second one: 1, 1 and 2.
    assert half.seconds.tolist() == [7 + 5 + 4]


def test_latencies_count_once_per_owner() -> None:
    plan, lengths = [[[0]], [[1]], [[2]]], [5, 5, 5]
    read = run(cluster_of(3, link_latency=0.25), plan=plan, lengths=lengths, communication="on_demand")
    assert read.seconds.tolist() == [5 + 2 * 2 * 0.25 * factor_of(3, 1.0, 5)]
    ring = run(cluster_of(3, collective_latency=0.25), plan=plan, lengths=lengths, communication="collective")
    assert ring.seconds.tolist() == [5 + 3 * 2 * 0.25]


def factor_of(devices: int, moved: float, compute: float) -> float:
    """Note [A busy owner]."""
    peers = devices - 1
    return 1 + moved / compute * (1 / (1 - (1 - 1 / peers) ** peers) - 1)


def test_ranks_that_ask_the_same_owner_take_longer() -> None:
    # 12 bytes over 3 devices: 8 come from others, in 1 s; gathered once, added once: 2 s of 10.
    plan, lengths = [[[0]], [[1]], [[2]]], [10, 10, 10]
    seconds = run(cluster_of(3, link=8.0), plan=plan, lengths=lengths).seconds
    assert seconds == pytest.approx([10 + 2 * factor_of(3, 2, 10)])


def test_gathers_hide_behind_computing() -> None:
    # Three layers of 4 parameters, 2 bytes of each from the other device: 2 s. The forward pass takes 2 s of each
    # layer, the backward pass 4, and moves 2 + 2.
    model = model_of(Unit(4, 1 / 3, 3))
    cluster = cluster_of(2, collective_link=1.0, overlap=1.0)
    plan, lengths = [[[0]], [[1]]], [18, 18]
    found = run(cluster, model, plan, lengths, communication="collective").seconds
    # Forward: 6 s, of which the first gather, 2, hides behind nothing. Backward: 12 s of bytes, 8 of them hidden.
    assert found == pytest.approx([18 + 2 + 4])
    exposed = run(cluster.but(overlap=0.0), model, plan, lengths, communication="collective").seconds
    assert exposed == pytest.approx([18 + 6 + 12])


def test_the_root_unit_is_gathered_once_per_microbatch() -> None:
    model = model_of(Unit(4, 0.5), Unit(4, 0.5))
    found = run(cluster_of(2, collective_link=1.0), model, communication="collective")
    assert found.seconds.tolist() == [10 + 2 * (2 + 2 + 2 + 2 + 2)]
    assert found.traffic == {"read": 0, "added": 0, "collective": 2 * 10, "network": 0}


def test_bytes_of_a_minibatch() -> None:
    model = model_of(Unit(4, 0.5), Unit(4, 0.5), compute_bytes=2)
    kept = run(cluster_of(2), model).traffic
    assert (kept["read"], kept["added"]) == (2 * 8 / 2, 2 * 8 / 2)
    freed = run(cluster_of(2), model, keep_gathered=0).traffic
    assert freed["read"] == 2 * 4 * 2 / 2 + 4 * 4 * 2 / 2


def test_frozen_parameters_are_neither_added_nor_read_again() -> None:
    model = model_of(Unit(12, 1.0, trained=0.25))
    assert run(cluster_of(2), model).traffic["read"] == 3 / 2
    assert run(cluster_of(2), model).traffic["added"] == 2 * 3 / 2
    assert run(cluster_of(2, link=3.0), model).seconds.tolist() == [7 + 0.5 + 2 * 0.5]
    assert run(cluster_of(2), model, communication="collective").traffic["collective"] == 2 * (24 + 3) / 2


FOUR = [[[0]], [[1]], [[2]], [[3]]]
RECORDS = 2**2 * RECORD_BYTES  # seconds of the messages of two nodes at one byte per second


def test_copies_send_their_bytes_once() -> None:
    # 2 nodes of 2: a rank has 6 of a node's 12 parameters and gets half of their sums from the other node: 3 s.
    # Its shards travel in the background for 3 s, of which the forward pass, 4 s, hides all.
    cluster = cluster_of(4, 2, network=1.0)
    found = run(cluster, plan=FOUR, lengths=[12] * 4)
    # The one unit is there only when all of it is: 3 s.
    assert found.seconds.tolist() == [12 + 3 + 3 + RECORDS]
    assert found.idle["network"].tolist() == [[6, 6, 6, 6]]
    assert (found.causes["network"], found.causes["communication"]) == (6 + RECORDS, 0)
    assert found.traffic["network"] == 2 * 12 / 2 / 2
    layers = run(cluster, model_of(Unit(3, 1 / 4, 4)), plan=FOUR, lengths=[12] * 4)
    assert layers.seconds == pytest.approx([12 + 3 + 3 / 4 + RECORDS])  # the first of four units


def test_hybrid_sharding_sums_over_nodes() -> None:
    cluster = cluster_of(4, 2, network=1.0)
    demand = run(cluster, plan=FOUR, lengths=[12] * 4, sharding="hybrid")
    assert demand.seconds.tolist() == [12 + 6 + RECORDS]
    plan = [[[0], [1]] for _ in range(4)]
    often = run(cluster, plan=plan, lengths=[6, 6], communication="collective", sharding="hybrid")
    assert often.seconds.tolist() == [12 + 2 * 6]
    assert often.traffic["network"] == 2 * 6
    once = run(
        cluster, plan=plan, lengths=[6, 6], communication="collective", sharding="hybrid", sum_once=True
    )
    assert once.seconds.tolist() == [12 + 6]
    assert once.traffic["network"] == 6


def test_full_sharding_by_collectives_goes_over_the_network_every_time() -> None:
    # Rings over 4 ranks: 3/4 of 12 bytes, over the network of both devices of a node: 9 / 2 s; three times.
    found = run(cluster_of(4, 2, network=1.0), plan=FOUR, lengths=[12] * 4, communication="collective")
    assert found.seconds.tolist() == [12 + 3 * 4.5]
    assert found.traffic["network"] == 3 * 4.5


def test_one_sided_reads_over_the_network() -> None:
    # 12 bytes over 4 owners: 3 from each. Two of them are on the other node, at half of the network's bandwidth.
    cluster = cluster_of(4, 2, network=1.0, one_sided_network=0.5)
    found = run(cluster, plan=FOUR, lengths=[1200] * 4, sharding="flat", keep_gathered=0)
    assert found.seconds == pytest.approx([1200 + 3 * 12 * factor_of(4, 36, 1200)])
    assert found.traffic["network"] == 3 * 6


def test_an_optimizer_step_and_the_meeting() -> None:
    model = model_of(Unit(12, 1.0), parameter_bytes=4)
    cluster = cluster_of(2, memory_bandwidth=1.0, meeting=0.5)
    slow = run(cluster, model, communication="collective")
    assert slow.causes["step"] == 7 * 4 * 12 / 2
    fast = run(cluster, model)
    # Accumulators of 6 bytes are touched four times, and 6 bytes are published; two ranks meet.
    assert fast.causes["step"] == 7 * 4 * 12 / 2 + 4 * 6 + 6 + 2 * 0.5
    assert fast.idle["settle"].tolist() == [[1, 2]]


def test_the_meeting_over_nodes_grows_with_their_square() -> None:
    nodes = 2 * MAILBOX_BYTES // RECORD_BYTES
    cluster = cluster_of(2 * nodes, 2, network=1e6, meeting=1.0)
    once = Transfers(model_of(), cluster, "on_demand", "hybrid").once()
    assert once.meeting == 2 * 1.0 * 2 + nodes * 1.0 + nodes**2 * RECORD_BYTES / 1e6


def test_a_rank_without_microbatches_waits_for_the_others() -> None:
    found = run(cluster_of(2, link=3.0), plan=[[[0]], []], lengths=[4])
    assert found.seconds.tolist() == [4 + 2 + 2]
    assert found.idle["settle"].tolist() == [[0, 8]]


def test_throughput() -> None:
    found = run(cluster_of(2))
    assert (found.samples_per_second, found.tokens_per_second) == (4 / 7, 13 / 7)
    assert (found.total_seconds, found.mean_seconds) == (7, 7)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"communication": "nccl"}, "'collective', 'lockstep', 'on_demand'"),
        ({"sharding": "FULL_SHARD"}, "'full', 'hybrid', 'flat'"),
        ({"plan": [[[0]], [[1], [2], [3]]], "communication": "collective"}, 'policy="lb_micro"'),
    ],
)
def test_what_cannot_be_simulated_says_the_right_line(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(cluster_of(2), **how)


def test_work_for_other_devices_is_refused() -> None:
    work = work_of([(PLAN, LENGTHS)], model_of(), cluster_of(2))
    with pytest.raises(ValueError, match="planned for 2 devices"):
        simulate_work(work, model_of(), cluster_of(4))
    assert FREE.collectives == float("inf")


def test_gloo_sends_twice_the_bytes_of_a_reduce_scatter() -> None:
    cluster = cluster_of(2, collective_link=3.0, sum_bytes=2.0)
    found = run(cluster, communication="collective")
    assert found.seconds.tolist() == [10 + 2 * (2 + 2 + 4)]
    assert found.traffic["collective"] == 2 * 4 * 12 / 2
    assert run(cluster).traffic["added"] == 2 * 12 / 2
