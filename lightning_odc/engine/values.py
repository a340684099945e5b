"""The values of rank 0, for all ranks: as under DDP, a model is the same everywhere when training begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = 32  # tensors, which may all be copied to the device


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
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    whole = (one for one in tensors if one.numel() and type(one.data) is Tensor and not one.is_meta)
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
