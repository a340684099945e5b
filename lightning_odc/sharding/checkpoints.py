"""Saving and loading sharded models: the half of a strategy that deals with state dicts.

Full checkpoints are ordinary Lightning checkpoints. Sharded ones are ``torch.distributed.checkpoint`` directories, of
which every rank writes and reads its part.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_odc import _compat, _compat_lightning
from lightning_odc.files import not_written, replacing, why_no_room
from lightning_odc.sharding.optimizers import StateDict, parameters_of
from lightning_odc.sharding.stepping import part_of
from lightning_odc.sharding.untrusted import refuse_code
from lightning_odc.sharding.way_back import assembled

Location = Path | str
"""Where a checkpoint is: a path, or a URL."""

_ADVICE = 'A full checkpoint cannot be loaded here: save with ODCStrategy(state_dict_type="sharded").'
#: Under which Lightning saves the state of our precision plugin: the name of its class.
PRECISION_KEY = "ODCPrecision"
#: What the model's part is called by Lightning's ``FSDPStrategy`` (and here), and by its ``ModelParallelStrategy``.
_MODEL_KEYS = ("model", "state_dict")
#: How what it calls the parts of optimizers begins, before their numbers.
_OPTIMIZER = "optimizer_"
#: The index that ``torch.distributed.checkpoint`` writes.
_METADATA = ".metadata"


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoint files that are whole at every moment."""

    def save_checkpoint(self, checkpoint: StateDict, path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        # Lightning writes to the directory for temporary files and moves the result. On another file system moving is
        # copying, and a process that dies meanwhile leaves half a file in place of the earlier checkpoint.
        with replacing(target) as file:
            file.write(buffer.getbuffer())


def model_state(model: nn.Module, full: bool) -> StateDict:
    """What ``model.state_dict()`` returns; if ``full`` assembled on rank 0 (empty elsewhere), else this rank's shards.

    It may have rules of its own: other names, parts left out, extra state. All ranks together.
    """
    state = model.state_dict()
    if full:
        state = _whole_on_rank_0(state)
    return {_compat.checkpoint_name(name): value for name, value in state.items()}


def load_model_state(model: nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    """Load what `model_state` has returned, whole or in shards, through ``model.load_state_dict``."""
    names = {_compat.checkpoint_name(name): name for name in model.state_dict()}
    state = {names.get(_compat.checkpoint_name(name), name): value for name, value in saved.items()}
    by_own_rules = type(model).load_state_dict is not nn.Module.load_state_dict
    found = model.load_state_dict(state, strict=strict and by_own_rules)
    if strict and not by_own_rules:
        check_names(found.missing_keys, found.unexpected_keys)


def optimizer_state(model: nn.Module, optimizer: Optimizer | LightningOptimizer, full: bool) -> StateDict:
    """The optimizer's state; if ``full`` that of an ordinary optimizer on rank 0 (empty elsewhere), else shards."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    if not optimizer.param_groups:  # what Lightning puts in the place of an optimizer where there is none
        return {}
    if not full:
        return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    return _whole_on_rank_0(optimizer.state_dict())


def _whole_on_rank_0(state: StateDict) -> StateDict:
    """A state dict without shards on rank 0, and an empty one elsewhere. All ranks together."""
    is_kept = dist.get_rank() == 0
    state = assembled(state, copies=True, is_kept=is_kept)
    return state if is_kept else {}


def location(path: Location) -> Location:
    """Where a checkpoint is: a path, or a URL as it stands, in which ``Path`` would merge the slashes."""
    if "://" in str(path):
        return str(path)
    return Path(path)


def make_room(path: Location, full: bool, is_first: bool, barrier: Callable[[], None]) -> None:
    """Remove a checkpoint of the other kind where one is to be written. All ranks together."""
    if isinstance(path, str):
        if not full:
            raise ValueError(
                f"Sharded checkpoints need a path in a file system, not {path!r}. Use "
                'ODCStrategy(state_dict_type="full"), or a directory that is mounted.'
            )
        return
    if full and path.is_dir() and not _compat_lightning.is_sharded_checkpoint(path):
        raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
    barrier()  # so that no rank looks while something is being removed
    if is_first and full and path.is_dir():
        shutil.rmtree(path)
    elif is_first and not full:
        # What an earlier run may have left when it died while it wrote here, but never the only whole one.
        before = _beside(path, "before")
        shutil.rmtree(_beside(path, "unfinished"), ignore_errors=True)
        if path.exists():
            _discard(before, path)
        elif before.exists():
            before.rename(path)
        if path.is_file():
            path.unlink()
    barrier()


def load(
    path: Location,
    model: nn.Module,
    optimizers: list[Optimizer],
    strict: bool,
    weights_only: bool | None,
    checkpoint_io: CheckpointIO,
) -> StateDict:
    """Read a checkpoint; shards go into the model. A full one comes back whole, else the rest. All ranks together.

    Args:
        path: A file, a directory of shards, or a URL.
        model: What gets the shards.
        optimizers: None if their states are not needed.
        strict: Whether all names must be the model's.
        weights_only: The argument of ``torch.load``.
        checkpoint_io: What reads full checkpoints.
    """
    if isinstance(path, Path) and not path.exists() and _beside(path, "before").exists():
        path = _beside(path, "before")  # a job died while it wrote, see `save_shards`
    if isinstance(path, Path) and not path.is_file():
        if not _compat_lightning.is_sharded_checkpoint(path):
            raise FileNotFoundError(f"{path} is not a checkpoint: neither a file nor a directory of shards.")
        rest = _load_shards(path, model, strict, weights_only)
    else:
        rest = _read(path, checkpoint_io, weights_only)
    saved = len(rest.setdefault("optimizer_states", []))
    if optimizers and saved != len(optimizers):
        raise ValueError(
            f"The checkpoint has {saved} optimizers, `configure_optimizers` made {len(optimizers)}. To load the model "
            "alone, write `trainer.fit(MyModule.load_from_checkpoint(path))`, without `ckpt_path`."
        )
    # The loss scale of other strategies, by the name of their class.
    for other in ("FSDPPrecision", "MixedPrecision"):
        if other in rest:
            rest.setdefault(PRECISION_KEY, rest[other])
    return rest


def _read(path: Location, checkpoint_io: CheckpointIO, weights_only: bool | None) -> StateDict:
    """A full checkpoint. A local file is mapped and not read as a whole, unless it is in a format of the user's."""
    if type(checkpoint_io) not in (WholeCheckpointIO, AsyncCheckpointIO):
        load_checkpoint: Callable[..., Any] = checkpoint_io.load_checkpoint
        if weights_only is None:  # what was written for Lightning 2.5 does not take it
            return load_checkpoint(path)
        return load_checkpoint(path, weights_only=weights_only)
    if isinstance(path, Path):
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    with get_filesystem(path).open(path, "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=weights_only)


def load_optimizer(saved: Any, optimizer: Optimizer, model: nn.Module) -> None:
    """Load the state of an optimizer from what `load` has returned. All ranks together."""
    if callable(saved):  # what loads it, from shards
        saved(optimizer, model)
        return
    known = _labelled(optimizer, saved["param_groups"], model)
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    state = {}
    for label, values in saved.get("state", {}).items():  # which consolidating leaves out if it is empty
        parameter = known[label]
        parts = {name: part_of(value, parameter, _ADVICE) for name, value in values.items()}
        state[numbers[parameter]] = parts
    groups = []
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        held = [numbers[parameter] for parameter in own["params"]]
        groups.append({**group, "params": held})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _labelled(
    optimizer: Optimizer, saved_groups: list[StateDict], model: nn.Module
) -> dict[str | int, nn.Parameter]:
    """Parameters by their labels in a checkpoint: names, or numbers of which only the order in the groups counts."""
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"The checkpoint's optimizer has {saved_sizes} parameters in its groups (a parameter group is an entry of "
            f"the list), this one has {sizes}. Resume with the `configure_optimizers` that it was saved with, and with "
            "the callbacks, if they add parameters."
        )
    names = {_compat.checkpoint_name(name): parameter for name, parameter in model.named_parameters()}
    known = {}
    for saved_group, group in zip(saved_groups, optimizer.param_groups, strict=True):
        for label, parameter in zip(saved_group["params"], group["params"], strict=True):
            known[label] = parameter
            if isinstance(label, str):
                if label not in names:
                    raise ValueError(
                        f"The checkpoint has optimizer state for {label!r}, which is not a parameter of this model. "
                        "Resume with the `configure_optimizers` that it was saved with."
                    )
                known[label] = names[label]
    return known


# -- sharded checkpoints -----------------------------------------------------------------------------------


def save_shards(checkpoint: StateDict, path: Path, rank: int, barrier: Callable[[], None]) -> None:
    """Write shards of model and optimizers, and one file with everything else. All ranks together."""
    unfinished = _beside(path, "unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    # These names are expected by Lightning's tool for consolidating checkpoints.
    state = {_MODEL_KEYS[0]: checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    for number, of_optimizer in enumerate(states):
        state[f"{_OPTIMIZER}{number}"] = of_optimizer
    try:
        _compat_lightning.save_sharded(state, unfinished)
        if rank == 0:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            (unfinished / _compat_lightning.METADATA_FILENAME).write_bytes(buffer.getbuffer())
    except (CheckpointException, OSError) as error:
        trouble: BaseException = error
        if isinstance(
            error, CheckpointException
        ):  # which all ranks get, and which does not say that a disk is full
            trouble = why_no_room(unfinished) or error
            barrier()
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        trouble.add_note(not_written(path))
        raise trouble from None
    if rank == 0:
        # Directories cannot be replaced in one go: for a moment the old one has another name, and is then removed.
        before = _beside(path, "before")
        if path.exists():
            path.rename(before)
        unfinished.rename(path)
        _discard(before, path)


def _discard(before: Path, path: Path) -> None:
    """Remove a checkpoint that ``path`` has replaced, but keep other files in its directory."""
    if not before.exists():
        return
    described = (_METADATA, _compat_lightning.METADATA_FILENAME)
    for entry in before.iterdir():
        is_part = entry.suffix == ".distcp" or entry.name in described
        if not is_part and not (path / entry.name).exists():
            entry.rename(path / entry.name)
    shutil.rmtree(before, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _load_shards(path: Path, model: nn.Module, strict: bool, weights_only: bool | None) -> StateDict:
    """Read this rank's part, however many ranks wrote the checkpoint; see `load`."""
    if weights_only is not False:
        refuse_code(path)
    names = _names_in(path)
    parts = {name.partition(".")[0] for name in names}
    key = next(key for key in _MODEL_KEYS if key in parts)
    state = {key: model_state(model, full=False)}
    if strict:
        prefix = f"{key}."
        wanted = {name for name, value in state[key].items() if isinstance(value, Tensor)}
        extra = tuple(
            f"{prefix}{name}" for name in state[key].keys() - wanted
        )  # whose parts have names there, too
        saved = {
            name.removeprefix(prefix)
            for name in names
            if name.startswith(prefix) and not name.startswith(extra)
        }
        check_names(wanted - saved, saved - wanted)
    load_distributed(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    load_model_state(model, state[key], strict)
    metadata = path / _compat_lightning.METADATA_FILENAME
    rest: StateDict = torch.load(metadata, weights_only=weights_only)
    count = sum(part.startswith(_OPTIMIZER) for part in parts)
    keys = [f"{_OPTIMIZER}{index}" for index in range(count)]
    rest["optimizer_states"] = [partial(_load_optimizer_shards, path, key) for key in keys]  # not read yet
    return rest


def _names_in(path: Path) -> list[str]:
    """The names of everything that a sharded checkpoint holds."""
    return list(FileSystemReader(path).read_metadata().state_dict_metadata)


def _load_optimizer_shards(path: Path, key: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Read this rank's part of an optimizer's state; all ranks together."""
    with_state = _with_state(path, key, optimizer, model)
    frozen = [parameter for parameter in with_state if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)  # torch leaves out the state of those that are not trained now
    try:
        state: StateDict = {key: get_optimizer_state_dict(model, optimizer)}
        load_distributed(state, checkpoint_id=path, planner=DefaultLoadPlanner())
        set_optimizer_state_dict(model, optimizer, state[key], options=StateDictOptions(cpu_offload=True))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _with_state(path: Path, key: str, optimizer: Optimizer, model: nn.Module) -> set[nn.Parameter]:
    """The parameters that the checkpoint has state for."""
    held = set(parameters_of(optimizer))
    named = {
        _compat.checkpoint_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter in held
    }
    prefix = f"{key}.state."
    entries = [name.removeprefix(prefix) for name in _names_in(path) if name.startswith(prefix)]
    found = set()
    for entry in entries:
        name = entry
        # What follows the name of the parameter is up to the optimizer.
        while name and name not in named:
            name = name.rpartition(".")[0]
        if not name:
            raise ValueError(
                f"The checkpoint has {entry!r} of a parameter on which this optimizer does not step. Resume with the "
                "`configure_optimizers` that it was saved with, and with the callbacks, if they add parameters."
            )
        found.add(named[name])
    return found


def check_names(missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse a checkpoint that lacks names of parameters and buffers, or has others."""
    if missing or unexpected:
        raise RuntimeError(
            f"The checkpoint does not fit the model: it lacks {sorted(missing)} and has {sorted(unexpected)} too many. "
            "To load what fits, set `self.strict_loading = False` in the LightningModule."
        )


# -- hyperparameters ---------------------------------------------------------------------------------------


class _Looks(pickle.Pickler):
    """Finds out whether something can be pickled, without looking into tensors."""

    def persistent_id(self, value: object) -> str | None:
        if isinstance(value, DTensor):
            raise TypeError("a shard, which no file holds")
        if isinstance(value, Tensor):
            return "a tensor"
        return None


def keep_savable(checkpoint: StateDict, owners: Sequence[Any]) -> list[str]:
    """Take out hyperparameters that cannot be saved; modules become what they were when they were given.

    Args:
        checkpoint: What Lightning has put together; changed in place.
        owners: The modules and data modules that may have called ``save_hyperparameters``.

    Returns:
        The names that were taken out.
    """
    left_out = []
    for owner in owners:
        saved = checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)
        if not isinstance(saved, dict):
            continue
        for name, value in [*saved.items()]:
            try:
                if isinstance(value, nn.Module):  # which is sharded by now, if it is a part of the model
                    saved[name] = owner.hparams_initial[name]
                _Looks(io.BytesIO()).dump(saved[name])
            except Exception:  # whatever a class raises
                del saved[name]
                left_out.append(name)
    return left_out
