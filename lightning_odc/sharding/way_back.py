"""The way back from a sharded model to what its user gave: the same parameters, whole, and modules without traces.

A shard knows its *origin*, the parameter that it has replaced. While the model is sharded, the origin has its shape and
no memory. Its values are not a number: code that holds it instead of the shard would compute with old ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_odc import _compat
from lightning_odc.engine.units import fsdp_modules

_ORIGIN = "origin"
#: At most so many elements are gathered at once: fewer take about as long. A larger tensor is gathered alone.
_TOGETHER = 2**24


def replaced(origin: nn.Parameter, shard: nn.Parameter) -> None:
    """Let a shard know its origin, and have what belongs to that."""
    _compat.take_over(origin, shard)
    # Quantised values and those of the meta device cannot be put back into it.
    if type(origin.data) is Tensor and not origin.is_meta:
        vars(shard)[_ORIGIN] = origin
        blank = torch.tensor(math.nan, device=origin.device)
        origin.data = blank.to(origin.dtype).expand(origin.shape)


def assembled(state: dict[Any, Any], *, copies: bool = False, is_kept: bool = True) -> dict[Any, Any]:
    """A state without shards: they become whole, in host memory. All ranks together.

    Args:
        state: Nested dictionaries, lists and tuples.
        copies: Other tensors are copied to host memory, too.
        is_kept: Otherwise ``None`` stands in the place of each of them.
    """
    shards: list[DTensor] = []
    apply_to_collection(state, DTensor, shards.append)
    wholes = whole_tensors(shards)

    def kept(value: Tensor) -> Tensor | None:
        if isinstance(value, DTensor):
            value = next(wholes)
        if is_kept:
            return value.to("cpu", copy=True)
        return None

    return apply_to_collection(state, Tensor if copies else DTensor, kept)


@torch.no_grad()
def whole_tensors(shards: Sequence[DTensor]) -> Iterator[Tensor]:
    """The whole tensors, in order. All ranks together. They may be views of what is gathered for several."""
    batches = (end // _TOGETHER for end in accumulate(shard.numel() for shard in shards))
    keys = zip(map(_how_sharded, shards), batches, strict=True)
    for ((mesh, placements, _), _), alike in groupby(shards, lambda _: next(keys)):
        now = [*alike]
        if not placements:
            yield from (shard.full_tensor() for shard in now)
            continue
        ranks = mesh.size(-1)
        # By rank: the rows of each shard, padded to those of the largest.
        numels = [-(-shard.size(0) // ranks) * math.prod(shard.shape[1:]) for shard in now]
        own = _compat.local_of(now[0]).new_zeros(sum(numels))
        for place, shard in zip(own.split(numels), now, strict=True):
            local = _compat.local_of(shard).flatten()
            place[: len(local)] = local
        by_rank = DTensor.from_local(own, mesh, placements).full_tensor().view(ranks, -1)
        for columns, shard in zip(by_rank.split(numels, 1), now, strict=True):
            yield columns.reshape(-1)[: shard.numel()].view(shard.shape)
        del own, by_rank, columns  # before the next ones are gathered


def _how_sharded(shard: DTensor) -> tuple[DeviceMesh, Sequence[Placement], torch.dtype]:
    """The mesh, the placements if it can be gathered with others (small, and cut into rows), and the dtype."""
    *others, last = shard.placements
    local = _compat.local_of(shard)
    mesh = shard.device_mesh
    is_by_rows = type(last) is Shard and last.dim == 0 and all(one.is_replicate() for one in others)
    is_by_rows = is_by_rows and shard.numel() < _TOGETHER
    is_plain = type(local) is Tensor and local.device.type == mesh.device_type  # else it may be offloaded
    return mesh, shard.placements if is_by_rows and is_plain else (), local.dtype


@torch.no_grad()
def make_whole(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Take ``fully_shard`` off a model. Its parameters are then in host memory. All ranks together.

    Returns:
        The whole parameters, by the shards that they have replaced.
    """
    shards: list[Any] = [one for one in model.parameters() if isinstance(one, DTensor)]
    values = zip(shards, whole_tensors(shards), strict=True)
    wholes = {shard: _whole(shard, value.to("cpu", copy=True)) for shard, value in values}
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
