"""A loss is the same wherever roll-outs are computed: microbatches sum, and divide by counts of the whole minibatch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_odc import rl
from lightning_odc.rl.rollout import Microbatch, Whole
from tests.rl.sampled import VOCAB, logprobs_alone, policy_loss, rolled_out, textbook_loss

LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6)
LOSSES = ("dapo", "grpo", "dr_grpo", "gspo")
OPTIONS = ((0.1, 0.3), 0.2, 7)  # clips, the factor of the KL divergence, and the constant of Dr. GRPO


def small_model() -> nn.Sequential:
    """Each token predicts the next one alone; in fp64, so that only the order of sums differs."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCAB, 4), nn.Tanh(), nn.Linear(4, VOCAB)).double()


def scored(lengths: list[tuple[int, int]]) -> list[rl.Rollout]:
    """Roll-outs whose old and reference log-probabilities are off, so that some ratios are clipped and some are not."""
    rollouts = rolled_out(lengths)
    model = small_model()
    generator = torch.Generator().manual_seed(2)
    for one in rollouts:
        own = logprobs_alone(model, one).detach().float()
        one.logprobs = own + 0.3 * torch.randn(own.shape, generator=generator)
        one.ref_logprobs = own + 0.3 * torch.randn(own.shape, generator=generator)
        one.advantage = float(torch.randn((), generator=generator))
    return rollouts


def gradient(model: nn.Module) -> Tensor:
    parts = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(parts)


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.sampled_from(LOSSES), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_loss_is_the_papers_for_any_placement(lengths, loss_type, ranks, chance):
    rollouts = scored(lengths)
    model = small_model()
    expected = textbook_loss(model, rollouts, loss_type, *OPTIONS)
    expected.backward()
    truth = gradient(model)
    model.zero_grad()

    tokens = sum(one.response_length for one in rollouts)
    whole = Whole(len(rollouts), tokens, ranks)
    placed: list[list[list[int]]] = [[[]] for _ in range(ranks)]  # and an empty microbatch on every rank
    for index in range(len(rollouts)):
        microbatches = chance.choice(placed)
        if chance.random() < 0.5:
            microbatches.append([])
        chance.choice(microbatches).append(index)
    value = 0.0
    for rank in placed:
        for indices in rank:
            own = [rollouts[i] for i in indices] or [rl.Rollout([3], 1, advantage=0.0)]
            microbatch = Microbatch(own, indices, whole)
            logprobs = rl.logprobs(model, microbatch)
            loss = policy_loss(logprobs, microbatch, loss_type, *OPTIONS)
            mean = loss / ranks  # which strategies take
            mean.backward()
            value += mean.item()
    # Sums of at most 30 numbers of size 1 in fp64, and roll-outs are in fp32 on both sides.
    assert value == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient(model), truth, rtol=0, atol=1e-12)


def test_what_is_missing_in_a_microbatch() -> None:
    rollouts = [rl.Rollout([1, 2], 1)]
    whole = Whole(1, 1, 1)
    bare = Microbatch(rollouts, [0], whole)
    assert bare.logprobs is None
    with pytest.raises(TypeError, match="not NoneType"):
        _ = bare.advantages
    some = [rl.Rollout([1, 2], 1, logprobs=[0.0]), rl.Rollout([1, 2], 1)]
    with pytest.raises(TypeError, match="but got NoneType"):
        _ = Microbatch(some, [0, 1], Whole(2, 2, 1)).logprobs
