"""Trains the project of one program: ``python -m benchmarks.programs.training NAME STRATEGY FOLDER``.

`benchmarks.programs` runs it in the environment of that program. It writes the floating-point part of the last
checkpoint to ``FOLDER/NAME.STRATEGY.pt``. One process takes samples in the order that Lightning gives to several, so
a step has the same samples everywhere. Then the program predicts and saves, if it is known how. The predictions are in
``FOLDER/NAME.STRATEGY.predicted.pt``.

A module of this folder has ``project()``, or ``train(run)`` if the program has a ``fit`` of its own.
"""

from __future__ import annotations

import benchmarks.programs.operators  # noqa: F401  # isort: skip

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning_odc  # noqa: F401 - registers the strategy

RANKS = 2
STEPS = 8
EACH = 8  # samples of a rank in a step
SAMPLES = RANKS * EACH * STEPS
#: Names of the trainings: one process, then two.
ONE = "one"
DDP = "ddp"
ODC = "odc"
START = "start"
PREDICTED = "predicted"
#: Arguments of each ``Trainer``.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Run:
    """One training of a program."""

    name: str
    strategy: str
    folder: Path

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return {ONE: 1}.get(self.strategy, RANKS)

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of a ``Trainer``."""
        return {"strategy": self.strategy.replace(ONE, "auto"), "devices": self.devices, **QUIET}

    def path(self, *which: str) -> Path:
        """A file of this training."""
        return self.folder / ".".join([self.name, *which, "pt"])

    def keep(self, state: dict[str, Any], *which: str) -> None:
        """Write the tensors of a state that training can move. Rank 0 does."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            torch.save(floats(state), self.path(*which or [self.strategy]))

    def keep_predicted(self, predicted: Any) -> None:
        """Write predictions, which says that the program predicts and saves."""
        self.keep({PREDICTED: torch.as_tensor(predicted)}, self.strategy, PREDICTED)


@dataclass(frozen=True)
class Project:
    """What a user of the program has.

    Attributes:
        module: The program's module.
        samples: A data set of `SAMPLES` samples, or a list.
        collate: The program's ``collate_fn``.
        rate: Learning rate of SGD, which takes the place of the program's optimizer: Adam makes steps of a fixed
            size from gradients that are zero but for rounding.
        loader: The program's ``DataLoader``.
        predict: What the program computes with its trained module, and how it saves it.
    """

    module: pl.LightningModule
    samples: Dataset[Any] | Sequence[Any]
    collate: Callable[[list[Any]], Any] | None = None
    rate: float = 0.01
    loader: Callable[..., Any] = DataLoader
    predict: Callable[..., Any] | None = None


class SaveStart(pl.Callback):
    """Keeps the weights before the first step. A module may draw them in ``on_train_start``: the same everywhere."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self, *_: Any) -> None:
        """Loaders of PyTorch have taken numbers from the generator."""
        torch.manual_seed(0)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Write them."""
        if trainer.global_step == 0:
            self.run.keep(pl_module.state_dict(), START)


def floats(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state that training can move."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in tensors.items() if value.is_floating_point()}


def fit(run: Run, project: Project) -> None:
    """Train, and keep the last checkpoint."""
    module: Any = project.module
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), project.rate)
    sampler: Any = None
    if run.strategy == ONE:
        sampler = DistributedSampler(project.samples, 1, 0)  # type: ignore[arg-type]
    trainer = pl.Trainer(max_epochs=1, callbacks=[SaveStart(run)], **run.trainer)
    batch = SAMPLES // STEPS // run.devices
    loader = project.loader(project.samples, batch, sampler=sampler, collate_fn=project.collate)
    trainer.fit(module, loader)
    checkpoint = run.path("checkpoint")
    trainer.save_checkpoint(checkpoint)
    run.keep(torch.load(checkpoint, weights_only=False)["state_dict"])
    if project.predict is not None:
        del module.configure_optimizers
        run.keep_predicted(project.predict(module, loader, run.path("saved")))


def predict_alone(module: pl.LightningModule, loader: Any, path: Path) -> Any:
    """Predict on one device, and save the module."""
    predicted: Any = pl.Trainer(devices=1, **QUIET).predict(module, loader)
    torch.save(module, path)
    return torch.cat(predicted)


def main(run: Run) -> None:
    """Train, predict and save."""
    torch.manual_seed(0)
    program = import_module(f"benchmarks.programs.{run.name}")
    if hasattr(program, "train"):
        program.train(run)
    else:
        fit(run, program.project())


if __name__ == "__main__":
    main(Run(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
