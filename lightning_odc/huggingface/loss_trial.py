"""A trial of the loss inside of ``Trainer``.

Note [What Trainer computes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``Trainer`` adds up the losses of all batches of an optimizer step. It tells a loss how many labels the whole step has,
and divides the loss by the number of batches if it thinks that the loss ignores that number. So the loss is tested
twice, as Note [The loss is tested] says: as the loss of a microbatch alone, and as one of a step that consists of
copies of it. Then values that are gathered from other ranks are other ones, too. ::

    loss of a microbatch                alone       in a step of 3 batches
    sum over labels / labels            S / n       3 S / 3 n: the same
    a mean, which Trainer divides       L           3 L / 3: the same
    a mean, which it leaves undivided   L           3 L: here it stays L, and a line says so
    with a penalty, or with values of   L + p       anything else
    other ranks

If the second column is the same multiple of the first for all samples, and a rule explains the first, the weighted mean
of microbatches is the loss of one batch with all samples of the step. Otherwise, ranks run the batches of ``Trainer``,
with its losses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import try_loss
from lightning_odc.trial.samples import TrialSamples
from lightning_odc.trial.untouched import restored, restorer

#: So many groups of samples are tested as one of several batches, too.
_MOST_SCALES = 3
#: How far the scales of losses may differ, which rounding makes differ.
_SCALES_DIFFER = 1e-4

LossOf = Callable[[Any, int], Tensor]
"""What ``Trainer`` makes of the loss of a batch, in a step of so many equal batches."""


def trial_of(trainer: Any, loss_of: LossOf, samples: TrialSamples) -> Verdict:
    """What microbatches count; see Note [What Trainer computes]."""
    copies: int = trainer.args.gradient_accumulation_steps
    scales: list[float] = []

    def step(batch: Any) -> Tensor:
        with apart(trainer):
            loss = loss_of(batch, 1)
        if len(scales) == _MOST_SCALES:
            return loss
        with apart(trainer, _changed):
            among_copies = loss_of(batch, copies) * copies
        if float(loss) and math.isfinite(loss):
            scales.append(float(among_copies) / float(loss))
        return loss

    with untouched_trainer(trainer) as modules:
        trial = try_loss(step, samples.batch_of, samples.tokens, modules, trainer.args.device, together=True)
    if not scales or max(scales) - min(scales) > _SCALES_DIFFER * abs(scales[0]):
        reason = trial.reason or "it depends on the number of items, or on other ranks"
        return Verdict(None, reason, communicates=trial.communicates, edits=trial.edits)
    if trial.rule is not None and scales[0] > 1 + _SCALES_DIFFER and trainer.is_world_process_zero():
        warnings.warn(
            f"Trainer alone does not divide this loss by the {copies} batches that it accumulates, so its gradients "
            f"are {copies} times as large as here, where the loss of a step is the mean over them. To have the mean "
            "without the mix-in, write `trainer.loss_is_scaled_for_ga = False`.",
            stacklevel=2,
        )
    return trial


@contextmanager
def untouched_trainer(trainer: Any) -> Iterator[set[nn.Module]]:
    """What ``compute_loss`` may reach is as before afterwards; yields all modules among it."""
    attributes = dict(vars(trainer))
    modules = [value for value in attributes.values() if isinstance(value, nn.Module)]
    own = [value for name, value in attributes.items() if not name.endswith("_dataset")]
    restores = [restorer(value) for value in own if isinstance(value, dict | list)]  # TRL's metrics
    restores.append(partial(vars(trainer).update, attributes))
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda *_, **__: None
    try:
        with restored(restores):
            yield {part for module in modules for part in module.modules()}
    finally:
        trainer.accelerator.backward = backward


@contextmanager
def apart(trainer: Any, gather: Callable[[Any], Any] = lambda value: value) -> Iterator[None]:
    """TRL gathers metrics in every microbatch, which would hang: ranks have different numbers of them."""
    accelerator = trainer.accelerator
    accelerator.gather = accelerator.gather_for_metrics = lambda value, *_, **__: gather(value)
    # Each rank counts its own items: the engine divides by those of all ranks when the step settles.
    averages: bool = trainer.args.average_tokens_across_devices
    trainer.args.average_tokens_across_devices = False
    try:
        yield
    finally:
        trainer.args.average_tokens_across_devices = averages
        del accelerator.gather, accelerator.gather_for_metrics


def _changed(value: Any) -> Any:
    """Values as of other ranks, so that a loss shows that it depends on them."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value + 0.5 if is_real else value
