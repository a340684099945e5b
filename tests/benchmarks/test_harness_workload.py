"""What a benchmark trains: text of the standard library, and the model on one process."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from benchmarks.harness.lengths import find_samples
from benchmarks.harness.models import find_config
from lightning_odc.data.packing import pack_samples
from lightning_odc.demo import BOS, EOS, VOCABULARY, encode
from notebooks.support.models import CausalModel


def test_control_is_the_same_text_in_equal_pieces() -> None:
    texts = find_samples("stdlib", 256, 0)
    pieces = find_samples("equal", 256, 0)
    assert len(pieces) == len(texts)
    assert len(set(pieces.lengths)) == 1
    begin = torch.cat([texts[index][1:-1] for index in range(5)])
    assert torch.equal(pieces[0][1:-1], begin[: len(pieces[0]) - 2])


def small(seed: int = 0) -> CausalModel:
    return CausalModel(find_config("2x64", 128), seed)


def test_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in small(seed).parameters()]) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_loss_is_a_sum_over_predicted_tokens() -> None:
    model = small()
    found = encode("é\n".encode()).tolist()
    assert found == [BOS, 0xC3, 0xA9, 10, EOS]
    samples = [encode(b"def f(): pass\n"), encode(b"class C: ...\n")]
    together, *alone = (
        model.training_step(pack_samples(of), 0) for of in (samples, samples[:1], samples[1:])
    )
    assert together is not None
    expected = sum(len(sample) - 1 for sample in samples)
    assert together["num_items"] == expected
    expected = sum(step["num_items"] for step in alone)
    assert together["num_items"] == expected
    expected = sum(step["loss"] for step in alone)
    torch.testing.assert_close(together["loss"], expected)
    loss = float(together["loss"].detach())
    assert model.take_loss() == (pytest.approx(2 * loss), 2 * together["num_items"])
    assert model.take_loss() == (0.0, 0)
    # An untrained model knows nothing: about log(vocabulary) per token.
    mean = float(together["loss"].detach()) / together["num_items"]
    expected = pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=0.1)
    assert mean == expected
