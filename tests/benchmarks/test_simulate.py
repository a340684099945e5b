"""The simulator: minibatches by hand, what holds for all lengths, a small run, and tables that are not renewed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import (
    H100,
    Cluster,
    Device,
    Model,
    Simulation,
    Unit,
    Work,
    plan_work,
    simulate_work,
)
from benchmarks.simulate.memory import kept_fraction
from benchmarks.simulate.simulation import with_one_meeting
from benchmarks.simulate.transfers import RECORD_BYTES, Transfers
from benchmarks.simulate.work import work_of
from lightning_odc.balance import PolynomialCost, transformer
from tests.support.refusals import assert_refused

ROOT = Path(__file__).parent.parent.parent
INF = float("inf")
FREE = Device(
    flops=1.0,
    memory=1e12,
    memory_bandwidth=INF,
    link=INF,
    network=INF,
    link_latency=0,
    network_latency=0,
    collective_latency=0,
    meeting=0,
)
"""Moves bytes in no time."""


def cluster_of(devices: int, row: int | None = None, **others: float) -> Cluster:
    """Of free devices, but for what is said."""
    cluster = Cluster(devices, row or devices, FREE)
    return cluster.but(**others)


def model_of(*units: Unit, **others: Any) -> Model:
    """A token takes a second; one unit of 12 parameters if none is given."""
    widths: dict[str, Any] = {"compute_bytes": 1, "gradient_bytes": 1, "accumulator_bytes": 1}
    polynomial_cost = PolynomialCost(linear=1.0)
    return Model(polynomial_cost, units or (Unit(12, 1.0),), **widths | others)


CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_a_config_tells_units_bytes_and_seconds() -> None:
    model = Model.from_config(CONFIG, H100)
    layer = 4 * 8 * 8 + 3 * 8 * 16
    root, layers = model.units
    assert root.parameters == 2 * 8 * 10  # embedding and head
    assert layers.parameters == layer
    assert layers.count == 3
    expected = pytest.approx(80 / (80 + 3 * layer))
    assert root.share == expected
    assert model.parameters == 160 + 3 * layer
    # The inputs of three layers; of one layer four inputs, four vectors of attention and three of the feed-forward
    # layer; logits in bf16 and twice in fp32.
    expected = 2 * 3 * 8 + 2 * (4 * 8 + 4 * 8 + 3 * 16) + 10 * (2 + 4 + 4)
    assert model.activation_bytes == expected
    tokens = np.array([7.0])
    flops = transformer(CONFIG).samples(tokens)
    samples = model.cost.samples(tokens)
    np.testing.assert_allclose(samples, 4 / 3 * flops / H100.flops)
    tied = Model.from_config({**CONFIG, "tie_word_embeddings": True}, H100)
    assert tied.parameters == 80 + 3 * layer


def planned(lengths: Any = (3, 4, 5, 6), **options: Any) -> Work:
    return plan_work(lengths, model_of(), cluster_of(2), **{"minibatch_size": 2, **options})


PLAN = [[[0], [1]], [[2], [3]]]
LENGTHS = [6, 1, 2, 4]  # device 0: 6 and 1 seconds; device 1: 2 and 4
WORK = work_of([(PLAN, LENGTHS)], model_of())


def test_what_cannot_be_says_the_right_line() -> None:
    uneven = [[[0]], [[1], [2], [3]]]
    cases = [
        (lambda: Cluster(0), "devices=16, devices_per_node=8"),
        (lambda: Cluster(12, 8), "devices=16, devices_per_node=8"),
        (lambda: Model.from_config({"hidden_size": 8}, H100), "lacks num_hidden_layers"),
        (lambda: Model.from_config(CONFIG | {"num_experts": 8}, H100), "experts"),
        (lambda: planned(minibatches=2), "minibatches=1"),
        (lambda: planned(policy="best"), '"local_sort", "lb_micro", "lb_mini" or "steal"'),
        (lambda: planned(max_tokens=2), "more than max_tokens=2"),
        (lambda: run(cluster_of(2), communication="nccl"), "'collective', 'on_demand'"),
        (lambda: run(cluster_of(2), sharding="FULL_SHARD"), "'full', 'hybrid', 'flat'"),
        (lambda: run(cluster_of(2), plan=uneven, communication="collective"), 'policy="lb_micro"'),
        (lambda: simulate_work(WORK, model_of(), cluster_of(4)), "planned for 2 devices"),
    ]
    assert_refused(lambda make: make(), cases)


BILLION = 1e9
LARGE = Model(PolynomialCost(), (Unit(7 * BILLION, 1.0),), activation_bytes=1000.0)
"""Seven billion parameters in one unit under bf16-mixed."""


def test_what_fits_stays_gathered() -> None:
    def kept(devices: int, gigabytes: float) -> float:
        cluster = Cluster(devices, devices).but(memory=gigabytes * BILLION)
        return kept_fraction(LARGE, cluster, "full", 8000)

    assert kept(8, 80) == 1
    assert kept(2, 80) == 0  # 77 GB of states and window
    # On each of 8 devices: states of 16 bytes, a window of 6, 8 MB of activations, and the unit in use.
    beside = 7 * (16 + 6) / 8 + 0.008 + 14
    found = kept(8, 40)
    expected = pytest.approx(0.9 * (40 - beside) / 14)
    assert found == expected


FOUR = {"plan": [[[0]], [[1]], [[2]], [[3]]], "lengths": [12] * 4}
RECORDS = 2**2 * RECORD_BYTES  # seconds of the messages of two nodes at one byte per second
COLLECTIVE = {"communication": "collective"}


def run(cluster: Any, model: Any = None, plan: Any = PLAN, lengths: Any = LENGTHS, **how: Any) -> Simulation:
    model = model or model_of()
    work = work_of([(plan, lengths)], model)
    return simulate_work(work, model, cluster, **how)


def busy_owner(devices: int, moved: float, compute: float) -> float:
    """Note [A busy owner]."""
    peers = devices - 1
    return 1 + moved / compute * (1 / (1 - (1 - 1 / peers) ** peers) - 1)


SECONDS = {
    # Name: the cluster; the model, if it is not one unit of 12 parameters; how it runs; seconds of the minibatch.
    # 12 parameters of one byte over 2 devices: 6 come from the other one, in 6 / 3 = 2 s.
    # A unit that is alone: forward 2; backward again 2, and 2 for its gradients. That twice.
    "collectives": (cluster_of(2, link=3.0), None, COLLECTIVE, 10 + 2 * 6),
    "on demand": (cluster_of(2, link=3.0), None, {}, 7 + 2 + 2 * 2),
    "the root is gathered once": (
        cluster_of(2, link=1.0),
        model_of(Unit(4, 0.5), Unit(4, 0.5)),
        COLLECTIVE,
        10 + 2 * (2 + 2 + 2 + 2 + 2),
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
        cluster_of(2, link=1.0),
        model_of(Unit(4, 1 / 3, 3)),
        {"plan": [[[0]], [[1]]], "lengths": [18, 18], **COLLECTIVE},
        18 + 2 + 4,
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
    # An all-reduce over two nodes: twice 3 s.
    "hybrid sharding by collectives": (
        cluster_of(4, 2, network=1.0),
        None,
        FOUR | {"sharding": "hybrid"} | COLLECTIVE,
        12 + 6,
    ),
    # Rings over 4 ranks: 3/4 of 12 bytes, over the network of both devices of a node: 9 / 2 s; three times.
    "full sharding by collectives": (cluster_of(4, 2, network=1.0), None, FOUR | COLLECTIVE, 12 + 3 * 4.5),
    # 12 bytes over 4 owners: 3 from each. Two of them are on the other node, at half of the network's bandwidth.
    "one-sided reads over the network": (
        cluster_of(4, 2, network=1.0, one_sided_network=0.5),
        None,
        FOUR | {"lengths": [1200] * 4, "sharding": "flat"},
        1200 + 2 * 12 * busy_owner(4, 24, 1200),
    ),
    "a rank without microbatches": (
        cluster_of(2, link=3.0),
        None,
        {"plan": [[[0]], []], "lengths": [4]},
        4 + 2 + 2,
    ),
    # Reads and writes seven times the four bytes of 6 parameters; accumulators of 6 bytes are touched four times, and
    # 6 bytes are published; two ranks meet.
    "optimizer and meeting": (
        cluster_of(2, memory_bandwidth=1.0, meeting=0.5),
        None,
        {},
        7 + 7 * 4 * 6 + 4 * 6 + 6 + 2 * 0.5,
    ),
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_a_minibatch(name: str) -> None:
    cluster, model, how, seconds = SECONDS[name]
    found = run(cluster, model, **how).seconds
    assert found == pytest.approx([seconds])


@pytest.mark.parametrize(("kept", "seconds"), [(0.0, 7 + 2 * 6), (0.5, 7 + 5 + 4), (1.0, 7 + 4 + 2)])
def test_what_stays_gathered_is_not_read_again(kept: float, seconds: float) -> None:
    # All: 2 s for a gather, 2 s for gradients. First microbatch: 2, again 2, 1 or 0, and 2. Second: twice that, and 2.
    transfers = Transfers(model_of(), cluster_of(2, link=3.0), "on_demand", "full", kept)
    found = with_one_meeting(transfers, WORK)
    assert found == pytest.approx([seconds])


def test_collectives_wait_in_every_microbatch_and_on_demand_once() -> None:
    slow = run(cluster_of(2), **COLLECTIVE)
    found = slow.seconds.tolist()
    assert found == [6 + 4]
    expected = (7 + 6) / 2 / 10
    assert slow.useful == expected
    fast = run(cluster_of(2))
    assert fast.seconds.tolist() == [7]
    expected = (7 + 6) / 2 / 7
    assert fast.useful == expected


some = settings(deadline=None, max_examples=60, derandomize=True)
LAYERED = Model(
    PolynomialCost(quadratic=1e-9, linear=2e-5, constant=1e-3),
    (Unit(3e8, 0.1), Unit(5e7, 0.9 / 12, 12)),
    activation_bytes=1e4,
)
REAL = Cluster(8, 4)
ANY_LENGTHS = st.lists(st.integers(1, 40_000), min_size=16, max_size=48)
SHARDINGS = st.sampled_from(["full", "hybrid", "flat"])
POLICIES = st.sampled_from(["local_sort", "lb_micro", "lb_mini"])


def ways(cluster: Cluster, lengths: list[int], policy: Any, sharding: str) -> list[Simulation]:
    work = plan_work(lengths, LAYERED, cluster, minibatch_size=2, policy=policy)
    names = ["on_demand"]
    if work.are_equal:
        names.append("collective")
    return [simulate_work(work, LAYERED, cluster, communication=name, sharding=sharding) for name in names]


@some
@given(ANY_LENGTHS, SHARDINGS, POLICIES)
def test_no_minibatch_is_faster_than_its_busiest_device(lengths, sharding, policy):
    work = plan_work(lengths, LAYERED, REAL, minibatch_size=2, policy=policy)
    busiest = work.seconds.sum(1).max(1)
    for found in ways(REAL, lengths, policy, sharding):
        assert (found.seconds > busiest).all()
        assert 0 < found.useful < 1


@some
@given(st.integers(1, 40_000), SHARDINGS, POLICIES)
def test_equal_lengths_leave_nothing_to_wait_for(length: int, sharding: str, policy: str) -> None:
    lengths = [length] * 32
    cluster = cluster_of(8, 4)
    for found in ways(cluster, lengths, policy, sharding):
        expected = pytest.approx(1, abs=1e-12)
        assert found.useful == expected


@some
@given(ANY_LENGTHS, SHARDINGS, st.sampled_from(["link", "network"]), st.floats(1.01, 100))
def test_more_bandwidth_is_never_slower(lengths: list[int], sharding: str, name: str, times: float) -> None:
    faster = REAL.but(**{name: getattr(REAL.device, name) * times})
    pairs = zip(
        ways(REAL, lengths, "lb_micro", sharding), ways(faster, lengths, "lb_micro", sharding), strict=True
    )
    for old, new in pairs:
        assert (new.seconds <= old.seconds * (1 + 1e-12)).all()


def rows_on(page: str, table: str) -> list[list[str]]:
    """The cells of a table of a page, heads first."""
    text = (ROOT / "docs" / page).read_text()
    part = text.partition(f"<!-- table: {table} -->")[2].partition("<!-- end")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    heads, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [heads, *rows]


RECORDED = json.loads((ROOT / "docs" / "data" / "simulate.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_a_table_that_is_not_renewed_stands_as_it_was_and_names_its_commit(name: str) -> None:
    record = RECORDED[name]
    expected = [record["columns"], *record["rows"]]
    assert rows_on(record["page"], name) == expected
    text = (ROOT / "docs" / record["page"]).read_text()
    found = " ".join(text.split())
    assert f"commit `{record['commit']}`" in found
