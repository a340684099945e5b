"""A trial of the loss inside Lightning: what of the trainer's it must not touch; see Note [The loss is tested]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_odc.data.weighting import Rule
from lightning_odc.strategy.logbook import replaced_log
from lightning_odc.trial import run
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf, Step
from lightning_odc.trial.untouched import restorer


def try_loss(
    module: LightningModule,
    device: torch.device,
    step: Step,
    batch_of: BatchOf,
    tokens: Sequence[int],
    rule: Rule | None = None,
) -> Verdict:
    """As `lightning_odc.trial.run.try_loss`, with what a ``training_step`` may reach."""
    trainer = module.trainer
    restores = [restorer(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
    for optimizer in trainer.optimizers:
        restores += [restorer(group, depth=0) for group in optimizer.param_groups]
    with _muted(module):
        return run.try_loss(step, batch_of, tokens, module.modules(), device, restores, rule)


@contextmanager
def _muted(module: LightningModule) -> Iterator[None]:
    """Nothing is logged."""
    trainer = module.trainer
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger()] if loggers else []
    try:
        with replaced_log(module, lambda *_, **__: None):
            yield
    finally:
        trainer.loggers = loggers
