"""Sharded checkpoints: ``torch.distributed.checkpoint`` directories that every rank writes and reads its part of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.optim import Optimizer

from lightning_odc import _compat
from lightning_odc.checkpoint_checks import check_names, check_optimizers

#: What the model's part is called by Lightning's ``FSDPStrategy`` (and here), and by its ``ModelParallelStrategy``.
_MODEL_KEYS = ("model", "state_dict")
#: The index that ``torch.distributed.checkpoint`` writes.
_METADATA = ".metadata"


def save(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write shards of model and optimizers, and one file with everything else. All ranks together.

    They are written beside ``path`` and renamed when they are complete. The names are those of Lightning's
    ``FSDPStrategy``, which its tool for consolidating checkpoints expects.
    """
    unfinished = _unfinished(path)
    unfinished.mkdir(parents=True, exist_ok=True)
    state = {_MODEL_KEYS[0]: checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    state.update({f"optimizer_{index}": optimizer for index, optimizer in enumerate(states)})
    _compat.save_sharded(state, unfinished)
    if rank == 0:
        torch.save(checkpoint, unfinished / _compat.METADATA_FILENAME)
        _put_in_place(unfinished, path)


def discard_unfinished(path: Path) -> None:
    """Remove what an earlier run may have left when it died while it wrote ``path``, but never the only whole one."""
    shutil.rmtree(_unfinished(path), ignore_errors=True)
    before = _before(path)
    if path.exists():
        _discard(before, path)
    elif before.exists():
        before.rename(path)


def _put_in_place(unfinished: Path, path: Path) -> None:
    """Directories cannot be replaced in one go: for a moment the old one has another name, and is then removed."""
    before = _before(path)
    if path.exists():
        path.rename(before)
    unfinished.rename(path)
    _discard(before, path)


def _discard(before: Path, path: Path) -> None:
    """Remove a checkpoint that ``path`` has replaced, but keep what somebody else has put into its directory."""
    for entry in before.iterdir() if before.exists() else ():
        is_part = entry.suffix == ".distcp" or entry.name in (_METADATA, _compat.METADATA_FILENAME)
        if not is_part and not (path / entry.name).exists():
            entry.rename(path / entry.name)
    shutil.rmtree(before, ignore_errors=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def load(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool
) -> dict[str, Any]:
    """Read this rank's part, however many ranks wrote the checkpoint; see `load` of `checkpoint`."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    parts = {name.partition(".")[0] for name in names}
    key = next(key for key in _MODEL_KEYS if key in parts)
    state = {key: get_model_state_dict(model)}
    if strict:
        check_names([n.removeprefix(f"{key}.") for n in names if n.startswith(f"{key}.")], state[key].keys())
    check_optimizers(sum(part.startswith("optimizer_") for part in parts), len(optimizers))
    load_distributed(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    set_model_state_dict(model, state[key], options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        optimizer_state: dict[str, Any] = {f"optimizer_{index}": get_optimizer_state_dict(model, optimizer)}
        load_distributed(optimizer_state, checkpoint_id=path, planner=DefaultLoadPlanner())
        (loaded,) = optimizer_state.values()
        set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(cpu_offload=True))
    rest: dict[str, Any] = torch.load(path / _compat.METADATA_FILENAME, weights_only=weights_only)
    return rest
