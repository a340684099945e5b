"""What the model says of the time that a microbatch takes: where ``cost="auto"`` begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_odc import _compat
from lightning_odc.balance import Cost, quadratic, transformer
from lightning_odc.balance.costs import MICROBATCH
from lightning_odc.strategy.causal_lm import hugging_face_config


@dataclass(frozen=True)
class ModelCost:
    """A cost that was read off a model.

    Attributes:
        cost: The cost of a microbatch, in a unit of its own; the same on all ranks.
        dense: Whether attention runs over all tokens of a packed microbatch; ``None``: the model does not say.
        source: What it was read from, in a few words.
    """

    cost: Cost
    dense: bool | None
    source: str


def cost_of_model(module: nn.Module, device_type: str) -> ModelCost:
    """The cost of the Hugging Face model in a module, or a guess for another one.

    Attention for variable lengths (flash, and flex on GPUs) computes what is inside samples. All other kinds compute
    the whole row and mask it; see Note [Dense attention].

    Args:
        module: Any module.
        device_type: ``"cpu"`` or ``"cuda"``; a CPU has no attention for variable lengths.
    """
    config = hugging_face_config(module)
    if config is None:
        return ModelCost(
            quadratic(constant=MICROBATCH, dense=True), None, "a model without a Hugging Face config"
        )
    attention = _compat.attention_of(config)
    dense = _is_dense(attention, device_type)
    source = f"{type(config).__name__.removesuffix('Config')} with {attention or 'unknown'} attention"
    try:
        known: Any = transformer(config, dense=dense is not False)
    except (
        ValueError,
        TypeError,
    ):  # experts, an encoder, lists of sizes, or layers of a kind that is not known
        return ModelCost(quadratic(constant=MICROBATCH, dense=dense is not False), dense, source)
    return ModelCost(replace(known, constant=MICROBATCH * known.per_token), dense, source)


def _is_dense(attention: str | None, device_type: str) -> bool | None:
    if attention is None:
        return None
    return device_type == "cpu" or not ("flash" in attention or "flex" in attention or "varlen" in attention)
