"""Evaluating with different numbers of batches, and of microbatches in them, on every rank.

Note [Values of an evaluation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks run the batches that they have and do not wait. Until the last one, Lightning adds up what this rank logs, by
name. Then, before Lightning computes the values of the epoch, all ranks tell each other their sums once; names are
merged in an order that all agree on, and Lightning finds the results already computed. So it does not matter in which
order a rank logged its names, how often, or whether at all. torchmetrics objects, which synchronise by collectives,
are computed at the same point and in the same order, also on ranks that have not logged them.

With stock collectives and plain batches Lightning's own way is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torchmetrics import Metric

from lightning_odc import _compat, _compat_lightning
from lightning_odc.data.convert import check_samplers
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.weighting import Counter, Rule
from lightning_odc.strategy import logbook
from lightning_odc.strategy.logbook import METRIC, LogBook, Total, flush, metric_of, ranks_of, replaced_log
from lightning_odc.strategy.microbatch import counted_weight, explained
from lightning_odc.strategy.model_facts import causal_model
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.step import call_step

_SMALLER = (
    "Batches are cut in training alone. Make those of this loader smaller: DataLoader(..., batch_size=1), or "
    "BalancedDataLoader(..., max_tokens=...)."
)  # a step may log anything of them


class Evaluation:
    """One pass over loaders to validate, test or predict on this rank; see Note [Values of an evaluation]."""

    def __init__(self, strategy: ShardedStrategy, rule: Rule | None) -> None:
        assert strategy.lightning_module is not None
        self.logs_locally = False  # what is logged now stays this rank's
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._engine = strategy.engine
        self._always = strategy.communication != "collective"
        self._rule = rule  # what microbatches counted in training
        self._labels = Counter(skips_first=causal_model(self._module) is not None)
        self._had_minibatches = False  # until then it is not known what a loader yields
        self._logbook = LogBook()
        self._changes = ExitStack()
        self._added: list[tuple[Any, str]] = []

    def begin(self) -> None:
        """Take over logging before the first batch. Not for predictions, which log nothing."""
        if self._engine.world_size == 1:
            return
        together = _compat_lightning.before_epoch_values(self._module.trainer, self._complete)
        self._changes.enter_context(together)
        if not self._always:
            return
        log = self._module.log

        @wraps(log)
        def log_locally(*args: Any, **options: Any) -> None:
            with self._locally():
                log(*args, **options)

        self._changes.enter_context(replaced_log(self._module, log_locally))

    def end(self) -> None:
        """Leave no trace; idempotent."""
        self._changes.close()
        for results, key in self._added:
            results.pop(key).reset()  # else Lightning would compare its options with those of a later epoch
        self._added.clear()

    @explained(_SMALLER)
    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; of a `Minibatch` the microbatches one by one, and log the values of all of them."""
        run = partial(call_step, self._strategy, name)
        if not (args and isinstance(args[0], Minibatch)):
            return run(*args, **kwargs)
        if name == "predict_step":
            return [run(microbatch, *args[1:], **kwargs) for microbatch in args[0]]
        return self._minibatch(run, *args, **kwargs)

    def _minibatch(
        self, run: Callable[..., Any], minibatch: Minibatch, *args: Any, **kwargs: Any
    ) -> list[Any]:
        trainer = self._module.trainer
        if not self._had_minibatches and _compat_lightning.deals_out(trainer):
            check_samplers(trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders)
        self._had_minibatches = True
        _compat_lightning.count_batch_once(trainer)
        outputs, origin = [], minibatch.origin
        counter = None if origin is None else origin.counter or (self._labels if origin.by_labels else None)
        rule = self._rule if origin is not None and origin.by_labels else None  # what training has found out
        counter = counter if rule is None else rule.counter
        with self._logbook.recording(self._module):
            for microbatch, weight, detail in minibatch.tasks():
                # Counted before the step, which may take them out of the batch.
                labels = None if counter is None else counter.of(microbatch)
                if rule is not None and detail is not None and rule.weighting != "token":
                    samples = float(len(detail.lengths))
                    weight = weight - samples if rule.weighting == "next_token" else samples
                outputs.append(run(microbatch, *args, **kwargs))
                # As in training: Note [Labels are counted].
                self._logbook.weigh(counted_weight(outputs[-1], weight, labels))
        with self._locally():
            flush(self._logbook.take(), self._module)
        return outputs

    @contextmanager
    def _locally(self) -> Iterator[None]:
        before, self.logs_locally = self.logs_locally, True
        try:
            yield
        finally:
            self.logs_locally = before

    def _complete(self, results: Any) -> None:
        """Make the values of all ranks those of the epoch."""
        self._changes.close()
        logged = {total.identity: total for total in totals_in(results)}
        item = {"had_minibatches": self._had_minibatches, "totals": logbook.to_message(logged.values())}
        by_rank = self._engine.exchange("end of an evaluation", item)
        if not (self._always or any(other["had_minibatches"] for other in by_rank)):
            return
        own = self._module.global_rank
        for total in logbook.merge([other["totals"] for other in by_rank], own):
            mine = logged.get(total.identity)
            if mine is not None and not mine.is_shared:
                continue
            metric = None
            if total.reduction == METRIC:
                total.metric = None if mine is None else mine.metric
                metric = metric_of(total, self._module)
            with warnings.catch_warnings():
                # It is no mistake here that a rank without data computes a metric that it has not updated.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                added = set_value(results, total, metric, self._module.device)
            if added is not None:
                self._added.append((results, added))


_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")


def totals_in(results: Any) -> Iterator[Total]:
    """What this rank has logged so far for the epoch."""
    for item in results.values():
        meta = item.meta
        if item.has_reset or not meta.on_epoch:
            continue
        options = {name: getattr(meta, name) for name in _OPTIONS}
        options |= {"sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
        suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx else ""
        total = Total(meta.name, METRIC, options, ranks=ranks_of(meta.sync.group))
        total.fx, total.dataloader_idx = meta.fx.removesuffix(suffix), meta.dataloader_idx
        if item.is_tensor:
            total.reduction, total.value = meta.reduce_fx.__name__, float(item.value)
            total.weight = float(item.cumulated_batch_size) if meta.is_mean_reduction else 0.0
        else:
            total.metric, total.states = item.value, logbook.describe_lists(item.value)
        yield total


def set_value(results: Any, total: Total, metric: Metric | None, device: torch.device) -> str | None:
    """Make a total the value of the epoch; returns its key if new on this rank. All together if it is a metric."""
    at, is_one_of_several = total.dataloader_idx, total.options["add_dataloader_idx"]
    key = f"{total.fx}.{total.name}" + ("" if at is None or not is_one_of_several else f".{at}")
    is_new = key not in results
    value = float("nan") if total.result is None else total.result
    if is_new:
        results.dataloader_idx = at
        first = torch.tensor(value, device=device) if metric is None else metric
        reduction = "mean" if metric is not None else total.reduction
        results.log(total.fx, total.name, first, reduce_fx=reduction, batch_size=1, **total.options)
    item = results[key]
    item.has_reset = False
    if metric is not None:
        _compat.set_computed(item, metric.compute())
    else:
        _compat.set_computed(item, torch.as_tensor(value, dtype=item.value.dtype, device=item.value.device))
    return key if is_new else None
