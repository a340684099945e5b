"""Evaluating with different numbers of batches, and of microbatches in them, on every rank.

Note [Values of an evaluation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks run whatever batches they have and wait for nobody. Until the last one Lightning adds up what this rank logs, by
name, and nothing is reduced over ranks. Then, before Lightning computes the values of the epoch, all ranks tell each
other their sums once, by name; names are merged in an order that all agree on, and Lightning finds the results already
computed. So it does not matter in which order a rank logged its names, how often, or whether at all.

torchmetrics objects synchronise themselves, by collectives. They are computed at the same point, in the same order, on
all ranks: also on those that have not logged them.

With stock collectives and plain batches Lightning's own way is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule

from lightning_odc import _compat
from lightning_odc._compat import EpochValue
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.strategy import totals
from lightning_odc.strategy.logbook import LogBook, flush, metric_of, ranks_of, replaced_log
from lightning_odc.strategy.totals import METRIC, Total


class Evaluation:
    """One pass over the evaluation loaders on this rank; see Note [Values of an evaluation].

    Args:
        module: that is evaluated.
        engine: asks the other ranks at the end.
        locally: a context in which logging does not reduce over ranks.
        always: merge values also if no rank had a `Minibatch`.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        locally: Callable[[], AbstractContextManager[None]],
        always: bool,
    ) -> None:
        self._module = module
        self._engine = engine
        self._locally = locally
        self._always = always
        self._had_shares = False
        self._logbook = LogBook()
        self._changes = ExitStack()
        self._added: list[tuple[Any, str]] = []

    def begin(self) -> None:
        """Before the first batch."""
        if self._engine.world_size == 1:
            return
        self._changes.enter_context(_compat.before_epoch_values(self._module.trainer, self._complete))
        if self._always:
            self._log_locally()

    def end(self) -> None:
        """Leave no trace; idempotent."""
        self._changes.close()
        for results, key in self._added:
            results.pop(key).reset()  # else Lightning would compare its options with those of a later epoch
        self._added.clear()

    def run_share(self, share: Minibatch, step: Callable[[Any], Any]) -> list[Any]:
        """Evaluate a rank's microbatches one by one, and log the values of the share.

        Args:
            share: the microbatches.
            step: the user's ``validation_step`` or ``test_step`` on one of them.

        Returns:
            What the step returned, by microbatch.
        """
        self._had_shares = True
        _compat.count_batch_once(self._module.trainer)
        outputs = []
        with self._logbook.recording(self._module):
            for microbatch, weight in share.weighted():
                outputs.append(step(microbatch))
                self._logbook.weigh(weight)
        with self._locally():
            flush(self._logbook.take(), self._module)
        return outputs

    def _log_locally(self) -> None:
        log = self._module.log

        @wraps(log)
        def log_locally(*args: Any, **options: Any) -> None:
            with self._locally():
                log(*args, **options)

        self._changes.enter_context(replaced_log(self._module, log_locally))

    def _complete(self, results: Any) -> None:
        """Make the values of all ranks those of the epoch."""
        self._changes.close()
        logged = {total.identity: total for total in map(_total, _compat.epoch_values(results))}
        shared = totals.pack(total for total in logged.values() if total.is_shared)
        item = {"had_shares": self._had_shares, "totals": shared}
        by_rank = self._engine.exchange("end of an evaluation", item)
        if not (self._always or any(other["had_shares"] for other in by_rank)):
            return
        own = self._module.global_rank
        for total in totals.merge([totals.unpack(other["totals"]) for other in by_rank], own):
            mine = logged.get(total.identity)
            if mine is None or mine.is_shared:
                self._set(results, total, mine)

    def _set(self, results: Any, total: Total, mine: Total | None) -> None:
        metric = None
        if total.reduction == METRIC:
            total.metric = None if mine is None else mine.metric
            metric = metric_of(total, self._module)
        result = float("nan") if total.result is None else total.result
        reduction = "mean" if total.reduction == METRIC else total.reduction
        at = EpochValue(
            total.fx, total.name, total.dataloader_idx, total.options, reduction, None, metric, result, 0.0
        )
        with warnings.catch_warnings():
            # It is no mistake here that a rank without data computes a metric that it has not updated.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            added = _compat.set_epoch_value(results, at, self._module.device)
        if added is not None:
            self._added.append((results, added))


def _total(at: EpochValue) -> Total:
    reduction = at.reduction if at.metric is None else METRIC
    total = Total(
        at.name, reduction, at.options, at.value, at.weight, ranks_of(at.group), at.fx, at.dataloader_idx
    )
    if at.metric is not None:
        total.metric, total.states = at.metric, totals.describe_lists(at.metric)
    return total
