"""A trial of the loss inside Lightning: what of the trainer's it must not touch; see Note [The loss is tested]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_odc.trial.untouched import restored, restorer


@contextmanager
def untouched_trainer(module: LightningModule) -> Iterator[None]:
    """Loggers get nothing, and what else a ``training_step`` may reach is as before afterwards."""
    trainer = module.trainer
    loggers = trainer.loggers
    restores = [restorer(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
    for optimizer in trainer.optimizers:
        restores += [restorer(group, depth=0) for group in optimizer.param_groups]
    trainer.loggers = [DummyLogger()] if loggers else []
    try:
        with restored(restores):
            yield
    finally:
        trainer.loggers = loggers
