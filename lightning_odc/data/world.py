"""How many ranks share a data set, and which one this is."""

from __future__ import annotations

import os

import torch.distributed as dist

_TEACH = "BalancedDataLoader(..., num_replicas=8, rank=3), or neither to take them from torch.distributed"


def check_world(num_replicas: int | None, rank: int | None) -> None:
    """Refuse a rank that cannot be.

    Raises:
        ValueError: one is given without the other, or ``rank`` is not one of ``num_replicas``.
    """
    if (num_replicas is None) != (rank is None):
        raise ValueError(f"num_replicas={num_replicas} and rank={rank} must be given together: {_TEACH}.")
    if num_replicas is None or rank is None:
        return
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank={rank} is not one of num_replicas={num_replicas} ranks, which count from 0: {_TEACH}."
        )


def current_world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and own rank: as given, else of the process group, else as ``torchrun`` says, else 1 and 0."""
    if num_replicas is not None and rank is not None:
        return num_replicas, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return 1, 0
