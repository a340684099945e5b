"""Evaluating with different numbers of batches, and of microbatches in them, on every rank.

Nothing here waits for other ranks, except once at the last batch of a loader of known length, if that is a
`Minibatch`. Values of single batches stay local; Lightning reduces them over ranks at the end of the epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.logbook import LogBook, flush, neutral


class Evaluation:
    """One pass over the evaluation loaders on this rank."""

    def __init__(self) -> None:
        self._batches = 0
        self._logged: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """A new pass."""
        self._batches = 0
        self._logged.clear()

    def count(self) -> None:
        """One more batch."""
        self._batches += 1

    def run_share(
        self, share: Minibatch, step: Callable[[Any], Any], module: LightningModule, engine: Engine, name: str
    ) -> list[Any]:
        """Evaluate a rank's microbatches one by one.

        Args:
            share: the microbatches.
            step: the user's ``validation_step`` or ``test_step`` on one of them.
            module: whose ``log`` takes the values of the share.
            engine: asks the other ranks at the last batch.
            name: of the step.

        Returns:
            What the step returned, by microbatch.
        """
        outputs, logbook = [], LogBook()
        with logbook.recording(module):
            for microbatch, weight in share.weighted():
                outputs.append(step(microbatch))
                logbook.weigh(weight)
        totals = logbook.take()
        flush(totals, module)
        self._logged.update((total["name"], neutral(total)) for total in totals)
        if self._is_last_of_a_loader(module.trainer):
            self._log_what_only_others_logged(module, engine, name)
        return outputs

    def _is_last_of_a_loader(self, trainer: Trainer) -> bool:
        return self._batches in itertools.accumulate(_batches_by_loader(trainer))

    def _log_what_only_others_logged(self, module: LightningModule, engine: Engine, name: str) -> None:
        """Lightning reduces every epoch value on the ranks that logged it: a rank without work must take part too."""
        mine, self._logged = self._logged, {}
        by_rank = engine.exchange(f"last batch of {name}", list(mine.values()))
        everything = {total["name"]: total for totals in by_rank for total in totals}
        missing = [total for key, total in everything.items() if key not in mine]
        flush([total for total in missing if total["options"].get("sync_dist")], module)


def _batches_by_loader(trainer: Trainer) -> list[int | float]:
    if trainer.sanity_checking:
        return trainer.num_sanity_val_batches
    return trainer.num_test_batches if trainer.testing else trainer.num_val_batches
