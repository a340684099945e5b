"""A door of the run: a loop of the user's own, in which a step is a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_odc.engine.base import Engine
from lightning_odc.run.attempt import Attempt
from lightning_odc.run.minibatch import Arrived, Door
from lightning_odc.samples.weighting import Rule
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf, try_loss


class Loop(Door):
    """Runs microbatches through a function of the user's."""

    step: Callable[[Any], Any]
    run_backward: Callable[[Tensor], object]

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._model = model

    def call(self, batch: Any, arrived: Arrived) -> object:
        return arrived(self.step(batch))

    def backward(self, loss: Tensor, attempt: Attempt) -> None:
        with self._engine.backward(manual=True, more=True, counts=not attempt.weight.is_weightless):
            self.run_backward(loss)

    def try_loss(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule | None = None) -> Verdict:
        device = next(self._model.parameters()).device
        return try_loss(self.step, batch_of, tokens, self._model.modules(), device, rule=rule)
