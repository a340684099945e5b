"""Trains the project of one program: ``python -m benchmarks.programs.training NAME STRATEGY FOLDER``.

`benchmarks.programs` runs it in the environment of that program. It writes the floating-point part of the last
checkpoint to ``FOLDER/NAME.STRATEGY.pt``. One process takes samples in the order that Lightning gives to several, so
a step has the same samples everywhere.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Project:
    """What a user of the program has.

    Attributes:
        module: The program's module.
        samples: A data set of `SAMPLES` samples, or a list.
        collate: The program's ``collate_fn``.
        rate: Learning rate of SGD, which takes the place of the program's optimizer: Adam makes steps of a fixed
            size from gradients that are zero but for rounding.
    """

    module: pl.LightningModule
    samples: Dataset[Any] | Sequence[Any]
    collate: Callable[[list[Any]], Any] | None = None
    rate: float = 0.01


class SaveStart(pl.Callback):
    """Keeps the weights before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write them."""
        torch.save(floats(pl_module.state_dict()), self.path)


def floats(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state that training can move."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in tensors.items() if value.is_floating_point()}


def fit(name: str, strategy: str, folder: Path) -> None:
    """Train, and keep the last checkpoint."""
    torch.manual_seed(0)
    project: Project = import_module(f"benchmarks.programs.{name}").project()
    module: Any = project.module
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), project.rate)
    callbacks: list[pl.Callback] = []
    sampler: Any = None
    devices = RANKS
    used = strategy
    if strategy == ONE:
        callbacks.append(SaveStart(folder / f"{name}.{START}.pt"))
        sampler = DistributedSampler(project.samples, 1, 0)  # type: ignore[arg-type]
        devices = 1
        used = "auto"
    trainer = pl.Trainer(
        strategy=used,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = SAMPLES // STEPS // devices
    loader: DataLoader[Any] = DataLoader(
        project.samples,  # type: ignore[arg-type]
        batch,
        sampler=sampler,
        collate_fn=project.collate,
    )
    trainer.fit(project.module, loader)
    path = folder / f"{name}.{strategy}.pt"
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        checkpoint = torch.load(path, weights_only=False)
        torch.save(floats(checkpoint["state_dict"]), path)


if __name__ == "__main__":
    fit(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
