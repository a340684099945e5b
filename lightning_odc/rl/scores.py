"""Log-probabilities of responses: of a microbatch, with gradients, and of all roll-outs, on all ranks together."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lightning_odc.arguments import Like, checked
from lightning_odc.errors import DisagreementError
from lightning_odc.rl.rollout import Microbatch
from lightning_odc.rl.rollouts import Rollouts, fingerprint
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
    ranks = rollouts.ranks
    traced: AbstractContextManager[None] = nullcontext()
    if ranks.engine is not None:
        traced = ranks.engine.traced("scoring")
    own = [torch.empty(0)]  # a rank may have no microbatch
    with traced, undisturbed(model, ranks.device):
        for microbatch in rollouts.microbatches():
            scored = logprobs(model, microbatch, temperature)
            own.append(scored.float().cpu())
    by_rank = ranks.gather("exchange of scores", [fingerprint(rollouts.plan), torch.cat(own)])
    for rank, (plan, _) in enumerate(by_rank):
        if plan != by_rank[0][0]:
            raise DisagreementError(
                f"Rank {rank} planned the roll-outs differently from rank 0. Give the same values to "
                "rl.exchange(self, own, max_tokens=..., cost=...) on all ranks."
            )
    scores: dict[int, Tensor] = {}
    for planned, (_, flat) in zip(rollouts.plan, by_rank, strict=True):
        indices = list(itertools.chain.from_iterable(planned))
        pieces = flat.split([rollouts[index].response_length for index in indices])
        scores.update(zip(indices, pieces, strict=True))
    in_order = [scores[index] for index in range(len(rollouts))]
    if into is not None:
        for rollout, values in zip(rollouts, in_order, strict=True):
            setattr(rollout, into, values)
    return in_order


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
