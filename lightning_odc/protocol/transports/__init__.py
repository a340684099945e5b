"""How the bytes move: one contract (``base``), several bodies, and which of them a job gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_odc.errors import WindowError
from lightning_odc.protocol.transports.base import Rendezvous, Transport
from lightning_odc.protocol.transports.cuda import CudaTransport, SymmetricDevice
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport


def check_device(device_type: str, strategy: str = "ODCStrategy") -> None:
    """Refuse devices that have no windows."""
    if device_type not in ("cpu", "cuda"):
        raise WindowError(
            f"On-demand communication works between CPU processes and between NVIDIA GPUs, not between {device_type} "
            f'devices. Use Trainer(strategy="odc", accelerator="cpu", devices=2), or '
            f'{strategy}(communication="collective").'
        )


def make_transport(
    device: torch.device,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous,
    group: Any,
    job_ranks: Sequence[int] | None = None,
) -> Transport:
    """A fresh, unopened transport for ranks on such devices.

    Args:
        device: The device of this rank.
        rank: The rank in the group.
        world_size: Ranks of the group.
        rendezvous: What all ranks of the group exchange items by.
        group: The process group.
        job_ranks: The group's ranks in the job, for messages, where it is a part of it.
    """
    if device.type == "cpu":
        return SharedMemoryTransport(rank, world_size, rendezvous, job_ranks)
    return CudaTransport(rank, world_size, rendezvous, SymmetricDevice(device, group), job_ranks)
