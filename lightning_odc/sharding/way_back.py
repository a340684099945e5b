"""The way back from a sharded model to what its user gave: the same parameters, whole, and modules without traces.

A shard knows its *origin*, the parameter that it has replaced. While the model is sharded, the origin has its shape and
no memory. Its values are not a number: code that holds it instead of the shard would compute with old ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc import _compat
from lightning_odc.engine.units import fsdp_modules

_ORIGIN = "origin"


def replaced(origin: nn.Parameter, shard: nn.Parameter) -> None:
    """Let a shard know its origin, and have what belongs to that."""
    _compat.take_over(origin, shard)
    # Quantised values and those of the meta device cannot be put back into it.
    if type(origin.data) is Tensor and not origin.is_meta:
        vars(shard)[_ORIGIN] = origin
        blank = torch.tensor(math.nan, device=origin.device)
        origin.data = blank.to(origin.dtype).expand(origin.shape)


@torch.no_grad()
def make_whole(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Take ``fully_shard`` off a model. Its parameters are then in host memory. All ranks together.

    Returns:
        The whole parameters, by the shards that they have replaced.
    """
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            value = parameter.full_tensor().to("cpu", copy=True)  # without the padding of shards
            wholes[parameter] = _whole(parameter, value)
    # Until here ranks may fail, and the model is as before.
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter in wholes:
                setattr(module, name, wholes[parameter])
    for unit in fsdp_modules(model):
        _compat.take_off_shards(unit)
    return wholes


def _whole(shard: nn.Parameter, value: Tensor) -> nn.Parameter:
    parameter = vars(shard).pop(_ORIGIN, None)
    if parameter is None:
        parameter = nn.Parameter(value, requires_grad=shard.requires_grad)
    else:
        parameter.data = value
        parameter.requires_grad_(shard.requires_grad)
        parameter.grad = None
    _compat.take_over(shard, parameter)
    return parameter


def unwrap(model: nn.Module, wrappers: Collection[nn.Module]) -> None:
    """Put modules into the places of their wrappers again."""
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if child in wrappers:
                (inner,) = child.children()
                setattr(parent, name, inner)
