"""The training steps of ``Trainer``, as a door of the run: how a microbatch runs, and how its loss is tested."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_odc.attached import Attached
from lightning_odc.data.model_cost import cost_of_model
from lightning_odc.huggingface import loss_trial
from lightning_odc.run.attempt import Attempt
from lightning_odc.run.minibatch import Arrived, Door
from lightning_odc.run.wording import Wording
from lightning_odc.samples.weighting import Rule
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf, try_loss
from lightning_odc.trial.samples import TrialSamples


class TrainerSteps(Door):
    """Runs microbatches through ``Trainer.training_step``, and says what a session has to say.

    Args:
        trainer: The trainer.
        odc: Its attached model.
        loss_of: What ``Trainer`` makes of the loss of a batch, in a step of so many equal batches.
        wording: What it is called in messages.
        repeats: Whether runs must be bit-equal.
    """

    tries = True
    must_gain = False
    levels_whole = False  # they are those of `Trainer`
    packing_trouble = ""  # it is as the user says

    def __init__(
        self, trainer: Any, odc: Attached, loss_of: loss_trial.LossOf, wording: Wording, repeats: bool
    ) -> None:
        self.engine = odc.engine
        self.communication = odc.communication
        self.places = odc.engine.world_size
        self.model_cost = cost_of_model(odc.model, trainer.args.device.type)
        self.measures = not repeats
        self.repeats = repeats
        self.wording = wording
        self._trainer = trainer
        self._loss_of = loss_of
        self._backward: Callable[[Tensor], object] | None = None  # of the microbatch at hand
        self.own: Callable[[Any], Tensor] | None = None  # runs a batch of ``Trainer``'s own, or a part of it

    def call(self, batch: Any, arrived: Arrived) -> object:
        """A loss arrives where ``Trainer`` goes backward."""
        accelerator = self._trainer.accelerator
        backward = accelerator.backward

        def arrives(loss: Tensor, **options: Any) -> None:
            self._backward = partial(backward, **options)
            arrived(loss)

        accelerator.backward = arrives
        try:
            if self.own is not None:
                return self.own(batch)
            with loss_trial.apart(self._trainer):
                return self._loss_of(batch, 1)
        finally:
            accelerator.backward = backward

    def backward(self, loss: Tensor, attempt: Attempt) -> None:
        assert self._backward is not None
        with self.engine.backward(manual=True, more=True, counts=not attempt.weight.is_weightless):
            self._backward(loss)

    def try_loss(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule | None = None) -> Verdict:
        apart = partial(loss_trial.apart, self._trainer)
        if self.own is not None:  # what it gathers, it gathers with the others
            apart = partial(apart, self._trainer.accelerator.gather)

        def step(batch: Any) -> Tensor:
            self.engine.begin_forward()
            with apart():
                return self._loss_of(batch, 1)

        with loss_trial.untouched_trainer(self._trainer) as modules:
            return try_loss(step, batch_of, tokens, modules, self._trainer.args.device, rule)

    # -- as a host of a session ---------------------------------------------------------------------------

    def try_samples(self, samples: TrialSamples) -> Verdict:
        return loss_trial.trial_of(self._trainer, self._loss_of, samples)

    def say(self, text: str) -> None:
        self._trainer.accelerator.print(text, flush=True)

    def warn(self, text: str) -> None:
        if self._trainer.is_world_process_zero():
            warnings.warn(text, stacklevel=2)
