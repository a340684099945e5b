"""Saving and loading sharded models: the half of a strategy that deals with state dicts.

Full checkpoints are ordinary Lightning checkpoints; sharded ones are ``torch.distributed.checkpoint`` directories.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_odc import _compat


def model_state(model: nn.Module, full: bool) -> dict[str, Any]:
    """The model's state; if ``full`` assembled on rank 0 (empty elsewhere), else this rank's shards."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def optimizer_state(
    model: nn.Module, optimizer: Optimizer | LightningOptimizer, full: bool, rank: int
) -> dict[str, Any]:
    """The optimizer's state, in the standard format with integer keys if ``full``."""
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    state = get_optimizer_state_dict(
        model, inner, options=StateDictOptions(full_state_dict=full, cpu_offload=True)
    )
    if full and rank == 0:
        return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model)
    return state


def save_sharded(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write a checkpoint directory: shards of model and optimizers, and one file with everything else."""
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    state = {"state_dict": checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    state.update({f"optimizer_{index}": optimizer for index, optimizer in enumerate(states)})
    _compat.save_sharded(state, path)
    if rank == 0:
        torch.save(checkpoint, path / _compat.METADATA_FILENAME)


def prepare_full(path: Path, rank: int) -> None:
    """Make room for a full checkpoint where a sharded one may lie.

    Raises:
        IsADirectoryError: if something else lies there.
    """
    if path.is_dir():
        if not _compat.is_sharded_checkpoint(path):
            raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
        if rank == 0:
            shutil.rmtree(path)


def load(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load model and optimizers in place; returns the rest of the checkpoint."""
    state: dict[str, Any] = {"state_dict": model}
    state.update({f"optimizer_{index}": optimizer for index, optimizer in enumerate(optimizers)})
    return _compat.load_checkpoint(path, state, strict, weights_only)
