"""Log-probabilities of responses: of a microbatch, with gradients, and of all roll-outs, on all ranks together."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lightning_odc.arguments import Like, checked
from lightning_odc.protocol.tracing import Traced
from lightning_odc.rl.rollout import Microbatch
from lightning_odc.rl.rollouts import Rollouts
from lightning_odc.strategy.model_facts import undisturbed

Temperature = Annotated[float, Like("1.0 (the one that was sampled with)", lambda value: value > 0)]


@checked
def logprobs(model: nn.Module, microbatch: Microbatch, temperature: Temperature = 1.0) -> Tensor:
    """The log-probability of every token of the responses of a microbatch, ``[N]``, with gradients.

    Args:
        model: A causal language model, see `Microbatch.logits`.
        microbatch: The microbatch.
        temperature: The temperature of sampling: logits are divided by it.

    Returns:
        In the order of `Microbatch`, in fp32 or what is wider of the model's.

    Raises:
        ValueError: An invalid value.
    """
    logits = microbatch.logits(model)  # prompts and padding have gone before the rest grows to fp32
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    target = logits.gather(-1, microbatch.targets[:, None])[:, 0]
    return target - logits.logsumexp(-1)


@checked
def score(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    into: Literal["logprobs", "ref_logprobs"],
    temperature: Temperature = 1.0,
) -> None:
    """Write the log-probabilities of all responses into the roll-outs. All ranks together.

    Each rank runs its part of ``rollouts.plan``, without gradients and in eval mode, at its own pace. Then ranks
    synchronize. Scores are ``[R]`` fp32 on the CPU, equal on all ranks.

    Args:
        model: The model, see `logprobs`. A reference model is a second model in the same `LightningModule` with
            ``requires_grad_(False)``, or the same model within PEFT's ``with model.disable_adapter():``.
        rollouts: What `exchange` returned.
        into: The attribute of the roll-outs to write. ``"ref_logprobs"`` needs a frozen model.
        temperature: The temperature of sampling: logits are divided by it.

    Raises:
        ValueError: ``into="ref_logprobs"``, and the model has parameters that train.
        PeerFailedError: another rank has failed.
    """
    if into == "ref_logprobs":
        _check_frozen(model)
    ranks = rollouts.ranks
    traced = ranks.engine or Traced()
    own: dict[int, Tensor] = {}  # by the indices of roll-outs
    with traced.traced("scoring"), undisturbed(model, ranks.device):
        for microbatch in rollouts.microbatches():
            flat = logprobs(model, microbatch, temperature).float()
            by_rollout = flat.split(microbatch.lengths.tolist())
            own |= dict(
                zip(microbatch.indices, by_rollout, strict=False)
            )  # one that keeps ranks together has none
    for share in ranks.gather("exchange of scores", own):
        for index, values in share.items():
            setattr(rollouts[index], into, values)


def _check_frozen(model: nn.Module) -> None:
    """Refuse a reference model that would train. Some versions of PEFT unfreeze copies while adapters are off."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    # Inside of PEFT's ``with model.disable_adapter():``, the policy is its own reference.
    has_adapters_off = any(getattr(part, "disable_adapters", None) is True for part in model.modules())
    if trains and not has_adapters_off:
        raise ValueError(
            'into="ref_logprobs" is for a reference model that stays as it is, and this one trains. Write '
            "`self.reference = make_model().requires_grad_(False)`; or, for the policy without its adapters, "
            '`with self.model.disable_adapter(): rl.score(self.model, rollouts, into="ref_logprobs")`.'
        )
