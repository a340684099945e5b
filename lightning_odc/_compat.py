"""Every private name of torch and Lightning that this package uses, in one place.

Tested with lightning 2.5.0 to 2.6.6 and torch 2.9.1 to 2.13.0; ``tests/test_compat.py`` fails when a name moves.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

# Typed as Any: Lightning does not export these names, which is why they are here.
_lightning_fsdp: Any = importlib.import_module("lightning.fabric.strategies.fsdp")
_lightning_model_parallel: Any = importlib.import_module("lightning.fabric.strategies.model_parallel")

#: What ``zero_grad(set_to_none=False)`` may call on gradients.
ZEROING = (torch.Tensor.zero_, torch._foreach_zero_)

#: Context in which functions of tensor subclasses run as of plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass

METADATA_FILENAME: str = _lightning_fsdp._METADATA_FILENAME

#: How the name of the action ends under which Lightning's training loop profiles the fetching of a batch.
FETCH_ACTION = ".train_dataloader_next"


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


def deals_out(trainer: Trainer) -> bool:
    """Whether Lightning puts a ``DistributedSampler`` into loaders: ``Trainer(use_distributed_sampler=...)``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


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


def comms_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """The all-gather and the reduce-scatter object of a ``fully_shard``-ed module, or ``None`` if it has several.

    Why: ``set_custom_all_gather`` replaces what is there, and there is no public way to look at it before, which one
    needs to put something around it and to put it back.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12
    if groups is None:
        only = state._fsdp_param_group
        groups = [] if only is None else [only]
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if len(groups) == 1 else None


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
