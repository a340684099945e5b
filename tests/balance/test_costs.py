"""Costs: their values, and floating-point operations counted by torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_odc.balance import (
    FunctionCost,
    PolynomialCost,
    microbatch_costs,
    quadratic,
    resolve_cost,
    tokens,
    transformer,
    with_speeds,
)
from lightning_odc.balance.costs import CROSSOVER, MinibatchCosts
from tests.support.refusals import assert_refused

LENGTHS = np.array([1.0, 10.0, 1000.0])
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def test_tokens_and_quadratic() -> None:
    assert tokens().samples(LENGTHS).tolist() == [1, 10, 1000]
    assert quadratic(crossover=100).samples(LENGTHS).tolist() == pytest.approx([1.01, 11, 11_000])
    assert quadratic().samples(np.array([float(CROSSOVER)]))[0] == pytest.approx(2 * CROSSOVER)
    x = LENGTHS / 32_000
    fit = 1.982122 * x**2 + 2.611821 * x  # the paper's
    np.testing.assert_allclose(quadratic().samples(LENGTHS) / fit, 32_000 / 2.611821, rtol=1e-4)


def test_dense_attention_pays_for_the_square_of_all_tokens() -> None:
    plan = [[[0, 1, 2], [3]]]
    lengths = [30, 20, 10, 40]
    alone, dense = (microbatch_costs(plan, lengths, quadratic(100, 5, dense)) for dense in (False, True))
    assert alone == [[60 + 14 + 5, 40 + 16 + 5]]
    assert dense == [[60 + 36 + 5, 40 + 16 + 5]]
    slow = microbatch_costs(plan, lengths, with_speeds(quadratic(100, 5, dense=True), [0.5]))
    assert slow == [[2 * (60 + 36 + 5), 2 * (40 + 16 + 5)]]


class BelowZero(PolynomialCost):
    """A cost of the user's own."""

    overhead = -1.0  # type: ignore[assignment]


def test_refusals() -> None:
    cases = [
        (lambda: PolynomialCost(-1, 1), r"quadratic=-1\) cannot work.*0.0 \(a finite number of at least 0\)"),
        (lambda: PolynomialCost(0, 0), "quadratic or linear must be positive"),
        (lambda: PolynomialCost(1, float("nan")), "finite"),
        (lambda: quadratic(0), "crossover=0.*a positive number"),
        (lambda: with_speeds("tokens", [1, 0]), r"speeds=\[1, 0\]\) cannot work"),
        (lambda: with_speeds("tokens", []), "one per rank"),
        (lambda: with_speeds("bytes", [1]), "'bytes' is unknown"),
        (lambda: resolve_cost("fitted"), r'BalancedDataLoader\(..., cost="auto"\)'),
        (lambda: FunctionCost(np.sqrt, -1.0), r"overhead=-1.0\) cannot work"),
        (lambda: MinibatchCosts.of(BelowZero(), np.array([3]), 2), "overhead.*not negative"),
        (lambda: transformer({"hidden_size": 64}), "lacks num_hidden_layers, num_attention_heads"),
        (lambda: transformer(SMALL | {"num_local_experts": 8}), "dense decoder-only.*lambda lengths"),
        (lambda: transformer(SMALL | {"is_encoder_decoder": True}), "dense decoder-only"),
        (lambda: transformer(SMALL | {"layer_types": ["linear_attention"] * 3}), "linear_attention"),
    ]
    assert_refused(lambda make: make(), cases)


class Attention(torch.nn.Module):
    """Grouped-query attention over full score matrices."""

    def __init__(self, hidden: int, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.head_dim = head_dim
        self.q = torch.nn.Linear(hidden, heads * head_dim, bias=False)
        self.k, self.v = (torch.nn.Linear(hidden, groups * head_dim, bias=False) for _ in range(2))
        self.o = torch.nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(1, (self.heads, self.head_dim)).transpose(0, 1)
        k, v = (
            layer(x).unflatten(1, (self.groups, self.head_dim)).transpose(0, 1) for layer in (self.k, self.v)
        )
        k, v = (part.repeat_interleave(self.heads // self.groups, 0) for part in (k, v))
        return self.o((torch.softmax(q @ k.mT, -1) @ v).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("gated", [False, True])
def test_operations_are_those_that_torch_counts(gated: bool) -> None:
    hidden = 64
    heads = 4
    groups = 2
    head_dim = 8
    wide = 96
    vocabulary = 50
    attention = Attention(hidden, heads, groups, head_dim)
    up, gate = (torch.nn.Linear(hidden, wide, bias=False) for _ in range(2))
    down = torch.nn.Linear(wide, hidden, bias=False)
    head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def counted(length: int) -> int:
        with FlopCounterMode(display=False) as counter:
            x = attention(torch.randn(length, hidden, requires_grad=True))
            if gated:
                inner = up(x) * gate(x)
            else:
                inner = up(x)
            x = down(inner)
            head(x).sum().backward()
        return int(counter.get_total_flops())

    config: dict[str, int | str] = {
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
    }
    if gated:
        config["hidden_act"] = "silu"
    cost = transformer(config)
    for length in (7, 32):
        # torch counts all pairs here, the cost only those that a causal model needs.
        full = cost.per_token * length + cost.per_pair * length * length
        assert full == counted(length)
        causal = cost.samples(np.array([float(length)]))[0]
        assert full - causal == pytest.approx(cost.per_pair * length * (length - 1) / 2)


def test_gpt2_names_and_defaults() -> None:
    gpt2 = transformer({"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": None, "vocab_size": 100})
    config = SMALL | {"intermediate_size": 256, "num_key_value_heads": 4, "vocab_size": 100}
    assert gpt2 == transformer(config)
    assert gpt2 == transformer(SimpleNamespace(**SMALL, vocab_size=100))
    assert gpt2 == transformer({"text_config": SMALL | {"vocab_size": 100}})
    assert gpt2.per_token == 6 * (3 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 100)


def test_gates_are_recognised() -> None:
    plain = transformer(SMALL)
    gated = transformer(SMALL | {"hidden_act": "silu"})
    assert gated.per_token > plain.per_token
    assert transformer(SMALL | {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}) == gated
    assert transformer(SMALL | {"model_type": "gpt2", "activation_function": "gelu_new"}) == plain


def test_sliding_windows_see_fewer_keys() -> None:
    full = transformer(SMALL)
    sliding = transformer(SMALL | {"sliding_window": 10})
    layer_types = ["full_attention"] + ["sliding_attention"] * 2
    mixed = transformer(SMALL | {"sliding_window": 10, "layer_types": layer_types})
    unused = transformer(SMALL | {"sliding_window": 10, "use_sliding_window": False})
    assert unused == full
    lengths = np.array([1.0, 10.0, 25.0])
    pairs = (sliding.samples(lengths) - sliding.per_token * lengths) / sliding.per_pair / 3
    assert pairs.tolist() == [1, 55, 55 + 15 * 10]
    halfway = (2 * sliding.samples(lengths) + full.samples(lengths)) / 3
    np.testing.assert_allclose(mixed.samples(lengths), halfway)
