"""The causal language model inside a module: whether it keeps packed samples apart, and what its microbatches cost.

Note [A leak is measured by a leak]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Three tiny samples ``a``, ``b`` and ``c`` of four tokens go through the model, in eval mode. The logits of ``b``,
``[4, vocabulary]``, are compared between rows::

    packed  a b c      p1      b among others
    packed  c b a      p2      b among the same others, swapped
    plain   b a c      alone   nothing stands before b, and a causal model does not look ahead
    plain   a b c      q1      a row that is read as one text: what a leak looks like
    plain   c b a      q2

The samples are kept apart if ``|p1 - p2|`` is zero, and they are at the right positions if ``|p1 - alone|`` is. Neither
is exactly zero, because attention adds in another order. So the difference is compared with a real leak of the same
model, ``|q1 - q2|`` and ``|q1 - alone|``. In a leak the ratio is about 1. Rounding in bf16 (2^-9 of every value, twice
per layer) adds up to ``sqrt(2 * 80) * 2^-9``, 2.5 % of a logit in 80 layers. The text before ``b`` changes logits by
their own size in a trained model, and by a fifth of it in a small random one. A quarter of the leak is between both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_odc import _compat, _compat_lightning
from lightning_odc.balance import Cost, quadratic, transformer
from lightning_odc.balance.costs import MICROBATCH
from lightning_odc.data.packing import PackingCollator
from lightning_odc.data.rng import isolated_rng
from lightning_odc.strategy.sharded import ShardedStrategy

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_LENGTH = 4
_PART_OF_A_LEAK = 0.25
_KNOWN = "_odc_keeps_apart"  # the attribute of a model that `keeps_apart` writes


def causal_model(module: nn.Module) -> nn.Module | None:
    """The outermost Hugging Face model that predicts the next token, in a module or the module itself; or ``None``."""
    models = [part for part in module.modules() if _is_causal(part)]
    # Of several, the first with parameters to train is meant, so that a frozen teacher is passed over.
    trained = (model for model in models if any(parameter.requires_grad for parameter in model.parameters()))
    return next(trained, models[0] if models else None)


def _is_causal(part: nn.Module) -> bool:
    config = getattr(part, "config", None)
    is_two_part = getattr(config, "is_encoder_decoder", False)
    return type(part).__name__.endswith(_CAUSAL) and _is_configuration(config) and not is_two_part


def hugging_face_config(module: nn.Module) -> Any | None:
    """The first configuration of Hugging Face's in a module, outermost first: a ``config`` with a ``model_type``."""
    model = causal_model(module)
    parts = [*([] if model is None else [model]), *module.modules()]
    configs = (getattr(part, "config", None) for part in parts)
    return next((config for config in configs if _is_configuration(config)), None)


def _is_configuration(config: Any) -> bool:
    return callable(getattr(config, "to_dict", None)) and isinstance(getattr(config, "model_type", None), str)


def packing_trouble(strategy: ShardedStrategy) -> str:
    """Why samples of this model must not be packed, on all ranks together; empty if it keeps them apart."""
    module: Any = strategy.lightning_module
    model = causal_model(module)
    if model is None:
        return (
            f"{_name(module)} has no Hugging Face causal model to pack for: write packing=False, or "
            "collate_fn=lightning_odc.data.packing.pack_samples for a model of your own."
        )
    # Nothing of the three tiny batches stays: see Note [A leak is measured by a leak].
    trouble: list[str] = []
    strategy.engine.refresh()
    # Within the forward of the sharded module, parameters are gathered.
    module.odc_check = lambda: trouble.append(_trouble_of(model, strategy.root_device))
    try:
        with undisturbed(module, strategy.root_device), strategy.precision_plugin.forward_context():
            _compat_lightning.call_as_forward(strategy.model, module, "odc_check")
    finally:
        del module.odc_check
    strategy.engine.reshard()
    return next(filter(None, strategy.engine.exchange("check of packing", trouble[0])), "")


def keeps_apart(model: nn.Module, device: torch.device) -> bool:
    """Whether a model keeps packed samples apart. Inside a step of the module, and the same on all ranks."""
    # Found out once per model and kind of attention, see Note [A leak is measured by a leak].
    attention = _compat.attention_of(model.config)
    known: tuple[Any, bool] | None = vars(model).get(_KNOWN)
    if known is None or known[0] != attention:
        with undisturbed(model, device):
            known = attention, not _trouble_of(model, device)
        setattr(model, _KNOWN, known)
    return known[1]


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run without dropout and gradients, and restore modes and random numbers."""
    modes = [(part, part.training) for part in module.modules()]
    devices = [device] if device.type == "cuda" else []
    module.eval()
    try:
        with torch.no_grad(), isolated_rng(), torch.random.fork_rng(devices):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _trouble_of(model: nn.Module, device: torch.device) -> str:
    """What is wrong on this rank, see `packing_trouble`."""
    attention = _compat.attention_of(model.config)
    shown = _name(model) + ("" if attention is None else f" (attn_implementation={attention!r})")
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    special = [getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    # Twelve tokens. Of a vocabulary of 140: 10, 20, 30 and so on. The first and the last ones are often special.
    tokens = [int(text.vocab_size) * (index + 1) // (3 * _LENGTH + 2) for index in range(3 * _LENGTH)]
    tokens = [token + 1 if token in special else token for token in tokens]
    a, b, c = (tokens[first : first + _LENGTH] for first in range(0, 3 * _LENGTH, _LENGTH))
    second = slice(_LENGTH, 2 * _LENGTH)
    try:
        packed = [_logits(model, PackingCollator()(row), device)[0, second] for row in ([a, b, c], [c, b, a])]
    except TypeError as error:
        return f"{shown} does not take what a packed batch has ({error}): write packing=False."
    plain = _logits(model, {"input_ids": torch.tensor([b + a + c, a + b + c, c + b + a])}, device)
    alone, leaking = plain[0, :_LENGTH], plain[1:, second]
    if not bool(_distance(leaking[0], leaking[1]) > 0):  # NaN, too: parameters may have no values yet
        return f"{shown} could not be checked, since its outputs do not depend on its inputs yet: write packing=False."
    if _distance(*packed) > _PART_OF_A_LEAK * _distance(leaking[0], leaking[1]):
        # PEFT's outer one takes any argument.
        inner = [part for part in model.modules() if _is_causal(part)][-1]
        why = (
            "the outputs of a sample change with its neighbours. Write packing=False, or load the model with another "
            'attn_implementation, such as "sdpa" or "flash_attention_2"'
        )
        if "position_ids" not in inspect.signature(inner.forward).parameters:
            why = "it has no position_ids, by which they are kept apart. Write packing=False"
        return f"{shown} lets packed samples see each other: {why}."
    if _distance(packed[0], alone) > _PART_OF_A_LEAK * _distance(leaking[0], alone):
        return (
            f"{shown} gives packed samples other outputs than single ones: it does not number the tokens of each by "
            "position_ids from 0. Write packing=False."
        )
    return ""


def _name(module: nn.Module) -> str:
    """The class name that the user knows."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _logits(model: nn.Module, batch: dict[str, Any], device: torch.device) -> Tensor:
    """``[rows, tokens, vocabulary]``, fp32."""
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return cast(Tensor, model(**{"use_cache": False, **moved}).logits).float()


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max()


def watch_packed_calls(model: nn.Module) -> RemovableHandle:
    """Look once at how ``training_step`` calls a model with packed batches; the handle removes the watch."""

    def look(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        handle.remove()
        # A step that picks keys, `self.model(batch["input_ids"], labels=...)`, leaves out what keeps samples apart.
        is_whole = kwargs.get("position_ids") is not None and kwargs.get("use_cache") is False
        if not is_whole or kwargs.get("attention_mask") is not None:
            raise ValueError(
                "Packed samples see each other unless the model gets the whole batch as it is. Write "
                "`self.model(**batch)` in training_step (without an attention_mask), or packing=False."
            )

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    return handle


@dataclass(frozen=True)
class ModelCost:
    """A cost that was read off a model."""

    cost: Cost  # of a microbatch, in a unit of its own; the same on all ranks
    dense: bool | None  # whether attention runs over all tokens of a packed microbatch, if the model says it
    source: str  # what it was read from, in a few words


def cost_of_model(module: nn.Module, device_type: str) -> ModelCost:
    """The cost of the Hugging Face model in a module, or a guess for another one."""
    config = hugging_face_config(module)
    if config is None:
        guess = quadratic(constant=MICROBATCH, dense=True)
        return ModelCost(guess, None, "a model without a Hugging Face config")
    attention = _compat.attention_of(config)
    dense = None
    if attention is not None:
        dense = device_type == "cpu" or not any(word in attention for word in ("flash", "flex", "varlen"))
    source = f"{type(config).__name__.removesuffix('Config')} with {attention or 'unknown'} attention"
    try:
        known: Any = transformer(config, dense=dense is not False)
    except (ValueError, TypeError):  # experts, an encoder, lists of sizes, or unknown layers
        return ModelCost(quadratic(constant=MICROBATCH, dense=dense is not False), dense, source)
    return ModelCost(replace(known, constant=MICROBATCH * known.per_token), dense, source)
