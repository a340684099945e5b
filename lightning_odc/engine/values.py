"""The values of rank 0, for all ranks: as under DDP, a model is the same everywhere when training begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc._version import __version__
from lightning_odc.engine.units import compare_lines
from lightning_odc.protocol.transports.base import process_group_rendezvous

_AT_ONCE = 32  # tensors, which may all be copied to the device


def ranks_of_job() -> int:
    """How many ranks there are: one without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def give_first_values(
    model: nn.Module, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Let all ranks begin with the parameters and buffers of rank 0. All ranks together, before training.

    Args:
        model: It is not sharded. Tensor parallelism may divide it.
        device: The device that communicates.
        group: The ranks with the same part of the model, if it is divided.

    Raises:
        DisagreementError: Ranks have other parameters than rank 0.
    """
    if ranks_of_job() == 1:
        return
    lines = [f"lightning-odc {__version__}"]
    for name, parameter in model.named_parameters():
        kind = "trainable" if parameter.requires_grad else "frozen"
        lines.append(f"{name}: shape {list(parameter.shape)}, {parameter.dtype}, {kind}")
    compare_lines(process_group_rendezvous(dist.group.WORLD), lines)
    send_values(parameters_and_buffers(model), device)
    if group is not None:
        divided = (one.to_local() for one in model.parameters() if isinstance(one, DTensor))
        send_values(divided, device, group)


def parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    """In an order that is the same on all ranks."""
    return [*model.parameters(), *model.buffers()]


@torch.no_grad()
def send_values(
    tensors: Iterable[Tensor], device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Let all ranks have these tensors of rank 0, where each has them whole. All ranks together.

    Shards, tensors of other classes, and those on the meta device stay as they are.

    Args:
        tensors: Parameters and buffers, in the same order on all ranks.
        device: The device that communicates, if they are on another one.
        group: The ranks; by default all.
    """
    if ranks_of_job() == 1:
        return
    plain = (one for one in tensors if type(one.data) is Tensor and one.layout is torch.strided)
    whole = (one for one in plain if one.numel() and not one.is_meta)
    while chunk := [*islice(whole, _AT_ONCE)]:
        _send(chunk, device, group)


def _send(tensors: Sequence[Tensor], device: torch.device | None, group: dist.ProcessGroup | None) -> None:
    sent = []
    for tensor in tensors:
        # As bytes, which every backend can send. A view that repeats its numbers cannot be written to.
        own = tensor.detach().to(device=device).contiguous().view(-1)
        heard = own.view(torch.uint8)
        sent.append((tensor, own, dist.broadcast(heard, group=group, group_src=0, async_op=True)))
    for tensor, own, work in sent:
        assert work is not None
        work.wait()
        if own.data_ptr() != tensor.data_ptr():
            own = own.to(tensor.device)
            if not torch.equal(own, tensor.reshape(-1)):
                tensor.copy_(own.view(tensor.shape))
