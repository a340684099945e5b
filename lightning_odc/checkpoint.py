"""Saving and loading sharded models: the half of a strategy that deals with state dicts.

Full checkpoints are ordinary Lightning checkpoints; sharded ones are ``torch.distributed.checkpoint`` directories.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_odc import _compat
from lightning_odc.precision import ODCPrecision


def model_state(model: nn.Module, full: bool) -> dict[str, Any]:
    """The model's state; if ``full`` assembled on rank 0 (empty elsewhere), else this rank's shards."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def optimizer_state(
    model: nn.Module, optimizer: Optimizer | LightningOptimizer, full: bool, rank: int
) -> dict[str, Any]:
    """The optimizer's state; if ``full`` that of an ordinary optimizer on rank 0 (empty elsewhere), else shards."""
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    if not full:
        return get_optimizer_state_dict(model, inner, options=StateDictOptions(cpu_offload=True))
    state = apply_to_collection(inner.state_dict(), Tensor, partial(_assembled, keep=rank == 0))
    return cast(dict[str, Any], state) if rank == 0 else {}


def _assembled(value: Tensor, keep: bool) -> Tensor | None:
    """The whole of a sharded tensor. All ranks together; those that do not ``keep`` it only take part."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.to("cpu", copy=True) if keep else None


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
    """Load model and optimizers in place; returns the rest of the checkpoint. All ranks together.

    Args:
        path: of a full checkpoint (a file) or a sharded one (a directory).
        model: the sharded model.
        optimizers: those of the checkpoint, in their order; none to leave their states out.
        strict: refuse missing and unexpected parameters.
        weights_only: as in ``torch.load``.
    """
    weights_only = bool(weights_only)  # as everywhere in Lightning, where None trusts local files
    if path.is_file():
        rest = _load_full(path, model, optimizers, strict, weights_only)
    elif _compat.is_sharded_checkpoint(path):
        rest = _load_sharded(path, model, optimizers, strict, weights_only)
    else:
        raise FileNotFoundError(f"{path} is no checkpoint: neither a file nor a directory of shards.")
    for other in (
        "FSDPPrecision",
        "MixedPrecision",
    ):  # the loss scale of other strategies, by their class's name
        if other in rest:
            rest.setdefault(ODCPrecision.__name__, rest[other])
    return rest


def _load_sharded(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool
) -> dict[str, Any]:
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    state = {"state_dict": get_model_state_dict(model)}
    load_distributed(state, checkpoint_id=path, planner=planner)
    model.load_state_dict(state["state_dict"], strict=strict)
    for index, optimizer in enumerate(optimizers):
        optimizer_state: dict[str, Any] = {f"optimizer_{index}": get_optimizer_state_dict(model, optimizer)}
        load_distributed(optimizer_state, checkpoint_id=path, planner=DefaultLoadPlanner())
        (loaded,) = optimizer_state.values()
        set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(cpu_offload=True))
    rest: dict[str, Any] = torch.load(path / _compat.METADATA_FILENAME, weights_only=weights_only)
    return rest


def _load_full(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool
) -> dict[str, Any]:
    """Every rank takes its part of the file, which is mapped and not read as a whole."""
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    options = StateDictOptions(full_state_dict=True, strict=strict)
    saved_model = checkpoint.pop("state_dict")
    if strict:
        _check_names(saved_model.keys(), get_model_state_dict(model).keys())
    set_model_state_dict(model, saved_model, options=options)
    saved = checkpoint.get("optimizer_states", [])
    if optimizers and len(saved) != len(optimizers):
        raise ValueError(
            f"The checkpoint has {len(saved)} optimizers, `configure_optimizers` made {len(optimizers)}. To load the "
            "model alone, write `MyModule.load_from_checkpoint(path)` and fit without `ckpt_path`."
        )
    for optimizer, state in zip(optimizers, saved, strict=False):
        _load_optimizer(optimizer, state, model)
    return checkpoint


def _check_names(saved: Collection[str], wanted: Collection[str]) -> None:
    missing = sorted(set(wanted) - set(saved))
    unexpected = sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise RuntimeError(
            f"The checkpoint does not fit the model: it lacks {missing} and has {unexpected} too many. To load what "
            "fits, set `self.strict_loading = False` in the LightningModule."
        )


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any], model: nn.Module) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {parameter: _compat.checkpoint_name(name) for name, parameter in model.named_parameters()}
    # Strategies that shard may have saved names; a plain optimizer's state has positions in its groups.
    known = dict(enumerate(parameters)) | {names[p]: p for p in parameters if p in names}
    missing = [key for key in saved["state"] if key not in known]
    if missing:
        raise ValueError(
            f"The checkpoint has optimizer state for {missing[0]!r} (and {len(missing) - 1} more), which is no "
            "parameter of this optimizer. Resume with the `configure_optimizers` that it was saved with."
        )
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    state = {
        numbers[known[key]]: {name: _like(value, known[key]) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    groups = [
        {**group, "params": [numbers.get(known.get(key), key) for key in group["params"]]}
        for group in saved["param_groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(value: Any, parameter: Tensor) -> Any:
    """This rank's part of a value that has one number per element of a sharded parameter; scalars as they are."""
    if not (isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.ndim):
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"The optimizer keeps a state of shape {list(value.shape)} for a parameter of shape "
            f"{list(parameter.shape)}, and a full checkpoint does not tell how it was sharded. Save with "
            'ODCStrategy(state_dict_type="sharded").'
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
