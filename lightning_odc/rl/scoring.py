"""Log-probabilities of responses: with gradients for a microbatch, or without for all roll-outs of all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_odc.errors import DisagreementError
from lightning_odc.rl.rollout import Microbatch
from lightning_odc.rl.rollouts import Rollouts, fingerprint
from lightning_odc.strategy.model_facts import causal_model, keeps_apart, undisturbed


def logprobs(model: nn.Module, microbatch: Microbatch, temperature: float = 1.0) -> Tensor:
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
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature} is not positive: write the one that was sampled with, such as temperature=1.0."
        )
    causal = causal_model(model)
    packed = microbatch.packs and causal is not None and keeps_apart(causal, microbatch.device)
    inputs = microbatch.inputs(packed)
    output = model(inputs["input_ids"]) if causal is None else model(**inputs)
    logits: Tensor = getattr(output, "logits", output)
    rows, columns = microbatch.predicting(packed)
    chosen = logits[rows, columns]  # [N, vocabulary]; prompts and padding go before the rest grows to fp32
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32)) / temperature
    return chosen.gather(-1, microbatch.targets[:, None])[:, 0] - chosen.logsumexp(-1)


def score(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    into: Literal["logprobs", "ref_logprobs"] | None = None,
    temperature: float = 1.0,
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
    if into not in (None, "logprobs", "ref_logprobs"):
        raise ValueError(f'into={into!r} is unknown; write into="logprobs" or into="ref_logprobs".')
    if into == "ref_logprobs":
        _check_frozen(model)
    engine = rollouts.ranks.engine
    seen = nullcontext() if engine is None else engine.traced("scoring")
    with seen, undisturbed(model, rollouts.ranks.device):
        own = [logprobs(model, one, temperature).float().cpu() for one in rollouts.microbatches()]
    flat = torch.cat([torch.empty(0), *own])
    by_rank, plans = rollouts.ranks.gather(
        "exchange of scores", flat.view(torch.uint8), fingerprint(rollouts.plan)
    )
    other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
    if other is not None:
        raise DisagreementError(
            f"Rank {other} planned the roll-outs differently from rank 0. Give the same values to rl.exchange(self, "
            "own, max_tokens=..., cost=...) on all ranks."
        )
    planned = [index for rank in rollouts.plan for microbatch in rank for index in microbatch]
    scored = torch.cat([part.view(torch.float32) for part in by_rank])  # one rank after another, as planned
    pieces = scored.split([rollouts[index].response_length for index in planned])
    by_index = dict(zip(planned, pieces, strict=True))
    scores = [by_index[index].clone() for index in range(len(rollouts))]
    if into is not None:
        for one, values in zip(rollouts, scores, strict=True):
            setattr(one, into, values)
    return scores


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
