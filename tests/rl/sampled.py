"""Roll-outs that nobody sampled, and what one process computes of them, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from lightning_odc.rl import Microbatch, Rollout

VOCAB = 32


def rolled_out(lengths: Sequence[tuple[int, int]], groups: int = 2, seed: int = 0) -> list[Rollout]:
    """One roll-out for each pair of the tokens of its prompt and its response; groups take turns."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Rollout(
            torch.randint(VOCAB, (prompt + response,), generator=generator),
            prompt,
            float(torch.randint(3, (), generator=generator)),
            index % groups,
            metadata={"index": index},
        )
        for index, (prompt, response) in enumerate(lengths)
    ]


def set_advantages(rollouts: Sequence[Rollout]) -> None:
    """Each reward less the mean of its group, over its standard deviation."""
    for one in rollouts:
        rewards = [other.reward for other in rollouts if other.group == one.group]
        one.advantage = (one.reward - fmean(rewards)) / (stdev(rewards) + 1e-4)


def policy_loss(
    new: Tensor,
    microbatch: Microbatch,
    loss_type: str = "dapo",
    clip: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    constant: int = 1,
) -> Tensor:
    """A microbatch's part of the loss of its minibatch, as a user writes it: see Note [Sum, and divide once]."""
    owner = microbatch.sequence
    whole = microbatch.whole
    if microbatch.logprobs is None:
        old = new.detach()
    else:
        old = microbatch.logprobs
    log_ratio = new - old
    if loss_type == "gspo":
        zeros = new.new_zeros(len(microbatch.rollouts))
        sums = zeros.index_add(0, owner, log_ratio)
        log_ratio = (sums / microbatch.lengths.clamp(min=1))[owner]
    ratio = log_ratio.exp()
    advantages = microbatch.advantages[owner]
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    gains = torch.minimum(ratio * advantages, clipped * advantages)
    losses = -gains
    if microbatch.ref_logprobs is not None:
        log_reference = microbatch.ref_logprobs - new
        losses = losses + beta * (log_reference.exp() - log_reference - 1)
    if loss_type == "dapo":
        tokens = max(whole.tokens, 1)
        return losses.sum() * whole.ranks / tokens
    lengths = microbatch.lengths[owner].to(losses.dtype)
    if loss_type == "dr_grpo":
        lengths = torch.full_like(lengths, constant)
    total = (losses / lengths).sum()
    return total * whole.ranks / whole.sequences


def logprobs_alone(model: nn.Module, one: Rollout) -> Tensor:
    """``[R]``: the sample alone in a row, without padding."""
    output: Any = model(one.tokens[None])
    logits = getattr(output, "logits", output)[0]
    predicted = logits[one.prompt_length - 1 : len(one) - 1].log_softmax(-1)
    return torch.stack([predicted[i, token] for i, token in enumerate(one.response)] or [logits.sum() * 0])[
        : one.response_length
    ]


def textbook_loss(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    loss_type: str,
    clip: tuple[float, float],
    beta: float,
    constant: int,
) -> Tensor:
    """The loss of a minibatch as the papers write it: a double loop over responses and tokens."""
    by_response = []
    for one in rollouts:
        new = logprobs_alone(model, one)
        old = one.logprobs
        ref = one.ref_logprobs
        assert one.advantage is not None
        before = old
        if old is None:
            before = new.detach()
        ratios = (new - before).exp()
        if loss_type == "gspo" and len(ratios):
            ratios = ratios.prod() ** (1 / len(ratios)) * torch.ones_like(ratios)
        losses = []
        for token, ratio in enumerate(ratios):
            clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
            gain = min(ratio * one.advantage, clipped * one.advantage)
            kl = 0.0
            if ref is not None:
                kl = (ref[token] - new[token]).exp() - (ref[token] - new[token]) - 1
            losses.append(beta * kl - gain)
        by_response.append(losses)
    total = sum(parameter.sum() for parameter in model.parameters())
    zero = total * 0
    if loss_type == "dapo":
        every = [loss for losses in by_response for loss in losses]
        largest = max(len(every), 1)
        return sum(every, zero) / largest
    divisors = [constant if loss_type == "dr_grpo" else max(len(losses), 1) for losses in by_response]
    means = [sum(losses, zero) / divisor for losses, divisor in zip(by_response, divisors, strict=True)]
    return sum(means, zero) / len(means)
