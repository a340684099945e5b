"""What comes home from the ranks of a notebook: weights, metrics, progress, predictions."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc.checkpoints import full as checkpoint

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def prepare(trainer: Trainer) -> None:
    """Before ranks exist: let loggers choose their version here, so that home knows where ranks write."""
    for logger in trainer.loggers:
        _ = logger.version


def collect(trainer: Any, result: Any) -> dict[str, Any]:
    """On a rank, after the run. All ranks together, since the weights are sharded; what rank 0 returns counts."""
    outcome = {"state": trainer.state, "result": result}
    outcome |= {name: dict(getattr(trainer, name)) for name in _METRICS}
    if trainer.state.fn == TrainerFn.FITTING:
        outcome["weights"] = checkpoint.model_state(trainer.lightning_module, full=True)
        outcome["progress"] = trainer.fit_loop.state_dict()
        outcome["callbacks"] = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    at_home: dict[str, Any] = apply_to_collection(outcome, Tensor, lambda tensor: tensor.detach().cpu())
    return at_home


def restore(trainer: Trainer, outcome: dict[str, Any]) -> Any:
    """At home: the trainer and its module as after a run in this process. Returns what the run returned."""
    assert trainer.lightning_module is not None
    trainer.state = outcome["state"]
    for name in _METRICS:
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(outcome[name])
    if "weights" in outcome:
        _load_weights(trainer.lightning_module, outcome["weights"])
        trainer.fit_loop.load_state_dict(outcome["progress"])
        trainer.fit_loop.restarting = False  # it has run; it is not to be resumed
        _load_callbacks(trainer, outcome["callbacks"])
    return outcome["result"]


def _load_weights(module: LightningModule, weights: dict[str, Tensor]) -> None:
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    unknown = module.load_state_dict(weights, strict=False, assign=on_meta).unexpected_keys
    if unknown:
        warnings.warn(
            f"The trained weights of {unknown[0]!r} and {len(unknown) - 1} more did not come back to the notebook, "
            "where the model has no such parameters: `configure_model` made them on the ranks. They are in what "
            "ModelCheckpoint has saved.",
            stacklevel=2,
        )


def _load_callbacks(trainer: Any, states: dict[str, dict[str, Any]]) -> None:
    for callback in trainer.callbacks:
        state = states.get(callback.state_key)
        if state and isinstance(callback, ModelCheckpoint):
            callback.dirpath = state["dirpath"]  # else it takes the state for that of another directory
        if state:
            callback.load_state_dict(state)
