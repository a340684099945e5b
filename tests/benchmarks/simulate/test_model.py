"""Models: from configurations and from measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import DEVICES, Model, Unit
from lightning_odc.balance import PolynomialCost, transformer

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


def test_a_tied_head_is_counted_once() -> None:
    tied = Model.from_config(CONFIG | {"tie_word_embeddings": True}, A100)
    assert tied.units[0].parameters == 8 * 10


def test_precisions_have_their_bytes() -> None:
    widths = {
        name: (model.parameter_bytes, model.compute_bytes, model.gradient_bytes)
        for name in ("32-true", "bf16-mixed", "bf16-true")
        for model in [Model.from_config(CONFIG, A100, precision=name)]
    }
    assert widths == {"32-true": (4, 4, 4), "bf16-mixed": (4, 2, 2), "bf16-true": (2, 2, 2)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Model.from_config({"hidden_size": 8}, A100), "lacks num_hidden_layers"),
        (lambda: Model.from_config(CONFIG | {"num_experts": 8}, A100), "experts"),
        (lambda: Model.from_config(CONFIG, A100, precision="fp8"), "bf16-mixed"),
        (lambda: Model(PolynomialCost(), (Unit(1.0, 0.4),)), "add up to 0.4"),
    ],
)
def test_what_cannot_be_says_the_right_line(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
