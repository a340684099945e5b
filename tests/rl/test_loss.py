"""Advantages and losses: those of the papers, and the same wherever roll-outs are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_odc import rl
from lightning_odc.rl.rollout import Microbatch, Whole
from tests.rl.sampled import VOCAB, logprobs_alone, rolled_out, textbook_loss

LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6)
LOSSES = ("dapo", "grpo", "dr_grpo", "gspo")
OPTIONS: dict[str, Any] = {"clip_range": (0.1, 0.3), "beta": 0.2, "max_response_length": 7}


def small_model() -> nn.Sequential:
    """Each token predicts the next one alone; in fp64, so that only the order of sums differs."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCAB, 4), nn.Tanh(), nn.Linear(4, VOCAB)).double()


def scored(lengths: list[tuple[int, int]]) -> list[rl.Rollout]:
    """Roll-outs whose old and reference log-probabilities are off, so that some ratios are clipped and some are not."""
    rollouts, model = rolled_out(lengths), small_model()
    generator = torch.Generator().manual_seed(2)
    for one in rollouts:
        own = logprobs_alone(model, one).detach().float()
        one.logprobs = own + 0.3 * torch.randn(own.shape, generator=generator)
        one.ref_logprobs = own + 0.3 * torch.randn(own.shape, generator=generator)
        one.advantage = float(torch.randn((), generator=generator))
    return rollouts


def gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.sampled_from(LOSSES), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_loss_is_the_papers_for_any_placement(lengths, loss_type, ranks, chance):
    rollouts, model = scored(lengths), small_model()
    expected = textbook_loss(model, rollouts, loss_type, (0.1, 0.3), 0.2, 7)
    expected.backward()
    truth = gradient(model)
    model.zero_grad()

    whole = Whole(len(rollouts), sum(one.response_length for one in rollouts), ranks)
    placed: list[list[list[int]]] = [[[]] for _ in range(ranks)]  # and an empty microbatch on every rank
    for index in range(len(rollouts)):
        microbatches = chance.choice(placed)
        if chance.random() < 0.5:
            microbatches.append([])
        chance.choice(microbatches).append(index)
    value, count = 0.0, 0
    for rank in placed:
        for indices in rank:
            own = [rollouts[i] for i in indices] or [rl.Rollout([3], 1, advantage=0.0)]
            microbatch = Microbatch(own, indices, whole)
            loss = rl.policy_loss(rl.logprobs(model, microbatch), microbatch, loss_type=loss_type, **OPTIONS)
            (loss.scaled / ranks).backward()  # the mean over ranks, which strategies take
            value, count = value + loss.total.item() / max(loss.divisor, 1), count + loss.count
            assert loss.tokens == sum(one.response_length for one in own)
    assert count == loss.divisor
    # Sums of at most 30 numbers of size 1 in fp64, and roll-outs are in fp32 on both sides.
    assert value == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient(model), truth, rtol=0, atol=1e-12)


def test_tokens_that_are_clipped_away_have_no_gradient() -> None:
    def loss_of(ratio: float, advantage: float, clip_range: Any = 0.2) -> tuple[rl.PolicyLoss, float]:
        one = rl.Rollout([1, 2], 1, advantage=advantage, logprobs=[0.0])
        new = torch.tensor([ratio]).log().requires_grad_()
        loss = rl.policy_loss(new, Microbatch([one], [0], Whole(1, 1, 1)), clip_range=clip_range)
        loss.total.backward()
        assert new.grad is not None
        return loss, float(new.grad)

    for ratio, advantage, is_clipped in ((1.3, 1, True), (1.3, -1, False), (0.7, 1, False), (0.7, -1, True)):
        loss, slope = loss_of(ratio, advantage)
        assert (int(loss.clipped), slope == 0) == (is_clipped, is_clipped)
        if not is_clipped:
            assert slope == pytest.approx(-ratio * advantage)
    assert loss_of(1.3, 1, (0.2, 0.4))[1] != 0
    assert loss_of(1.3, 1)[0].total.item() == pytest.approx(-1.2)


def test_the_kl_estimate_is_k3_and_without_scores_the_policy_is_the_one_that_sampled() -> None:
    one = rl.Rollout([1, 2], 1, advantage=0.0, ref_logprobs=[-1.0])
    microbatch = Microbatch([one], [0], Whole(1, 1, 1))
    loss = rl.policy_loss(torch.tensor([-1.5], requires_grad=True), microbatch, beta=0.1)
    assert float(loss.kl) == pytest.approx(torch.tensor(0.5).exp().item() - 1.5)
    assert loss.total.item() == pytest.approx(0.1 * float(loss.kl))
    one = rl.Rollout([1, 2, 3], 1, advantage=2.0)
    new = torch.tensor([-3.0, -1.0], requires_grad=True)
    loss = rl.policy_loss(new, Microbatch([one], [0], Whole(1, 2, 1)))
    loss.scaled.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, -1.0]
    assert (float(loss.kl), int(loss.clipped)) == (0, 0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "ppo"}, r'loss_type=.ppo.\) cannot work. Write loss_type="dapo"'),
    ({"clip_range": -0.1}, r"Write clip_range=0.2, or \(0.2, 0.28\)"),
    ({"beta": 0.1}, 'into="ref_logprobs"'),
    ({"loss_type": "dr_grpo"}, "max_response_length=1024"),
]


def test_what_is_wrong_with_a_loss() -> None:
    microbatch = Microbatch([rl.Rollout([1, 2], 1, advantage=1.0)], [0], Whole(1, 1, 1))
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            rl.policy_loss(torch.zeros(1), microbatch, **options)
    bare = Microbatch([rl.Rollout([1, 2], 1)], [0], Whole(1, 1, 1))
    with pytest.raises(ValueError, match="normalize_advantages"):
        rl.policy_loss(torch.zeros(1), bare)
    some = [rl.Rollout([1, 2], 1, logprobs=[0.0]), rl.Rollout([1, 2], 1)]
    with pytest.raises(ValueError, match="1 of 2 roll-outs have no logprobs"):
        _ = Microbatch(some, [0, 1], Whole(2, 2, 1)).logprobs


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), max_size=20), st.randoms(), st.booleans())
def test_advantages_do_not_depend_on_order(pairs, chance, scale):
    order = list(range(len(pairs)))
    chance.shuffle(order)
    rewards, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    plain = rl.group_advantages(rewards, groups, scale=scale)
    shuffled = rl.group_advantages([rewards[i] for i in order], [groups[i] for i in order], scale=scale)
    assert shuffled == [plain[i] for i in order]  # bit for bit


def test_advantages_are_those_of_grpo() -> None:
    rewards = [1.0, 5.0, 2.5, 5.0, 0.0, 3.0]
    groups = ["a", "b", "a", "b", "a", "alone"]
    own = torch.tensor([1.0, 2.5, 0.0])
    expected = (own - own.mean()) / (own.std() + 1e-4)
    found = rl.group_advantages(rewards, groups)
    assert [found[i] for i in (0, 2, 4)] == pytest.approx(expected.tolist(), rel=1e-5)
    assert [found[i] for i in (1, 3, 5)] == [0, 0, 0]  # all alike, and one alone
    assert rl.group_advantages(rewards, groups, scale=False)[4] == pytest.approx(-3.5 / 3)
    with pytest.raises(ValueError, match="reward nan"):
        rl.group_advantages([float("nan")], ["a"])
