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
from functools import partial

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_odc import _compat, _compat_lightning
from lightning_odc._compat_lightning import Results
from lightning_odc.data.convert import check_samplers
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.model_cost import causal_model
from lightning_odc.run.attempt import explained
from lightning_odc.run.contribution import counted_weight
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.strategy import logbook
from lightning_odc.strategy.logbook import METRIC, LogBook, Total, flush, metric_of, replaced_log
from lightning_odc.strategy.setup.sharded import ShardedStrategy
from lightning_odc.strategy.step import call_step

_SMALLER = (
    "Batches are cut in training alone. Make those of this loader smaller: DataLoader(..., batch_size=1), or "
    "BalancedDataLoader(..., max_tokens=...)."
)  # a step may log anything of them


class Evaluation:
    """One pass over loaders to validate, test or predict on this rank; see Note [Values of an evaluation]."""

    def __init__(self, strategy: ShardedStrategy, rule: Rule | None) -> None:
        self.logs_locally = False  # what is logged now stays this rank's
        self._strategy = strategy
        self._module = strategy._module
        self._engine = strategy.engine
        self._always = strategy.communication != "collective"
        self._rule = rule  # what microbatches counted in training
        self._labels = LabelCounter(skips_first=causal_model(self._module) is not None)
        self._had_minibatches = False  # until then it is not known what a loader yields
        self._logbook = LogBook()
        self._changes = ExitStack()
        self._added: list[tuple[Results, str]] = []  # values, by key, that this rank has not logged

    def begin(self) -> None:
        """Take over logging before the first batch. Not for predictions, which log nothing."""
        if self._engine.world_size == 1:
            return
        together = _compat_lightning.before_epoch_values(self._module.trainer, self._complete)
        self._changes.enter_context(together)
        if self._always:
            log_locally = self._locally()(self._module.log)
            self._changes.enter_context(replaced_log(self._module, log_locally))

    def end(self) -> None:
        """Leave no trace; idempotent."""
        self._changes.close()
        for results, key in self._added:
            results.pop(key).reset()  # else Lightning would compare its options with those of a later epoch
        self._added.clear()

    @explained(_SMALLER)
    def step(self, name: str, *args: object, **kwargs: object) -> object:
        """Evaluate a batch; of a `Minibatch` the microbatches one by one, and log the values of all of them."""
        step = partial(call_step, self._strategy, name)
        if not (args and isinstance(args[0], Minibatch)):
            return step(*args, **kwargs)

        def run(microbatch: object) -> object:
            return step(microbatch, *args[1:], **kwargs)

        if name == "predict_step":
            return [run(microbatch) for microbatch in args[0]]
        return self._minibatch(run, args[0])

    def _minibatch(self, run: Callable[[object], object], minibatch: Minibatch) -> list[object]:
        trainer = self._module.trainer
        if not self._had_minibatches and _compat_lightning.deals_out(trainer):
            loaders = trainer.val_dataloaders
            if trainer.testing:
                loaders = trainer.test_dataloaders
            check_samplers(loaders)
        self._had_minibatches = True
        _compat_lightning.count_batch_once(trainer)
        rule, counter = self._counted_in(minibatch)
        outputs = []
        with self._logbook.recording(self._module):
            for microbatch, weight, detail in minibatch.tasks():
                labels = None
                if counter is not None:  # before the step, which may take them out of the batch
                    labels = counter.of(microbatch)
                if weight and rule is not None and detail is not None and rule.weighting != "token":
                    samples = float(detail.sample_count)
                    if rule.weighting == "next_token":
                        weight = weight - samples
                    else:
                        weight = samples
                output = run(microbatch)
                outputs.append(output)
                # As in training: Note [Labels are counted].
                self._logbook.weigh(counted_weight(output, weight, labels))
        with self._locally():
            flush(self._logbook.take(), self._module)
        return outputs

    def _counted_in(self, minibatch: Minibatch) -> tuple[Rule | None, LabelCounter | None]:
        """What training has found out to count in microbatches like these, and what is counted in them."""
        origin = minibatch.origin
        if origin is None:
            return None, None
        if not origin.by_labels:
            return None, origin.counter
        if self._rule is not None:
            return self._rule, self._rule.counter
        return None, origin.counter or self._labels

    @contextmanager
    def _locally(self) -> Iterator[None]:
        before = self.logs_locally
        self.logs_locally = True
        try:
            yield
        finally:
            self.logs_locally = before

    def _complete(self, results: Results) -> None:
        """Make the values of all ranks those of the epoch."""
        self._changes.close()
        logged = {total.identity: total for total in totals_in(results)}
        record = [self._had_minibatches, logbook.to_message(logged.values())]
        records = self._engine.exchange("end of an evaluation", record)
        if not self._always and not any(had_minibatches for had_minibatches, _ in records):
            return
        messages = [message for _, message in records]
        for total in logbook.merge(messages):
            mine = logged.get(total.identity)
            if mine is not None and not mine.is_shared:
                continue
            metric = None
            if total.reduction == METRIC:
                if mine is not None:
                    total.metric = mine.metric
                metric = metric_of(total, self._module)
            with warnings.catch_warnings():
                # It is no mistake here that a rank without data computes a metric that it has not updated.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                added = set_value(results, total, metric, self._module.device)
            if added is not None:
                self._added.append((results, added))


_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")


def totals_in(results: Results) -> Iterator[Total]:
    """What this rank has logged so far for the epoch."""
    for item in results.values():
        meta = item.meta
        if item.has_reset or not meta.on_epoch:
            continue
        options = {name: getattr(meta, name) for name in _OPTIONS}
        options["sync_dist"] = meta.sync.should
        options["sync_dist_group"] = meta.sync.group
        options["rank_zero_only"] = meta.sync.rank_zero_only
        loader = meta.dataloader_idx
        fx: str = meta.fx.removesuffix(f".{loader}")
        total = Total(meta.name, METRIC, options, fx=fx, dataloader_idx=loader)
        if item.is_tensor:
            total.reduction = meta.reduce_fx.__name__
            total.value = float(item.value)
            if meta.is_mean_reduction:
                total.weight = float(item.cumulated_batch_size)
        else:
            total.metric = item.value
        yield total


def set_value(results: Results, total: Total, metric: Metric | None, device: torch.device) -> str | None:
    """Make a total the value of the epoch; returns its key if new on this rank. All together if it is a metric."""
    key = f"{total.fx}.{total.name}"
    if total.dataloader_idx is not None and total.options["add_dataloader_idx"]:
        key += f".{total.dataloader_idx}"
    value = total.result
    if value is None:
        value = float("nan")
    is_new = key not in results
    if is_new:
        results.dataloader_idx = total.dataloader_idx
        first: Tensor | Metric = torch.tensor(value, device=device)
        reduction = total.reduction
        if metric is not None:
            first = metric
            reduction = "mean"
        results.log(total.fx, total.name, first, reduce_fx=reduction, batch_size=1, **total.options)
    item = results[key]
    item.has_reset = False
    if metric is not None:
        _compat.set_computed(item, metric.compute())
    else:
        _compat.set_computed(item, torch.as_tensor(value, dtype=item.value.dtype, device=item.value.device))
    if is_new:
        return key
    return None
