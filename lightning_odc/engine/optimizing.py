"""How optimizers of torch step over shards on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop

#: With ``foreach=True``, these have bit for bit the results of their loop over parameters; a test compares them.
_EQUAL = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop)
_EQUAL_DTYPES = (torch.float32, torch.float64)  # in bf16, roundings differ


@contextmanager
def by_lists(*optimizers: Optimizer) -> Iterator[None]:
    """A context in which optimizers step over lists of shards, if their results stay what they are.

    On GPUs torch does that by itself. On CPUs it loops over parameters, because lists save nothing for plain tensors.
    For shards (DTensor) they do: each operation is dispatched once per list instead of once per parameter. Groups that
    say ``foreach`` or ``fused`` themselves stay as they are, and so does what a checkpoint has of them.
    """
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
    shards = group["params"]
    if not all(
        isinstance(p, DTensor) and p.device.type == "cpu" and p.dtype in _EQUAL_DTYPES for p in shards
    ):
        return False
    return len({p.device_mesh for p in shards}) == 1 and not isinstance(group["lr"], Tensor)
