"""What is simulated: devices and clusters, models, and the memory that both give."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate import DEVICES, Cluster, Memory, Model, Unit, memory_of
from lightning_odc.balance import PolynomialCost, transformer
from tests.support.refusals import assert_refused

# -- models -----------------------------------------------------------------------------------------------------------


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


def test_checkpointing_computes_the_forward_pass_twice_and_keeps_less() -> None:
    plain, checked = (Model.from_config(CONFIG, A100, checkpointing=on) for on in (False, True))
    tokens = np.array([7.0])
    np.testing.assert_allclose(checked.cost.samples(tokens), plain.cost.samples(tokens) * 4 / 3)
    assert checked.forward == 1 / 4
    # Of a token: two norms and what follows, queries, keys, values and output, the feed-forward layer; 2 bytes each.
    layer = 2 * (4 * 8 + 2 * (8 + 8) + 3 * 16)
    assert plain.activation_bytes == 3 * layer + 10 * (2 + 4 + 4)
    assert checked.activation_bytes == 3 * 2 * 8 + layer + 10 * (2 + 4 + 4)


def test_precisions_have_their_bytes() -> None:
    widths = {
        name: (model.parameter_bytes, model.compute_bytes, model.gradient_bytes)
        for name in ("32-true", "bf16-mixed", "bf16-true")
        for model in [Model.from_config(CONFIG, A100, precision=name)]
    }
    assert widths == {"32-true": (4, 4, 4), "bf16-mixed": (4, 2, 2), "bf16-true": (2, 2, 2)}


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
    ]
    assert_refused(lambda make: make(), cases)


# -- memory -----------------------------------------------------------------------------------------------------------


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


def test_collectives_have_no_window_and_two_units() -> None:
    model = Model(PolynomialCost(), (Unit(3.0, 0.25), Unit(5.0, 0.25, 3)))
    found = memory_of(model, Cluster.of("A100", 2), max_tokens=1, communication="collective")
    assert (found.window, found.gathered, found.kept) == (0, 2 * 2 * 5, 0)


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
