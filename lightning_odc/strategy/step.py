"""A training step on this rank, from Lightning's call to the user's ``training_step``, and on to backward and settle.

Note [The last backward belongs to Lightning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning calls ``training_step`` once per batch, then ``zero_grad``, then ``backward`` once. Of a `Minibatch`, all
microbatches run inside that one ``training_step`` call, and all but the last are backpropagated there. The last loss
is returned with its graph, and *with the value* of all this rank's microbatches. An example: this rank's
``Minibatch([a, b, c], weights=[3, 5, 2])``, with the losses ``La``, ``Lb``, ``Lc``. ::

    Lightning              here                                    accumulated gradient of the rank
    training_step(...)     forward(a)                              0
                           backward(3 La)                          3 gLa
                           forward(b), backward(5 Lb), forward(c)  3 gLa + 5 gLb
                           returns 2 Lc, with the value of
                           (3 La + 5 Lb + 2 Lc) / (3 + 5 + 2)
    zero_grad()            what it drops are placeholders: see Note [Gradients arrive late]
    backward(2 Lc)                                                 3 gLa + 5 gLb + 2 gLc
    optimizer.step()       settle(): the sum over all ranks,       see Note [Who divides]
                           by the weights of all ranks, in .grad
                           the optimizer steps
                           end_step(): publish the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_odc import _compat, _compat_lightning
from lightning_odc.data.content import digest_of
from lightning_odc.data.convert import check_samplers
from lightning_odc.data.minibatch import Minibatch, Task, sample_count
from lightning_odc.data.model_cost import causal_model
from lightning_odc.data.position import Progress
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.data.split import parts_of
from lightning_odc.data.weighting import LabelCounter, Rule
from lightning_odc.engine.base import WeightKind
from lightning_odc.errors import ODCError
from lightning_odc.strategy.attempt import (
    MAKE_ROOM,
    Attempt,
    Retry,
    cut_graph,
    explained,
    size_of,
    warn_of_drop,
)
from lightning_odc.strategy.batch import Batch, State
from lightning_odc.strategy.contribution import Contribution, PendingWeight, contribution, nothing_of
from lightning_odc.strategy.logbook import LogBook, LoggedNames, Total, flush, replaced_log
from lightning_odc.strategy.loss_trial import try_loss
from lightning_odc.strategy.measurements import Measured, Measurements
from lightning_odc.strategy.precision import unit_of
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.parts import PartRules
from lightning_odc.trial.run import BatchOf


@dataclass
class _OptimizerStep:
    """What is known of the optimizer step at hand."""

    totals: list[Total] = field(default_factory=list)  # of values that were logged in it
    has_said_weight: bool = False  # to the other ranks


def call_step(strategy: ShardedStrategy, name: str, *args: object, **kwargs: object) -> Any:
    """Call a step of the module through its ``__call__``, where ``fully_shard`` has its hooks."""
    module = strategy.lightning_module
    assert module is not None
    forward = module.forward
    try:
        with strategy.precision_plugin.forward_context(), strategy.engine.traced("forward", step=name):
            return _compat_lightning.call_as_forward(strategy.model, module, name, *args, **kwargs)
    except BaseException:
        # Lightning has put the step in its place, and takes it back when the step begins. A hook may fail before.
        module.forward = forward  # type: ignore[method-assign]
        raise


class Training:
    """The training steps of one fit."""

    def __init__(self, strategy: ShardedStrategy) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._device = strategy.root_device
        self._engine = engine = strategy.engine
        self._sample_group = strategy.attached.sample_group
        self._call = partial(call_step, strategy, "training_step")
        computed_in = (strategy.precision_plugin.compute_dtype, strategy.mixed_precision_policy.param_dtype)
        self._fp16 = torch.float16 in computed_in
        self._seed = strategy.broadcast(torch.initial_seed())  # of the user's `torch.manual_seed`
        self._labels = LabelCounter(skips_first=causal_model(self._module) is not None)
        self._skips_nonfinite = strategy.options.on_nonfinite == "skip"
        self._logbook = LogBook()
        self._logged = LoggedNames(self._module)  # by the plain batch at hand
        self._measurements = Measurements(lambda: sum(engine.waits.values()), self._device)
        self._retry = Retry(strategy.options.on_out_of_memory, engine, self._device, self._module.buffers())
        self._has_settled = False
        self.progress: Progress | None = None  # of the loader, if it wants to know what is done
        self.meets = False  # before an optimizer steps, see Note [All have stepped, or none]
        self.steps = 0  # that optimizers have made
        self._has_gradients = False  # of batches whose optimizer step is to come
        self.communicates = False  # whether the step that was tried talks to other ranks
        self._rules_of_parts = PartRules()
        self.before_batch: Callable[[], object] = lambda: None  # what else is done when its hooks have run
        self.audit: Audit | None = None  # of the rule that weighs microbatches, where a trial has found one
        self.contradicted: Callable[[str], object] = str  # what is done about an audit that finds something
        self._step = _OptimizerStep()
        self._batch = Batch(self._device)
        self._checked: object = None  # loaders of minibatches that Lightning does not deal out

    # -- a batch ------------------------------------------------------------------------------------------

    def step(self, batch: object, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run a batch; what Lightning's ``training_step`` is here."""
        trainer = self._module.trainer
        is_automatic = self._module.automatic_optimization
        self._batch = Batch(self._device, args, kwargs)
        loaders = trainer.train_dataloader
        if (
            isinstance(batch, Minibatch)
            and loaders is not self._checked
            and _compat_lightning.deals_out(trainer)
        ):
            check_samplers(loaders)  # until now it was not known what they yield
            self._checked = loaders
        if self._sample_group is not None and trainer.fit_loop.batch_idx == 0:
            content = batch
            if isinstance(batch, Minibatch):
                content = list(batch)
                if batch.origin is not None:
                    content = batch.plan  # its microbatches may be read when they run
            self._sample_group.check_same("batches", digest_of(content))
        self.before_batch()
        if isinstance(batch, Minibatch) and not is_automatic:
            self._engine.drop_emptied_anywhere()
        self._begin_batch(is_automatic)
        if self.progress is not None:
            if not self._has_gradients:
                self.progress.end_step()
            self.progress.begin_batch()
        if not is_automatic:
            self._engine.begin_forward()
            with explained(f"With manual optimization, no batch runs again in parts. {MAKE_ROOM}."):
                return self._call(batch, *args, **kwargs)
        if isinstance(batch, Minibatch):
            return self._minibatch(batch)
        return self._plain(batch)

    def _begin_batch(self, is_automatic: bool) -> None:
        """Tell the engine where in an optimizer step and in the epoch this batch is."""
        trainer = self._module.trainer
        number = trainer.fit_loop.batch_idx
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ends_step = is_last or (number + 1) % self._accumulated == 0
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        # Lightning's `zero_grad` at the first batch of a step must reach the accumulators of all ranks.
        self._engine.begin_batch(
            opens_window=is_automatic and number % self._accumulated == 0,
            closes_window=not is_automatic or ends_step,
            is_last=is_last and not stops_anyway,
        )

    @property
    def _accumulated(self) -> int:
        """The batches of an optimizer step, by which Lightning divides the loss it is given."""
        return self._module.trainer.accumulate_grad_batches

    def _minibatch(self, minibatch: Minibatch) -> dict[str, object]:
        """Run a rank's microbatches; see Note [The last backward belongs to Lightning]."""
        self._measurements.open(minibatch)
        self._engine.begin_minibatch(len(minibatch), minibatch.plan)
        origin = minibatch.origin
        if origin is not None:
            self._batch.is_sum = origin.is_sum
            self._batch.counter = origin.counter
            if origin.counter is None and origin.by_labels:
                self._batch.counter = self._labels
        if self.audit is not None and self.audit.is_due() and not self._engine.why_no_retry():
            self._measurements.contradiction = self.audit.of(minibatch.tasks(), self.move, self._try_rule)
        last = len(minibatch) - 1
        # A rank may help others only when its own work is done: then nothing is left for Lightning.
        helps = minibatch.all_ranks is not None
        with self._logbook.recording(self._module), _compat.compiled_for_all_shapes():
            for index, task in enumerate(self._engine.tasks(minibatch)):
                whole = Attempt(task, index, self._retry)
                self._run([whole], leaves_backward=index == last and not helps)
        return self._batch.output()

    def _plain(self, batch: object) -> STEP_OUTPUT:
        """Run a batch that is one microbatch. Lightning's backward pass follows."""
        self._batch.weight_kind = WeightKind.MEAN
        self._batch.samples = sample_count(batch) or 1
        whole = Attempt(Task(batch, 1.0, None), 0, self._retry)
        whole.begin()
        output = None
        with self._logged.noting(), whole:
            output = self._forward(whole)
        if whole.error is None:
            if whole.contribution is not None:
                self._batch.state = State.LEFT
            return output
        # A name is logged once: its value may be synchronised with other ranks.
        with self._logbook.recording(self._module):
            self._run(self._after(whole))
        totals = self._logbook.take()
        flush((total for total in totals if total.name not in self._logged.names), self._module)
        return self._batch.output()

    def backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Every backward pass, which ``run`` runs; see Note [The last backward belongs to Lightning]."""
        batch = self._batch
        if batch.state is not State.LEFT:
            loss = run(loss)
            self._engine.backward_done = False
            return loss
        batch.state = State.FORWARD
        last = batch.attempt
        assert last is not None
        with last:
            run(loss)
            self._engine.backward_done = False
        if last.error is not None:
            cut_graph(loss)
        self._run(self._after(last))
        return loss.detach()

    # -- a microbatch -------------------------------------------------------------------------------------

    def _run(self, todo: list[Attempt], leaves_backward: bool = False) -> None:
        """Run attempts, and instead of those that run out of memory their parts."""
        while todo:
            attempt = todo.pop(0)
            self._try(attempt, leaves_backward)
            if self._batch.state is State.LEFT:
                return
            todo[:0] = self._after(attempt)

    def _try(self, attempt: Attempt, leaves_backward: bool) -> None:
        """Run an attempt, forward alone if Lightning runs its backward pass."""
        attempt.begin()
        quiet: AbstractContextManager[None] = nullcontext()
        if attempt.is_logged:
            quiet = replaced_log(self._module, lambda *_, **__: None)
        with attempt, quiet:
            self._forward(attempt)
            if attempt.contribution is None:
                return
            if not attempt.is_logged:
                self._batch.add(attempt.contribution)
            if leaves_backward and not attempt.is_split:
                self._batch.state = State.LEFT
            else:
                self._backward(attempt, attempt.contribution)

    def _forward(self, attempt: Attempt) -> STEP_OUTPUT:
        """Run the user's step; returns what it returned, which holds its graph."""
        batch = self._batch
        task = attempt.task
        batch.attempt = attempt
        self._measurements.begin(task.detail)
        labels = None
        if batch.counter is not None:  # before the step, which may take them out of the batch
            labels = batch.counter.of(attempt.batch)
        planned = task.weight
        if attempt.is_split:
            planned = 1.0  # labels and items say themselves what a part counts
        if labels is not None:
            attempt.weight = PendingWeight(planned, labels)
        self._engine.begin_forward()
        chance = random_numbers_of(task.detail, self._device, self._seed)
        with chance, self._measurements.running():
            output = self._call(attempt.batch, *batch.args, **batch.kwargs)
        found = contribution(output, task.weight, batch.weight_kind, labels, attempt.is_split, batch.is_sum)
        if found is None:
            if self._sample_group is not None:
                self._sample_group.all_without_loss(attempt.index)
            self._logbook.weigh(task.weight * batch.samples)
            return output
        if found.weight_kind is WeightKind.EXACT:
            attempt.weight = PendingWeight(planned)
        if self._skips_nonfinite and not bool(torch.isfinite(found.loss).all()):
            # It counts nothing, but goes backward, since others may wait for it, and adds zeros.
            warn_of_drop(attempt, "has a loss that is not finite")
            attempt.weight = PendingWeight(0.0)
            self._leave_out(attempt)
            found = replace(found, loss=nothing_of(found.loss), weight=0.0)
            if isinstance(output, Mapping):
                output = {**output, "loss": found.loss}
            else:
                output = found.loss
        self._logbook.weigh(found.weight * batch.samples)
        attempt.contribution = found
        self._engine.ledger.add(found.weight / self._accumulated, found.weight_kind)
        return output

    def _backward(self, attempt: Attempt, found: Contribution) -> None:
        """Run the backward pass of an attempt here, through Lightning's hooks, which call `backward`."""
        if attempt.is_split:
            self._engine.retry(attempt.added)
        self._batch.state = State.BACKWARD
        try:
            self._strategy.backward(found.loss / self._accumulated, self._strategy.optimizers[0])
        finally:
            self._batch.state = State.FORWARD
        found.detach()

    def _after(self, attempt: Attempt) -> list[Attempt]:
        """What runs instead of an attempt that ran out of memory; see Note [Run again in parts]."""
        if attempt.error is None:
            self._retry.fits(attempt)
            return []
        has_loss = attempt.contribution is not None
        if self._sample_group is not None:
            where = [attempt.index, attempt.is_split, not has_loss]
            self._sample_group.all_out_of_memory(attempt.error, where)
        attempt.undo()
        self._measurements.forget()
        if not has_loss:
            self._logbook.drop()
        if not attempt.counts:  # its backward pass would add zeros
            return []
        if not attempt.is_split:
            self._measurements.ran_out.append(size_of(attempt.task))
        parts, reason = self._cut(attempt)
        if self._sample_group is not None:
            self._sample_group.check_same(
                "parts of a microbatch that ran out of memory", len(parts), MAKE_ROOM
            )
        if not parts:
            self._retry.drop(attempt, reason)
            self._leave_out(attempt)
            return []
        self._retry.cut(attempt, reason)
        is_last_try = len(parts) == 1
        return [Attempt(part, attempt.index, self._retry, attempt, is_last_try) for part in parts]

    def _leave_out(self, attempt: Attempt) -> None:
        """Let a plain batch, or a part of one, have no part in the mean."""
        if self._batch.weight_kind is WeightKind.MEAN:
            self._engine.ledger.left_out += attempt.task.weight / self._accumulated

    def _cut(self, attempt: Attempt) -> tuple[list[Task], str]:
        """Both parts of a microbatch; or the whole, to run once more, or nothing, and what cannot be done with it."""
        task = attempt.task
        if isinstance(task.microbatch, Iterator):
            return [], "run again: what an iterator has yielded is gone"
        if attempt.is_last_try:
            return [], ""
        can_read = task.detail is not None and task.detail.samples is not None
        verdict = Verdict(Rule("sample"))
        if not can_read:
            verdict = self._rule_of_parts(task.microbatch)
        if verdict.rule is None:
            if verdict.reason:
                return [task], f"be cut: {verdict.reason}"
            return [task], ""
        try:
            parts = parts_of(task, verdict.rule)
        except Exception as problem:  # a collator that needs the whole, say
            return [task], f"be cut: {type(problem).__name__}: {problem}"
        if can_read:
            parts = [part._replace(microbatch=self.move(part.microbatch)) for part in parts]
        return parts or [task], ""

    def _rule_of_parts(self, microbatch: object) -> Verdict:
        """What parts of a microbatch count, which only its tensors can tell; tried with some of its samples."""
        batch = self._batch
        verdict = self._rules_of_parts.of(
            microbatch, lambda batch_of, sizes: self.try_loss(batch_of, sizes, *batch.args)
        )
        if verdict.rule == Rule("sum"):
            if not batch.is_sum and batch.weight_kind is not WeightKind.MEAN:
                return Verdict(None, 'its loss is a sum: return {"loss": loss, "num_items": n}')
            batch.is_sum = True
        return verdict

    def move(self, microbatch: object) -> object:
        """Bring what a loader has read to the device."""
        converted = self._strategy.precision_plugin.convert_input(microbatch)
        # As a Minibatch: of a plain batch, Lightning has called the first of the hooks before.
        return self._strategy.batch_to_device(Minibatch([converted]), self._device)[0]

    def try_loss(
        self, batch_of: BatchOf, tokens: Sequence[int], *args: object, rule: Rule | None = None
    ) -> Verdict:
        """What the loss is a mean over; see Note [The loss is tried]. It leaves no trace."""

        def run(batch: object) -> object:
            self._engine.begin_forward()
            return self._call(batch, *args)

        trial = try_loss(self._module, self._device, run, batch_of, tokens, rule)
        if rule is None:
            self.communicates = trial.communicates
        return trial.verdict

    def _try_rule(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule) -> Verdict:
        verdict = self.try_loss(batch_of, tokens, *self._batch.args, rule=rule)
        if verdict.has_failed:
            self._engine.undo()
        return verdict

    # -- backward and settle ------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass, without Lightning's hooks before and after it."""
        self._has_gradients = True
        attempt = self._batch.attempt
        context = self._engine.backward(
            manual=not self._module.automatic_optimization,
            more=self._batch.state is State.BACKWARD,
            counts=attempt is None or not attempt.weight.is_weightless,
        )
        with context, self._engine.traced("backward"), self._measurements.running():
            yield

    def loss_divisor(self) -> float:
        """What the losses of this step are divided by; see Note [Weights under fp16]."""
        plugin = self._strategy.precision_plugin
        ledger = self._engine.ledger
        if not self._fp16 or not ledger.is_weighted:
            return 1.0
        if plugin.weight_unit is None and not self._step.has_said_weight:
            self._step.has_said_weight = True  # once per step, or ranks would not meet
            weight = float(ledger.weight) * self._accumulated / max(ledger.microbatches, 1)
            plugin.weight_unit = unit_of(self._engine.exchange("first weights under fp16", weight))
        self._engine.weight_unit = plugin.weight_unit or 1.0
        return self._engine.weight_unit

    def settle(self) -> None:
        """Complete the gradients, once per optimizer step."""
        self._has_settled = True
        if self._engine.settled:
            return
        self.loss_divisor()  # the others may ask for this rank's weight, also if it had no backward pass
        if self._sample_group is not None:
            ledger = self._engine.ledger
            ran = str(ledger.microbatches)
            if self._sample_group.divide_layers:
                ran += f" with the weight {float(ledger.weight):g}"
            self._sample_group.check_same("microbatches", ran)
        records = self._engine.settle(self._logbook.post(), self._measurements.take())
        self._step.totals += self._logbook.merge(
            [record.logs for record in records], self._module.global_rank
        )
        measured = [Measured(*record.measured) for record in records]
        self._measurements.report(measured)
        contradiction = next((of_rank.contradiction for of_rank in measured if of_rank.contradiction), "")
        if contradiction and self.audit is not None:
            self.audit = None
            self.contradicted(contradiction)

    def meet(self) -> None:
        """Go on only when all ranks have come this far, if that matters."""
        if self.meets:
            self._engine.exchange("about to step", None)

    def end_epoch(self) -> None:
        """Refuse a first epoch in which hooks of parameters waited for a step that never came."""
        # Under automatic optimization, Lightning steps, if there is a batch at all.
        if self._has_settled or self._module.automatic_optimization:
            return
        self._engine.reshard()
        if any(map(_compat.gradient_hooks_of, self._module.parameters())):
            raise ODCError(
                "Hooks of `register_post_accumulate_grad_hook` are called at the optimizer step, when gradients are "
                "complete. No optimizer that `configure_optimizers` returned has stepped in this epoch. If the hooks "
                "step their own optimizers, end each step in `training_step`, after `self.manual_backward(loss)`:\n"
                "    self.trainer.strategy.settle_gradients()\n"
                "    self.trainer.strategy.publish_parameters()"
            )

    def end_step(self) -> None:
        """An optimizer has stepped: publish the parameters and log the values of the step."""
        self._has_gradients = False
        self.steps += 1
        if self.progress is not None:
            self.progress.end_step()
        self._engine.publish()
        totals = self._step.totals
        self._step = _OptimizerStep()
        if totals:
            with _compat_lightning.logging_as(self._module, "training_step"):
                flush(totals, self._module)
