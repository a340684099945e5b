"""Every private name of torch and Lightning that this package uses, in one place.

Tested with lightning 2.5.0 to 2.6.6 and torch 2.9.1 to 2.13.0; ``tests/test_compat.py`` fails when a name moves.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper

# Typed as Any: Lightning does not export these names, which is why they are here.
_lightning_fsdp: Any = importlib.import_module("lightning.fabric.strategies.fsdp")
_lightning_model_parallel: Any = importlib.import_module("lightning.fabric.strategies.model_parallel")

#: What ``zero_grad(set_to_none=False)`` may call on gradients.
ZEROING = (torch.Tensor.zero_, torch._foreach_zero_)

#: Context in which functions of tensor subclasses run as of plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass

METADATA_FILENAME: str = _lightning_fsdp._METADATA_FILENAME


@contextmanager
def logging_as(module: LightningModule, hook: str) -> Iterator[None]:
    """Let ``module.log`` take values as if it were called from ``hook``.

    Why: the value of a minibatch is known only when it ends, inside Lightning's ``optimizer_step`` hook, where
    logging is not allowed; it belongs to ``training_step``.
    """
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        yield
    finally:
        module._current_fx_name = before


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory and initial values (``reset_parameters``), module by module."""
    _lightning_model_parallel._materialize_distributed_module(module, device)


def wrap_checkpointed(module: nn.Module, policy: dict[str, Any]) -> None:
    """Wrap the modules that Lightning's ``activation_checkpointing_policy`` selects."""
    _lightning_fsdp._setup_activation_checkpointing(module, policy)


def selected_by(policy: Any, root: nn.Module) -> list[nn.Module]:
    """The modules that one of torch's policy objects (``CustomPolicy`` and the like) selects."""
    return list(policy._run_policy(root, set(), {}))


def is_sharded_checkpoint(path: Path) -> bool:
    return bool(_lightning_fsdp._is_sharded_checkpoint(path))


def save_sharded(state: dict[str, Any], path: Path) -> None:
    """Write a ``torch.distributed.checkpoint`` directory, all ranks together."""
    _lightning_fsdp._distributed_checkpoint_save(state, path)


def checkpoint_name(name: str) -> str:
    """The name of a parameter in checkpoints: wrappers for activation checkpointing or compiling leave no trace."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def load_sharded_checkpoint(
    path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a sharded checkpoint into ``fully_shard``-ed modules and their optimizers; returns the rest."""
    load: Callable[..., dict[str, Any]] = _lightning_model_parallel._load_checkpoint
    options: dict[str, Any] = {"strict": strict, "optimizer_states_from_list": True}
    if "weights_only" in inspect.signature(load).parameters:  # lightning >= 2.6
        options["weights_only"] = weights_only
    return load(path=path, state=state, **options)


def wrapped_sampler(sampler: Any) -> Any | None:
    """The user's own sampler inside the distributed one that Lightning has put around it.

    Why: an error must name what the user wrote.
    """
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def other_strategy_registry() -> Any | None:
    """The registry of the separate ``pytorch_lightning`` package, if that is installed.

    Why: ``pytorch_lightning.Trainer`` looks names up in a registry of its own, so ``"odc"`` must be there to explain
    itself. Importing the package after ``lightning`` costs less than 0.1 s.
    """
    if importlib.util.find_spec("pytorch_lightning") is None:
        return None
    log = rank_zero.log  # which the import would turn to its own logger, for everybody
    try:
        from pytorch_lightning.strategies import StrategyRegistry
    except Exception:
        return None  # a broken or foreign installation is none of our business
    finally:
        rank_zero.log = log
    return StrategyRegistry
