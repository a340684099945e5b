"""The causal language model inside a module: whether it keeps packed samples apart.

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_odc import _compat, _compat_lightning
from lightning_odc.data.model_cost import causal_model
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.samples.rng import isolated_rng
from lightning_odc.strategy.setup.sharded import ShardedStrategy

_LENGTH = 4
_PART_OF_A_LEAK = 0.25
_KNOWN = "_odc_separates_samples"  # the attribute of a model that `separates_samples` writes


def packing_trouble(strategy: ShardedStrategy) -> str:
    """Why samples of this model must not be packed, on all ranks together; empty if it keeps them apart."""
    module: Any = strategy.lightning_module
    model = causal_model(module)
    if model is None:
        return (
            f"{_name(module)} has no Hugging Face causal model to pack for: write packing=False, or "
            "collate_fn=lightning_odc.samples.packing.pack_samples for a model of your own."
        )
    # Nothing of the three tiny batches stays: see Note [A leak is measured by a leak].
    trouble = []
    strategy.engine.refresh()
    # Within the forward of the sharded module, parameters are gathered.
    module.odc_check = lambda: trouble.append(_trouble_of(model, strategy.root_device))
    try:
        with undisturbed(module, strategy.root_device), strategy.precision_plugin.forward_context():
            _compat_lightning.call_as_forward(strategy.model, module, "odc_check")
    finally:
        del module.odc_check
    strategy.engine.reshard()
    by_rank: list[str] = strategy.engine.exchange("check of packing", trouble[0])
    return next(filter(None, by_rank), "")


def separates_samples(model: nn.Module, device: torch.device) -> bool:
    """Whether a model keeps packed samples apart. Inside a step of the module, and the same on all ranks."""
    # Found out once per model, see Note [A leak is measured by a leak].
    if not hasattr(model, _KNOWN):
        with undisturbed(model, device):
            setattr(model, _KNOWN, not _trouble_of(model, device))
    return bool(getattr(model, _KNOWN))


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run without dropout and gradients, and restore modes and random numbers."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), isolated_rng(device):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _trouble_of(model: nn.Module, device: torch.device) -> str:
    """What is wrong on this rank, see `packing_trouble`."""
    shown = _name(model)
    attention = _compat.attention_of(model.config)
    if attention is not None:
        shown += f" (attn_implementation={attention!r})"
    a, b, c = _samples_for(model)
    second = slice(_LENGTH, 2 * _LENGTH)
    try:
        packed = _logits(model, PackingCollator()([a, b, c]), device)[0, second]
        swapped = _logits(model, PackingCollator()([c, b, a]), device)[0, second]
    except TypeError as error:
        return f"{shown} does not take what a packed batch has ({error}): write packing=False."
    plain = _logits(model, {"input_ids": torch.tensor([b + a + c, a + b + c, c + b + a])}, device)
    alone = plain[0, :_LENGTH]
    leaking = plain[1, second]
    leaking_swapped = plain[2, second]
    leak = _distance(leaking, leaking_swapped)
    if not bool(leak > 0):  # NaN, too: parameters may have no values yet
        return f"{shown} could not be checked, since its outputs do not depend on its inputs yet: write packing=False."
    if _distance(packed, swapped) > _PART_OF_A_LEAK * leak:
        return (
            f"{shown} lets packed samples see each other: the outputs of a sample change with its neighbours. Write "
            "packing=False, or, if the model takes position_ids, load it with another attn_implementation, such as "
            '"sdpa" or "flash_attention_2".'
        )
    if _distance(packed, alone) > _PART_OF_A_LEAK * _distance(leaking, alone):
        return (
            f"{shown} gives packed samples other outputs than single ones: it does not number the tokens of each by "
            "position_ids from 0. Write packing=False."
        )
    return ""


def _samples_for(model: nn.Module) -> list[list[int]]:
    """The samples a, b and c, of other tokens each."""
    config: Any = model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    special = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    # Twelve. Of a vocabulary of 140: 10, 20, 30 and so on. The first and the last ones are often special.
    step = config.vocab_size / (3 * _LENGTH + 2)
    tokens = [int(step * number) for number in range(1, 3 * _LENGTH + 1)]
    tokens = [token + (token in special) for token in tokens]
    return [tokens[begin : begin + _LENGTH] for begin in range(0, 3 * _LENGTH, _LENGTH)]


def _name(module: nn.Module) -> str:
    """The class name that the user knows."""
    name = type(module).__name__
    if isinstance(module, FSDPModule):
        return name.removeprefix("FSDP")
    return name


def _logits(model: nn.Module, batch: Mapping[str, object], device: torch.device) -> Tensor:
    """``[rows, tokens, vocabulary]``, fp32."""
    moved = apply_to_collection(batch, Tensor, Tensor.to, device)
    return cast(Tensor, model(**{"use_cache": False, **moved}).logits).float()


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max()


def watch_packed_calls(model: nn.Module) -> RemovableHandle:
    """Look once at how ``training_step`` calls a model with packed batches; the handle removes the watch."""

    def look(model: nn.Module, _: object, kwargs: Mapping[str, object]) -> None:
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
