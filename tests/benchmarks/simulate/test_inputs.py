"""What is simulated: devices and clusters, models, and the memory that both give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import (
    DEVICES,
    Cluster,
    Memory,
    Model,
    Unbalanced,
    Unit,
    memory_of,
    plan_work,
    work_of,
)
from lightning_odc.balance import Collation, PolynomialCost, microbatch_costs, plan_minibatch, transformer
from tests.benchmarks.simulate.support import cluster_of, model_of
from tests.support.refusals import assert_refused

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
        (lambda: planned(lengths=[3, -1]), "the length of sample 1 is -1"),
        (lambda: planned(lengths=[[3, 4]]), "one length per sample"),
        (lambda: planned(minibatch_size=0), "minibatch_size=8"),
        (lambda: planned(minibatches=0), "minibatches=8"),
        (lambda: planned(policy="best"), "'local_sort', 'lb_micro', 'lb_mini', 'steal'"),
        (lambda: planned(max_tokens=2), "more than max_tokens=2"),
        (lambda: planned(policy=Unbalanced(3)), "a plan is for 3 ranks"),
    ]
    assert_refused(lambda make: make(), cases)


BILLION = 1e9
MODEL = Model(PolynomialCost(), (Unit(7 * BILLION, 1.0),), activation_bytes=1000.0)
"""Seven billion parameters in one unit under bf16-mixed."""


def memory(cluster: Cluster, **how: object) -> Memory:
    return memory_of(MODEL, cluster, max_tokens=8000, **how)  # type: ignore[arg-type]


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
