"""Whether a model is kept whole on every rank, as under DDP, or is sharded.

Note [What fits is kept whole]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Training a whole model takes, for each trained parameter in fp32, 4 bytes for its value, 4 for its gradient, 4 for the
sum of its gradients, and 8 for the two states of Adam; for a frozen one its value alone. If that is at most half of the
memory of a rank, the model is kept whole: the other half is for activations. Memory is what there is, not what happens
to be free, so that the answer is the same in every run. The rank with the least memory decides for all::

    3.2 million parameters        3.2 M x 20 = 64 MB      whole
    7 billion in bf16             7 G x 16 = 112 GB       sharded on GPUs of 80 GB
    the same, frozen, with LoRA   7 G x 2 = 14 GB         whole on GPUs of 80 GB
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_odc import host_memory
from lightning_odc.protocol.transports.base import Rendezvous

PART = 0.5
"""The part of the memory that the states of a whole model may take."""
_STATES = 8  # bytes of an optimizer's states for one parameter: two numbers in fp32


def is_sharded(model: nn.Module) -> bool:
    """Whether its user has sharded it, or a part of it."""
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def bytes_of(model: nn.Module, trains: bool = True) -> int:
    """What training a whole model takes on a rank, without activations; or having it."""
    size = 0
    for parameter in model.parameters():
        of_one = parameter.dtype.itemsize
        if trains and parameter.requires_grad:
            summed_in = torch.promote_types(parameter.dtype, torch.float32)
            of_one += of_one + summed_in.itemsize + _STATES
        size += of_one * parameter.numel()
    return size


def fits_whole(
    model: nn.Module, device: torch.device, on_node: int, rendezvous: Rendezvous, trains: bool = True
) -> tuple[bool, str]:
    """Whether a model is kept whole on all ranks, and how large it is in words. All ranks together."""
    memory = host_memory.total(on_node)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    least = min(rendezvous(memory))
    size = bytes_of(model, trains)
    count = sum(parameter.numel() for parameter in model.parameters())
    words = f"Model: {_short(count)} parameters, {_short(size)}B"
    if trains:
        words += " with Adam's states"
    if size <= PART * least:
        return True, f"{words}: whole on each rank, as under DDP"
    return False, f"{words}, which is more than half of the {_short(least)}B of a rank: sharded"


def _short(number: float) -> str:
    """A number as people write it: 3,200,000 is ``3.2 M``, and 64,000,000 is ``64 M``."""
    unit = ""
    for unit in ("", "k", "M", "G"):
        if number < 1000 or unit == "G":
            break
        number /= 1000
    digits = 1 if number < 10 and unit else 0
    return f"{number:.{digits}f} {unit}"
