"""Weight averages that Lightning's ``WeightAveraging`` callbacks keep beside a sharded model.

The callback copies the model before it is sharded. So the copy is sharded here in the same way: every rank averages,
swaps in and out its own shards, which also takes a ``world_size``-th of the memory.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_odc import _compat_lightning


def averages(trainer: pl.Trainer) -> list[nn.Module]:
    """The averaged copies of the model that callbacks hold, if it is being fitted."""
    return _compat_lightning.averaged_models(list(trainer.callbacks))  # type: ignore[attr-defined]


@torch.no_grad()
def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers of a model into its copy, which is sharded in the same way."""
    values = [*source.parameters(), *source.buffers()]
    for value, to in zip(values, [*target.parameters(), *target.buffers()], strict=True):
        to.copy_(value)


def check_kept_whole(found: list[nn.Module], full: bool) -> None:
    """Refuse what cannot be saved: the callback puts a second model into the checkpoint."""
    if found and not full:
        raise ValueError(
            "WeightAveraging callbacks put two models into a checkpoint, and a sharded one has room for one. Use "
            'ODCStrategy(state_dict_type="full") with them.'
        )


def assembled(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without shards: those of averages become whole. All ranks together."""
    return apply_to_collection(state, DTensor, lambda shard: shard.full_tensor().cpu())


def cut(checkpoint: dict[str, Any], model: nn.Module) -> None:
    """Cut the models in a full checkpoint into shards as ``model``, in place, as the callback loads them into it."""
    shards = get_model_state_dict(model)

    def like(value: Tensor, shard: Any) -> Tensor:
        if not isinstance(shard, DTensor):
            return value
        return distribute_tensor(
            value.to(shard.device_mesh.device_type), shard.device_mesh, shard.placements, src_data_rank=None
        )

    for key in ("state_dict", "current_model_state"):
        if key in checkpoint:
            checkpoint[key] = {n: like(value, shards.get(n)) for n, value in checkpoint[key].items()}
