"""Log-probabilities of responses, advantages, and the loss of a policy: sums over a microbatch, and their divisor.

Note [Sum, and divide once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The loss of a minibatch is ``sum_t w_t l_t / D`` over the tokens ``t`` of all responses, wherever they are computed.
``l_t`` and the weight ``w_t`` are known from the response alone, and the divisor ``D`` is that of the whole minibatch,
the same on all ranks::

    loss_type    w_t                          D
    dapo         1                            tokens of all responses
    grpo, gspo   1 / tokens of the response   responses
    dr_grpo      1 / max_response_length      responses

Strategies take the mean over ranks of what was backpropagated, so each rank multiplies its sums by their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lightning_odc.arguments import Count, Like, checked
from lightning_odc.data.model_cost import causal_model
from lightning_odc.errors import DisagreementError
from lightning_odc.rl.rollout import Microbatch
from lightning_odc.rl.rollouts import Rollouts, fingerprint
from lightning_odc.strategy.model_facts import separates_samples, undisturbed

LossType = Literal["dapo", "grpo", "dr_grpo", "gspo"]
Clip = Annotated[float, Like("0.2", lambda value: value >= 0)]
ClipRange = Annotated[Clip | tuple[Clip, Clip], Like("0.2, or (0.2, 0.28) for below and above 1")]
Temperature = Annotated[float, Like("1.0 (the one that was sampled with)", lambda value: value > 0)]


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    """Rewards less the mean of their group, over its standard deviation.

    Sums are exact, so that neither the order nor the place of the responses changes a bit of the results.

    Two groups, with ``epsilon=0``::

        groups        a     a     b    a    b
        rewards       0     1     5    2    5
        mean          1     1     5    1    5
        deviation     1     1     0    1    0      over n - 1
        advantages   -1     0     0    1    0

    Args:
        rewards: One number per response.
        groups: The same for the responses to one prompt, in any order. A response alone has the advantage 0.
        scale: Whether to divide by the standard deviation, as GRPO does; Dr. GRPO does not.
        epsilon: The number to add to the standard deviation.

    Returns:
        One number per response.

    Raises:
        ValueError: there are not as many groups as rewards, or a reward is not finite.

    Source: *DeepSeekMath*, arXiv 2402.03300, and *Understanding R1-Zero-Like Training*, arXiv 2503.20783 (Dr. GRPO).
    """
    members: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(
                f"A response of group {group!r} has the reward {reward}, and rewards are compared: use finite ones."
            )
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        own = [rewards[index] for index in indices]
        if min(own) == max(own):
            continue  # rounding must not make equal rewards differ from their mean
        mean = math.fsum(own) / len(own)
        spread = 1.0
        if scale:
            squares = [(reward - mean) ** 2 for reward in own]
            variance = math.fsum(squares) / (len(own) - 1)
            spread = math.sqrt(variance) + epsilon
        for index in indices:
            advantages[index] = (rewards[index] - mean) / spread
    return advantages


def normalize_advantages(rollouts: Rollouts, *, scale: bool = True, epsilon: float = 1e-4) -> None:
    """Set the advantage of every roll-out by `group_advantages`, wherever those of its group were sampled.

    Args:
        rollouts: The roll-outs of all ranks, with rewards and groups.
        scale: The same as in `group_advantages`.
        epsilon: The same as in `group_advantages`.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = [rollout.reward for rollout in rollouts]
    groups = [rollout.group for rollout in rollouts]
    advantages = group_advantages(rewards, groups, scale=scale, epsilon=epsilon)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The part of a microbatch in the loss of its minibatch; see Note [Sum, and divide once].

    Attributes:
        scaled: ``total * ranks / divisor``, for ``self.manual_backward``: strategies take the mean over ranks.
        total: The sum over the microbatch, with gradients.
        count: The part of the microbatch in ``divisor``: what ``num_items`` is, with automatic optimization.
        divisor: The divisor of the whole minibatch.
        tokens: The number of tokens in the microbatch's responses.
        kl: The sum over tokens of the KL estimates, detached; 0 without a reference model.
        clipped: The number of tokens whose gradient was clipped away, detached.
    """

    scaled: Tensor
    total: Tensor
    count: int
    divisor: int
    tokens: int
    kl: Tensor
    clipped: Tensor


@checked
def policy_loss(
    logprobs: Tensor,
    microbatch: Microbatch,
    *,
    loss_type: LossType = "dapo",
    clip_range: ClipRange = 0.2,
    beta: float = 0.0,
    max_response_length: Count | None = None,
) -> PolicyLoss:
    """The clipped loss of PPO over the tokens of a microbatch, as a sum that is exact under any placement.

    Args:
        logprobs: The log-probabilities under the policy that learns, ``[N]``, with gradients.
        microbatch: The microbatch. Without ``logprobs`` of its own the policy is the one that sampled: ratios are 1.
        loss_type: The average to take: ``"dapo"`` over all tokens of the minibatch; ``"grpo"`` over the tokens of a
            response, then over responses; ``"dr_grpo"``, sums of responses over ``max_response_length``, then over
            responses; ``"gspo"``, as ``"grpo"``, with one ratio per response, the geometric mean over its tokens.
        clip_range: The distance from 1 up to which the ratio to the policy that sampled counts: a number, or one below
            and one above.
        beta: The factor of the KL divergence from the reference model, by the k3 estimator.
        max_response_length: The constant of ``"dr_grpo"``, in tokens.

    Raises:
        ValueError: An invalid value, ``beta`` without ``ref_logprobs``, ``"dr_grpo"`` without its constant, or a
            roll-out without advantage.

    Source: *DAPO*, arXiv 2503.14476; *DeepSeekMath* (GRPO), arXiv 2402.03300; *GSPO*, arXiv 2507.18071; k3:
    *Approximating KL Divergence*, joschu.net/blog/kl-approx.html.
    """
    low, high = _checked(loss_type, clip_range, beta, max_response_length, microbatch)
    whole = microbatch.whole
    owner = microbatch.sequence
    old = microbatch.logprobs
    if old is None:  # the policy itself has sampled
        old = logprobs.detach()
    log_ratio = logprobs - old
    if loss_type == "gspo":
        sums = log_ratio.new_zeros(len(microbatch.rollouts)).index_add(0, owner, log_ratio)
        means = sums / microbatch.lengths.clamp(min=1)  # over the tokens of each response
        log_ratio = means[owner]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    advantages = microbatch.advantages[owner]
    gain = ratio * advantages
    clipped_gain = clipped_ratio * advantages
    reference = microbatch.ref_logprobs
    kl = torch.zeros_like(logprobs)
    if reference is not None:
        if not beta:
            logprobs = logprobs.detach()
        # k3, ``r - 1 - log r`` for the ratio ``r`` of reference to policy. It is not negative, and unbiased.
        log_reference = reference - logprobs
        kl = log_reference.exp() - log_reference - 1
    losses = beta * kl - torch.minimum(gain, clipped_gain)  # ``l_t`` of the Note
    # ``w_t`` and ``D`` of the Note, and this microbatch's part in ``D``.
    divisor = whole.sequences
    count = len(microbatch.indices)
    lengths = microbatch.lengths[owner].to(logprobs.dtype)
    if loss_type == "dapo":
        divisor = whole.tokens
        count = len(owner)
        lengths = torch.ones_like(lengths)
    elif loss_type == "dr_grpo":
        lengths = torch.full_like(lengths, max_response_length or 1)
    weights = 1 / lengths
    total = (losses * weights).sum()
    return PolicyLoss(
        scaled=total * (whole.ranks / max(divisor, 1)),  # all responses may be empty
        total=total,
        count=count,
        divisor=divisor,
        tokens=len(owner),
        kl=kl.detach().sum(),
        clipped=(clipped_gain < gain).sum(),
    )


def _checked(
    loss_type: str,
    clip_range: ClipRange,
    beta: float,
    max_response_length: int | None,
    microbatch: Microbatch,
) -> tuple[float, float]:
    """The two clip ranges, after checking all options."""
    clips = clip_range
    if not isinstance(clips, tuple):
        clips = (clips, clips)
    low, high = clips
    if beta and microbatch.ref_logprobs is None:
        raise ValueError(
            f"beta={beta} weighs the KL divergence from a reference model, and the roll-outs have no ref_logprobs. "
            'Write rl.score(self.reference, rollouts, into="ref_logprobs") first, or beta=0.'
        )
    if loss_type == "dr_grpo" and max_response_length is None:
        raise ValueError(
            'loss_type="dr_grpo" divides by a constant: write max_response_length=1024, the max_new_tokens of sampling.'
        )
    return float(low), float(high)


@checked
def logprobs(model: nn.Module, microbatch: Microbatch, temperature: Temperature = 1.0) -> Tensor:
    """The log-probability of every token of the responses of a microbatch, ``[N]``, with gradients.

    Args:
        model: A causal language model. One of Hugging Face's gets packed rows if it keeps samples apart in them and the
            roll-outs were planned so, or padded rows with an attention mask. Others are called as ``model(input_ids)``
            with rows padded on the right, and return logits ``[rows, tokens, vocabulary]``, or something with
            ``.logits``.
        microbatch: The microbatch.
        temperature: The temperature of sampling: logits are divided by it.

    Returns:
        In the order of `Microbatch`, in fp32 or what is wider of the model's.

    Raises:
        ValueError: An invalid value.
    """
    causal = causal_model(model)
    packed = microbatch.packs and causal is not None and separates_samples(causal, microbatch.device)
    inputs = microbatch.inputs(packed)
    if causal is None:
        output = model(inputs["input_ids"])
    else:
        output = model(**inputs)
    logits: Tensor = getattr(output, "logits", output)
    rows, columns = microbatch.predicting(packed)
    chosen = logits[rows, columns]  # [N, vocabulary]; prompts and padding go before the rest grows to fp32
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32)) / temperature
    target = chosen.gather(-1, microbatch.targets[:, None])[:, 0]
    return target - chosen.logsumexp(-1)


@checked
def score(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    into: Literal["logprobs", "ref_logprobs"] | None = None,
    temperature: Temperature = 1.0,
) -> list[Tensor]:
    """The log-probabilities of all responses, in the order of the roll-outs. All ranks together.

    Each rank runs its part of ``rollouts.plan``, without gradients and in eval mode, at its own pace. Then ranks meet.

    Args:
        model: The model, see `logprobs`. A reference model is a second model in the same `LightningModule` with
            ``requires_grad_(False)``, or the same model within PEFT's ``with model.disable_adapter():``.
        rollouts: What `exchange` returned.
        into: The attribute of the roll-outs to write as well. ``"ref_logprobs"`` needs a frozen model.
        temperature: The temperature of sampling: logits are divided by it.

    Returns:
        ``[R]`` fp32 on the CPU for each roll-out, equal on all ranks.

    Raises:
        ValueError: ``into="ref_logprobs"``, and the model has parameters that train.
        PeerFailedError: another rank has failed.
        DisagreementError: ranks have made different plans.
    """
    if into == "ref_logprobs":
        _check_frozen(model)
    engine = rollouts.ranks.engine
    traced: AbstractContextManager[None] = nullcontext()
    if engine is not None:
        traced = engine.traced("scoring")
    own = [torch.empty(0)]  # a rank may have no microbatch
    with traced, undisturbed(model, rollouts.ranks.device):
        for microbatch in rollouts.microbatches():
            scored = logprobs(model, microbatch, temperature)
            own.append(scored.float().cpu())
    content = torch.cat(own).view(torch.uint8)
    by_rank, plans = rollouts.ranks.gather("exchange of scores", content, fingerprint(rollouts.plan))
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise DisagreementError(
                f"Rank {rank} planned the roll-outs differently from rank 0. Give the same values to "
                "rl.exchange(self, own, max_tokens=..., cost=...) on all ranks."
            )
    scores: dict[int, Tensor] = {}
    for planned, part in zip(rollouts.plan, by_rank, strict=True):
        indices = list(itertools.chain.from_iterable(planned))
        lengths = [rollouts[index].response_length for index in indices]
        pieces = part.view(torch.float32).split(lengths)
        for index, piece in zip(indices, pieces, strict=True):
            scores[index] = piece.clone()
            if into is not None:
                setattr(rollouts[index], into, scores[index])
    return [scores[index] for index in range(len(rollouts))]


def _check_frozen(model: nn.Module) -> None:
    """Refuse a reference model that would train. Some versions of PEFT unfreeze copies while adapters are off."""
    trains = next((name for name, parameter in model.named_parameters() if parameter.requires_grad), None)
    # Inside of PEFT's ``with model.disable_adapter():``, the policy is its own reference.
    has_adapters_off = any(getattr(part, "disable_adapters", None) is True for part in model.modules())
    if trains is not None and not has_adapters_off:
        raise ValueError(
            f'into="ref_logprobs" is for a reference model that stays as it is, and {trains!r} of this one trains. '
            "Write `self.reference = make_model().requires_grad_(False)`; or, for the policy without its adapters, "
            "`with self.model.disable_adapter(): rl.score(self.model, ...)`."
        )
