"""What the configuration of a Hugging Face model says about the cost of its microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_odc import _compat
from lightning_odc.balance import Cost, quadratic, transformer
from lightning_odc.balance.costs import MICROBATCH

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def causal_model(module: nn.Module) -> nn.Module | None:
    """The outermost Hugging Face model that predicts the next token, in a module or the module itself; or ``None``."""
    models = [part for part in module.modules() if is_causal(part)]
    # Of several, the first with parameters to train is meant, so that a frozen teacher is passed over.
    for model in models:
        if any(parameter.requires_grad for parameter in model.parameters()):
            return model
    return next(iter(models), None)


def is_causal(part: nn.Module) -> bool:
    """Whether a module is a Hugging Face model that predicts the next token."""
    config = getattr(part, "config", None)
    is_two_part = getattr(config, "is_encoder_decoder", False)
    return type(part).__name__.endswith(_CAUSAL) and _is_configuration(config) and not is_two_part


def hugging_face_config(module: nn.Module) -> object | None:
    """The first configuration of Hugging Face's in a module, outermost first: a ``config`` with a ``model_type``."""
    configs = [getattr(part, "config", None) for part in (causal_model(module), *module.modules())]
    return next(filter(_is_configuration, configs), None)


def _is_configuration(config: object) -> bool:
    return callable(getattr(config, "to_dict", None)) and isinstance(getattr(config, "model_type", None), str)


@dataclass(frozen=True)
class ModelCost:
    """A cost that was read off a model."""

    cost: Cost  # of a microbatch, in a unit of its own; the same on all ranks
    source: str  # what it was read from, in a few words


def cost_of_model(module: nn.Module, device_type: str) -> ModelCost:
    """The cost of the Hugging Face model in a module, or a guess for another one."""
    config = hugging_face_config(module)
    if config is None:
        guess = quadratic(constant=MICROBATCH, dense=True)
        return ModelCost(guess, "a model without a Hugging Face config")
    attention = _compat.attention_of(config)
    dense = True
    if attention is not None:
        is_varlen = any(word in attention for word in ("flash", "flex", "varlen"))
        dense = device_type == "cpu" or not is_varlen
    source = f"{type(config).__name__.removesuffix('Config')} with {attention or 'unknown'} attention"
    try:
        known = transformer(config, dense=dense)
    except (ValueError, TypeError):  # experts, an encoder, lists of sizes, or unknown layers
        guess = quadratic(constant=MICROBATCH, dense=dense)
        return ModelCost(guess, source)
    return ModelCost(replace(known, constant=MICROBATCH * known.per_token), source)
