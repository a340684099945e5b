"""Which transport a job gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_odc.engine.transports.base import Rendezvous, Transport
from lightning_odc.engine.transports.cuda import CudaTransport
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport

_BY_DEVICE = {"cpu": "shared_memory", "cuda": "cuda"}


def check_transport(transport: str, device_type: str, strategy: str = "ODCStrategy") -> None:
    """Refuse devices that have no windows, and a transport that is another device's.

    Raises:
        ValueError: No transport fits; the message has the line to write instead.
    """
    fitting = _BY_DEVICE.get(device_type)
    if fitting is None:
        raise ValueError(
            f"On-demand communication works between CPU processes and between NVIDIA GPUs, not between {device_type} "
            f'devices. Use Trainer(strategy="odc", accelerator="cpu", devices=2), or '
            f'{strategy}(communication="collective").'
        )
    if transport not in ("auto", fitting):
        raise ValueError(
            f'{strategy}(transport="{transport}") is not for {device_type} devices: write transport="{fitting}", or '
            "leave it out."
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
        device: Device of this rank.
        rank: Rank in the group.
        world_size: World size of the group.
        rendezvous: exchanges small objects between all ranks of the group.
        group: process group of the ranks.
        job_ranks: where these are a part of the job, their ranks in it, for messages.
    """
    if device.type == "cpu":
        return SharedMemoryTransport(rank, world_size, rendezvous, job_ranks)
    from lightning_odc.engine.transports.symmetric import SymmetricDevice

    return CudaTransport(rank, world_size, rendezvous, SymmetricDevice(device, group), job_ranks)
