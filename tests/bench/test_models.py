"""The model of a benchmark on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from lightning_odc.bench.corpus import VOCABULARY, encode
from lightning_odc.bench.models import CausalModel, find_config
from lightning_odc.data.packing import PackedBatch, pack_samples


def small(seed: int = 0) -> CausalModel:
    return CausalModel(find_config("2x64", 128), seed)


def step(model: CausalModel, batch: PackedBatch) -> dict[str, Any]:
    output = model.training_step(batch, 0)
    assert output is not None
    return output


def test_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in small(seed).parameters()]) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_layers_and_width_are_those_of_the_name() -> None:
    config = small().model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 1)


def test_the_loss_is_a_sum_over_predicted_tokens() -> None:
    model = small()
    samples = [encode(b"def f(): pass\n"), encode(b"class C: ...\n")]
    together = step(model, pack_samples(samples))
    alone = [step(model, pack_samples([sample])) for sample in samples]
    assert together["num_items"] == sum(len(sample) - 1 for sample in samples)
    assert together["num_items"] == sum(step["num_items"] for step in alone)
    torch.testing.assert_close(together["loss"], sum(step["loss"] for step in alone))
    # An untrained model knows nothing: about log(vocabulary) per token.
    mean = float(together["loss"].detach()) / together["num_items"]
    assert mean == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=0.1)


def test_losses_are_collected_until_they_are_taken() -> None:
    model = small()
    steps = [step(model, pack_samples([encode(text)])) for text in (b"abc", b"defg")]
    loss_sum, tokens = model.take_loss()
    assert tokens == 4 + 5
    assert loss_sum == pytest.approx(sum(float(step["loss"].detach()) for step in steps))
    assert model.take_loss() == (0.0, 0)


def test_training_lowers_the_loss() -> None:
    model = small()
    optimizer = model.configure_optimizers()
    batch = pack_samples([encode(b"import os, sys\n" * 4)])
    losses = []
    for _ in range(20):
        output = step(model, batch)
        optimizer.zero_grad()
        (output["loss"] / output["num_items"]).backward()
        optimizer.step()
        losses.append(float(output["loss"].detach()))
    assert losses[-1] < 0.8 * losses[0]
