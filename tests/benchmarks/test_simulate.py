"""The simulator: clusters and models, steps by hand, what holds for all lengths, and small runs of its benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hybrid import copies
from benchmarks.simulate import (
    DEVICES,
    Cluster,
    Device,
    Memory,
    Model,
    Simulation,
    Unbalanced,
    Unit,
    Work,
    hosts,
    measured,
    memory_of,
    paper,
    plan_work,
    simulate_work,
    work_of,
)
from benchmarks.simulate import __main__ as command
from benchmarks.simulate.transfers import RECORD_BYTES, Transfers
from lightning_odc.balance import Collation, PolynomialCost, microbatch_costs, plan_minibatch, transformer
from tests.support.refusals import assert_refused


def test_bytes_are_those_that_the_engine_counted(tmp_path: Path, capsys: Any) -> None:
    command.main(["bytes", "--json", str(tmp_path / "simulate.json")])
    rows = json.loads((tmp_path / "simulate.json").read_text())["simulate-bytes"]["rows"]
    assert len(rows) == 8
    # Norms are left out of the parameters, and shards are padded to pages: less than 3 %.
    assert max(abs(row[-1]) for row in rows) < 0.03
    assert "| 2 | 1 | freed |" in capsys.readouterr().out


def test_emulated_devices_are_predicted_without_a_calibration() -> None:
    found = measured.emulated_predictions()
    assert len(found) == 2
    assert all(abs(one.error) < 0.05 for one in found)  # the emulation is within 1 % of its own bound


def test_collectives_of_a_prediction_take_what_they_took_alone() -> None:
    links = {(3, 1000.0): (hosts.Line(0.006, 7e-9), hosts.Line(0.004, 5e-9))}
    cell, size = copies.Cell(3, 1000.0, 1), 2e6
    model = Model(PolynomialCost(linear=1.0), (Unit(size / 4, 1.0),), 4, 4, 4)

    def transfers(variant: str, communication: str) -> Transfers:
        cluster = Cluster(hosts._device(variant, cell, links), 6, 2)
        return Transfers(model, cluster, communication, "full")

    stock = transfers(copies.STOCK, "collective").of(model.units[0])
    assert stock.gather == pytest.approx(0.006 + 7e-9 * size)
    assert stock.add == pytest.approx(0.006 + 7e-9 * 2 * size)
    # Two are under way, which hides half of what an empty one takes.
    once = transfers(copies.FULL, "on_demand").once()
    assert (once.column, once.arriving) == pytest.approx((0.004 / 2 + 5e-9 * size,) * 2)


def test_the_golden_setting_is_near_the_published_one() -> None:
    free = paper.ratios(paper.SETTINGS[0], minibatches=30, free=True)
    assert 1.2 < free[paper.MINI] < 1.45
    assert 1.05 < free[paper.MICRO] < free[paper.MINI]
    alone = paper.ratios(paper.SETTINGS[2], minibatches=5, free=True)
    assert alone[paper.MINI] == pytest.approx(1, abs=1e-9)


INF = float("inf")
FREE = Device(
    *("free", 1.0, 1e12, INF, INF, INF), link_latency=0, network_latency=0, collective_latency=0, meeting=0
)
"""Moves bytes in no time."""


def cluster_of(devices: int, row: int | None = None, **others: Any) -> Cluster:
    """Of free devices, but for what is said."""
    return Cluster(FREE, devices, row).but(**others)


def model_of(*units: Unit, **others: Any) -> Model:
    """A token takes a second; one unit of 12 parameters if none is given."""
    given: dict[str, Any] = {"compute_bytes": 1, "gradient_bytes": 1, "accumulator_bytes": 1}
    return Model(PolynomialCost(linear=1.0), units or (Unit(12, 1.0),), **given | others)


CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
A100 = DEVICES["A100"]


def test_a_config_tells_units_and_seconds() -> None:
    model = Model.from_config(CONFIG, A100, checkpointing=False)
    layer = 4 * 8 * 8 + 3 * 8 * 16
    root, layers = model.units
    assert root.parameters == 2 * 8 * 10  # embedding and head
    assert (layers.parameters, layers.count) == (layer, 3)
    assert root.share == pytest.approx(80 / (80 + 3 * layer))
    assert model.parameters == 160 + 3 * layer
    tokens = np.array([7.0])
    flops = transformer(CONFIG).samples(tokens)
    np.testing.assert_allclose(model.cost.samples(tokens), flops / A100.flops)
    assert model.forward == pytest.approx(1 / 3)


def planned(lengths: Any = (3, 4, 5, 6), **options: Any) -> Any:
    return plan_work(lengths, model_of(), cluster_of(2), **{"minibatch_size": 2, **options})


def test_what_cannot_be_says_the_right_line() -> None:
    cases = [
        (lambda: Cluster.of("B300", 8), "'A100', 'H100', 'H200', 'MI300X'"),
        (lambda: Cluster.of("A100", 0), "devices=8"),
        (lambda: Cluster.of("A100", 12, 8), "devices=16, devices_per_node=8"),
        (lambda: Cluster.of("A100", 2, slowness=[1, 2, 3]), "one per device"),
        (lambda: Cluster.of("A100", 2, slowness=-1), "positive"),
        (lambda: Cluster.of("A100", 2, bandwidth=1), "'bandwidth' is not a field"),
        (lambda: Cluster.of("A100", 2, link=0), "link=1e11"),
        (lambda: Cluster.of("A100", 2, overlap=2), "from 0 to 1"),
        (lambda: Cluster.of("A100", 2, meeting=float("nan")), "not negative"),
        (lambda: Model.from_config({"hidden_size": 8}, A100), "lacks num_hidden_layers"),
        (lambda: Model.from_config(CONFIG | {"num_experts": 8}, A100), "experts"),
        (lambda: Model.from_config(CONFIG, A100, precision="fp8"), "bf16-mixed"),
        (lambda: Model(PolynomialCost(), (Unit(1.0, 0.4),)), "add up to 0.4"),
        (lambda: planned(lengths=[]), "at least one sample"),
        (lambda: planned(lengths=[3, -1]), "sample 1 has length -1"),
        (lambda: planned(lengths=[[3, 4]]), "one length per sample"),
        (lambda: planned(minibatch_size=0), "minibatch_size=8"),
        (lambda: planned(minibatches=0), "minibatches=8"),
        (lambda: planned(policy="best"), "'local_sort', 'lb_micro', 'lb_mini', 'steal'"),
        (lambda: planned(max_tokens=2), "more than max_tokens=2"),
        (lambda: planned(policy=Unbalanced(3)), "a plan is for 3 ranks"),
    ]
    assert_refused(lambda make: make(), cases)


BILLION = 1e9
LARGE = Model(PolynomialCost(), (Unit(7 * BILLION, 1.0),), activation_bytes=1000.0)
"""Seven billion parameters in one unit under bf16-mixed."""


def memory(cluster: Cluster, **how: object) -> Memory:
    return memory_of(LARGE, cluster, max_tokens=8000, **how)  # type: ignore[arg-type]


def test_the_example_of_several_nodes() -> None:
    """4 nodes of 8: 8.8 GB per rank with full sharding, 19 GB with hybrid sharding."""
    cluster = Cluster.of("H100", 32, 8)
    assert (cluster.nodes, cluster.row, cluster.device) == (4, 8, DEVICES["H100"])
    assert memory(cluster, sharding="flat").window == 6 * 7 * BILLION / 32
    for sharding, expected in (("full", 8.75), ("hybrid", 19.25)):
        found = memory(cluster, sharding=sharding)
        states = found.parameters + found.gradients + found.optimizer
        assert (states + found.window) / BILLION == pytest.approx(expected)


def test_what_fits_is_kept() -> None:
    everything = 14 * BILLION
    whole = memory(Cluster.of("a100", 8), padding=0.25)
    assert (whole.kept, whole.fits, whole.limit) == (1, True, 80e9)
    assert (whole.activations, whole.padding) == (8e6, 2e6)
    assert memory(Cluster.of("A100", 8), keep_gathered=0).gathered == everything  # the one unit in use is all
    none = memory(Cluster.of("A100", 2))  # 77 GB of states and window
    assert not none.fits
    assert none.kept == 0
    some = memory(Cluster.of("A100", 8, memory=40e9))
    assert 0 < some.kept < 1


DENSE = Model(PolynomialCost(0.25, 1.0, 3.0, dense=True), (Unit(1, 1.0),))


def test_seconds_are_those_of_the_balance_package() -> None:
    for collation in (Collation(), Collation("padded"), Collation("padded", multiple=8)):
        lengths = np.random.default_rng(0).integers(1, 40, 24)
        plan = plan_minibatch(lengths, 3, 120, cost=DENSE.cost, collation=collation)
        work = work_of([(plan, lengths)], DENSE, cluster_of(3), collation=collation)
        expected = microbatch_costs(plan, lengths, DENSE.cost, collation=collation)
        for device, costs in enumerate(expected):
            np.testing.assert_allclose(work.seconds[0, : len(costs), device], costs)
            assert not work.seconds[0, len(costs) :, device].any()


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


some = settings(deadline=None, max_examples=60, derandomize=True)
LAYERED = Model(
    PolynomialCost(quadratic=1e-9, linear=2e-5, constant=1e-3),
    (Unit(3e8, 0.1), Unit(5e7, 0.9 / 12, 12)),
    activation_bytes=1e4,
)
ANY_LENGTHS = st.lists(st.integers(1, 40_000), min_size=16, max_size=48)
SHARDINGS = st.sampled_from(["full", "hybrid", "flat"])
POLICIES = st.sampled_from(["local_sort", "lb_micro"])
DEVICE = Cluster.of("A100", 1).device


def work_on(cluster: Cluster, lengths: list[int], policy: str = "lb_micro") -> Work:
    return plan_work(lengths, LAYERED, cluster, minibatch_size=2, policy=policy)


def real(slowness: Any = 1.0) -> Cluster:
    return Cluster(DEVICE, 8, 4, slowness)


def ways(cluster: Cluster, work: Work, sharding: str) -> list[Simulation]:
    names = ("collective", "lockstep", "on_demand") if work.are_equal else ("on_demand",)
    return [simulate_work(work, LAYERED, cluster, communication=name, sharding=sharding) for name in names]


@some
@given(ANY_LENGTHS, SHARDINGS, POLICIES, st.lists(st.floats(0.5, 3), min_size=8, max_size=8))
def test_time_is_busy_and_idle_and_never_less_than_the_busiest(lengths, sharding, policy, slowness):
    cluster = real(slowness)
    for found in ways(cluster, work_on(cluster, lengths, policy), sharding):
        np.testing.assert_allclose(found.busy + sum(found.idle.values()), np.tile(found.seconds, (8, 1)).T)
        assert all((waits >= -1e-12 * found.seconds.max()).all() for waits in found.idle.values())
        assert (found.seconds >= found.busy.max(1) * (1 - 1e-12)).all()
        assert sum(found.causes.values()) == pytest.approx(found.mean_seconds)
        assert min(found.causes.values()) >= -1e-9 * found.mean_seconds
        assert 0 <= found.idle_fraction < 1


@some
@given(st.integers(1, 40_000), SHARDINGS, st.sampled_from(["local_sort", "lb_micro", "lb_mini", "steal"]))
def test_equal_lengths_leave_nothing_to_wait_for(length: int, sharding: str, policy: str) -> None:
    free = cluster_of(8, 4)
    for found in ways(free, work_on(free, [length] * 32, policy), sharding):
        assert found.idle_fraction == pytest.approx(0, abs=1e-12)
    cluster = real()
    for found in ways(cluster, work_on(cluster, [length] * 32, policy), sharding):
        assert found.idle.get("units", np.zeros(1)).max() == pytest.approx(0, abs=1e-9)


@some
@given(ANY_LENGTHS, SHARDINGS, st.sampled_from(["link", "network", "collective_link"]), st.floats(1.01, 100))
def test_more_bandwidth_is_never_slower(lengths: list[int], sharding: str, name: str, times: float) -> None:
    before = real().but(collective_link=DEVICE.link)
    after = before.but(**{name: getattr(before.device, name) * times})
    work = work_on(before, lengths)
    pairs = zip(ways(before, work, sharding), ways(after, work, sharding), strict=True)
    assert all((new.seconds <= old.seconds * (1 + 1e-12)).all() for old, new in pairs)
