"""Roll-outs that nobody sampled, and what one process computes of them, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from lightning_odc.rl import Microbatch, Rollout

VOCAB = 32
BETA = 0.1  # the weight of the distance from the reference


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


def policy_loss(new: Tensor, microbatch: Microbatch) -> Tensor:
    """A microbatch's part of the loss of its minibatch, as a user writes it: see Note [Sum, and divide once]."""
    owner = microbatch.sequence
    losses = -(new - microbatch.logprobs).exp() * microbatch.advantages[owner]
    if microbatch.ref_logprobs is not None:
        losses = losses + BETA * (new - microbatch.ref_logprobs).square()
    return (losses / microbatch.lengths[owner]).sum() * microbatch.whole.ranks / microbatch.whole.sequences


def logprobs_alone(model: nn.Module, one: Rollout) -> Tensor:
    """``[R]``: the sample alone in a row, without padding."""
    output: Any = model(one.tokens[None])
    logits = getattr(output, "logits", output)[0]
    predicted = logits[one.prompt_length - 1 : len(one) - 1].log_softmax(-1)
    return torch.stack([predicted[i, token] for i, token in enumerate(one.response)] or [logits.sum() * 0])[
        : one.response_length
    ]


def textbook_loss(model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
    """The same of a whole minibatch: the mean over responses of the mean over their tokens."""
    total = sum(parameter.sum() for parameter in model.parameters()) * 0
    for one in rollouts:
        if one.response_length:
            new = logprobs_alone(model, one)
            losses = -(new - one.logprobs).exp() * one.advantage
            if one.ref_logprobs is not None:
                losses = losses + BETA * (new - one.ref_logprobs).square()
            total = total + losses.mean()
    return total / len(rollouts)
