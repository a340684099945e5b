"""The demo's model on one process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from lightning_odc.data.packing import pack_samples
from lightning_odc.demo.corpus import VOCABULARY, encode
from lightning_odc.demo.model import SHARDED_LAYERS, ByteModel

# `self.log` without a trainer says that it does nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


def small(seed: int = 0) -> ByteModel:
    return ByteModel(layers=2, hidden_size=64, max_length=128, seed=seed)


def test_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in small(seed).parameters()]) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_unit_per_layer_is_there_to_shard() -> None:
    layers = [module for module in small().modules() if type(module) in SHARDED_LAYERS]
    assert len(layers) == 2


def test_the_loss_is_a_sum_over_predicted_tokens() -> None:
    model = small()
    samples = [encode(b"def f(): pass\n"), encode(b"class C: ...\n")]
    together = model.training_step(pack_samples(samples), 0)
    alone = [model.training_step(pack_samples([sample]), 0) for sample in samples]
    assert together["num_items"] == sum(len(sample) - 1 for sample in samples)
    assert together["num_items"] == sum(step["num_items"] for step in alone)
    torch.testing.assert_close(together["loss"], sum(step["loss"] for step in alone))
    # An untrained model knows nothing: about log(vocabulary) per token.
    mean = float(together["loss"].detach()) / together["num_items"]
    assert mean == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=0.1)


def test_losses_are_collected_until_they_are_taken() -> None:
    model = small()
    steps = [model.training_step(pack_samples([encode(text)]), 0) for text in (b"abc", b"defg")]
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
        step = model.training_step(batch, 0)
        optimizer.zero_grad()
        (step["loss"] / step["num_items"]).backward()
        optimizer.step()
        losses.append(float(step["loss"].detach()))
    assert losses[-1] < 0.8 * losses[0]
