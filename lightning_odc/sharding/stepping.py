"""Clipping and stepping over shards; whole values and their parts.

It does without Lightning, as `attach` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop


def clip(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the norm of all gradients; returns what it was."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter, "device_mesh", None)  # of plain tensors, none
            by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh.keys() - {None}) < 2:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return whole(norm)
    # With tensor parallelism, some are on two dimensions and some on one, and torch takes no norm of both.
    norms = []
    for group in by_mesh.values():
        gradients = [cast(Tensor, parameter.grad) for parameter in group]
        norms.append(whole(nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def whole(value: Tensor) -> Tensor:
    """The whole of a tensor. If it is sharded, all ranks together."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


class ShardedParameter(DTensor):
    """A parameter that takes its part of a whole value, as a plain one takes all of it."""

    # DTensor refuses a whole value in `copy_`, and ``parameter.data = value`` changes nothing and raises nothing.

    def copy_(self, value: Any, non_blocking: bool = False) -> Any:
        if not isinstance(value, DTensor):
            value = part_of(value.expand(self.shape), self, "")
        return super().copy_(value, non_blocking)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            with torch.no_grad():
                self.copy_(value)
        else:
            super().__setattr__(name, value)


def take_parts(model: Any) -> None:
    """Let the sharded parameters of a model take their parts of whole values."""
    for parameter in model.parameters():
        if type(parameter) is DTensor:
            parameter.__class__ = ShardedParameter


def part_of(value: object, parameter: object, advice: str) -> object:
    """This rank's part of a value that has one number per element of a sharded parameter; scalars as they are."""
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim):
        return value
    shape = list(parameter.shape)
    if list(value.shape) != shape:
        raise ValueError(
            f"The optimizer keeps a state of shape {list(value.shape)} for a parameter of shape {shape}, and nothing "
            f"tells how to shard it. {advice}"
        )
    mesh = parameter.device_mesh
    part = distribute_tensor(
        whole(value).to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
    return part.to(parameter.device)  # which is the CPU where shards are offloaded


#: With ``foreach=True``, these have bit for bit the results of their loop over parameters; a test compares them.
_EQUAL = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop)
_EQUAL_DTYPES = (torch.float32, torch.float64)  # in bf16, roundings differ


@contextmanager
def by_lists(*optimizers: Optimizer) -> Iterator[None]:
    """A context in which optimizers step over lists of shards, if their results stay what they are."""
    # On GPUs torch does that by itself. On CPUs it loops over parameters, because lists save nothing for plain tensors.
    # For shards (DTensor) they do: each operation is dispatched once per list instead of once per parameter. Groups
    # that say ``foreach`` or ``fused`` themselves stay as they are, and so does what a checkpoint has of them.
    known = [optimizer for optimizer in optimizers if type(optimizer) in _EQUAL]
    groups = [group for optimizer in known for group in optimizer.param_groups if _is_open(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _is_open(group: dict[str, Any]) -> bool:
    """Whether a group leaves it to torch how it steps, and its parameters can be in one list."""
    if group.get("foreach") is not None or group.get("fused") or group.get("differentiable"):
        return False
    shards: list[DTensor] = group["params"]
    is_other = any(shard.device.type != "cpu" or shard.dtype not in _EQUAL_DTYPES for shard in shards)
    if is_other or isinstance(group["lr"], Tensor):
        return False
    meshes = {getattr(shard, "device_mesh", None) for shard in shards}  # of plain tensors, none
    return len(meshes) == 1 and None not in meshes
