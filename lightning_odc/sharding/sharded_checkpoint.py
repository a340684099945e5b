"""Sharded checkpoints: ``torch.distributed.checkpoint`` directories that every rank writes and reads its part of."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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

from lightning_odc import _compat, _compat_lightning

#: What the model's part is called by Lightning's ``FSDPStrategy`` (and here), and by its ``ModelParallelStrategy``.
_MODEL_KEYS = ("model", "state_dict")
#: The index that ``torch.distributed.checkpoint`` writes.
_METADATA = ".metadata"


def save(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write shards of model and optimizers, and one file with everything else. All ranks together."""
    unfinished = _unfinished(path)
    unfinished.mkdir(parents=True, exist_ok=True)
    # These names are expected by Lightning's tool for consolidating checkpoints.
    state = {_MODEL_KEYS[0]: checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    state.update({f"{OptimizerShards.prefix}{index}": state for index, state in enumerate(states)})
    _compat_lightning.save_sharded(state, unfinished)
    if rank == 0:
        torch.save(checkpoint, unfinished / _compat_lightning.METADATA_FILENAME)
        # Directories cannot be replaced in one go: for a moment the old one has another name, and is then removed.
        before = _before(path)
        if path.exists():
            path.rename(before)
        unfinished.rename(path)
        _discard(before, path)


def discard_unfinished(path: Path) -> None:
    """Remove what an earlier run may have left when it died while it wrote ``path``, but never the only whole one."""
    shutil.rmtree(_unfinished(path), ignore_errors=True)
    before = _before(path)
    if path.exists():
        _discard(before, path)
    elif before.exists():
        before.rename(path)


def _discard(before: Path, path: Path) -> None:
    """Remove a checkpoint that ``path`` has replaced, but keep other files in its directory."""
    for entry in before.iterdir() if before.exists() else ():
        is_part = entry.suffix == ".distcp" or entry.name in (_METADATA, _compat_lightning.METADATA_FILENAME)
        if not is_part and not (path / entry.name).exists():
            entry.rename(path / entry.name)
    shutil.rmtree(before, ignore_errors=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def load(path: Path, model: nn.Module, strict: bool, weights_only: bool) -> dict[str, Any]:
    """Read this rank's part, however many ranks wrote the checkpoint; see `load` of `full_checkpoint`."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    parts = {name.partition(".")[0] for name in names}
    key = next(key for key in _MODEL_KEYS if key in parts)
    state = {key: get_model_state_dict(model)}
    if strict:
        check_names([n.removeprefix(f"{key}.") for n in names if n.startswith(f"{key}.")], state[key].keys())
    load_distributed(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    set_model_state_dict(model, state[key], options=StateDictOptions(strict=strict))
    rest: dict[str, Any] = torch.load(path / _compat_lightning.METADATA_FILENAME, weights_only=weights_only)
    count = sum(part.startswith(OptimizerShards.prefix) for part in parts)
    rest["optimizer_states"] = [OptimizerShards(path, index) for index in range(count)]
    return rest


@dataclass(frozen=True)
class OptimizerShards:
    """The state of one optimizer in a sharded checkpoint, not read yet."""

    prefix: ClassVar[str] = "optimizer_"
    path: Path
    index: int

    def load(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Read this rank's part; all ranks together."""
        frozen = [p for p in self._with_state(optimizer, model) if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)  # torch leaves out the state of those that are not trained now
        try:
            state: dict[str, Any] = {self._key: get_optimizer_state_dict(model, optimizer)}
            load_distributed(state, checkpoint_id=self.path, planner=DefaultLoadPlanner())
            options = StateDictOptions(cpu_offload=True)
            set_optimizer_state_dict(model, optimizer, state[self._key], options=options)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    @property
    def _key(self) -> str:
        return f"{self.prefix}{self.index}"

    def _with_state(self, optimizer: Optimizer, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that the checkpoint has state for."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = {_compat.checkpoint_name(name): p for name, p in model.named_parameters() if p in held}
        begin, found = f"{self._key}.state.", set()
        for entry in FileSystemReader(self.path).read_metadata().state_dict_metadata:
            if entry.startswith(begin):
                name = entry.removeprefix(begin)
                # What follows the name of the parameter is up to the optimizer.
                while name and name not in named:
                    name = name.rpartition(".")[0]
                if not name:
                    raise ValueError(
                        f"The checkpoint has {entry.removeprefix(begin)!r} of a parameter on which this optimizer does "
                        "not step. Resume with the `configure_optimizers` that it was saved with, and with the "
                        "callbacks, if they add parameters."
                    )
                found.add(name)
        return [named[name] for name in found]


def check_names(saved: Collection[str], wanted: Collection[str]) -> None:
    """Compare the names of parameters and buffers."""
    missing = sorted(set(wanted) - set(saved))
    unexpected = sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise RuntimeError(
            f"The checkpoint does not fit the model: it lacks {missing} and has {unexpected} too many. To load what "
            "fits, set `self.strict_loading = False` in the LightningModule."
        )


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a fit that was stopped in the middle of an epoch go on there, if its loader has saved the place."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    places = loop.get("state_dict", {}).get("combined_loader", [])
    if not places or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    epochs = loop["epoch_progress"]
    done = epochs["current"]["processed"] - 1
    if all(place.get("epoch") == done and place.get("minibatches") is not None for place in places):
        # Lightning counts an epoch that was stopped as done: the other samples of the epoch would be lost.
        for progress in (epochs["current"], epochs["total"]):
            progress["processed"] -= 1
            progress["completed"] = progress["processed"]
