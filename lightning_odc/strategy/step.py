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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_odc import _compat, _compat_lightning
from lightning_odc.data.convert import check_samplers
from lightning_odc.data.lengths import digest_of
from lightning_odc.data.minibatch import Minibatch, Task, sample_count
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.data.split import parts_of, sizes_of, some_of
from lightning_odc.data.weighting import Counter, Rule, Verdict, tensors_of
from lightning_odc.engine.base import Counting
from lightning_odc.errors import ODCError
from lightning_odc.strategy.logbook import LogBook, LoggedNames, Total, flush, replaced_log
from lightning_odc.strategy.loss_trial import try_loss
from lightning_odc.strategy.microbatch import (
    MAKE_ROOM,
    Contribution,
    CountsNothing,
    Measurements,
    Part,
    Retry,
    contribution,
    cut_graph,
    explained,
    nothing_of,
    size_of,
    warn_of_drop,
)
from lightning_odc.strategy.model_facts import causal_model
from lightning_odc.strategy.precision import unit_of
from lightning_odc.strategy.sharded import ShardedStrategy


@dataclass
class _Batch:
    """How the microbatches of a batch run, and what they add up to on this rank."""

    device: torch.device
    args: tuple[Any, ...] = ()  # that ``training_step`` takes behind the microbatch
    kwargs: dict[str, Any] = field(default_factory=dict)
    counter: Counter | None = None  # what is counted in the microbatch instead of its weight
    is_sum: bool = False  # the loss is a sum, which no weight multiplies
    counting: Counting = Counting.PLANNED  # what planned weights count
    samples: int = 1  # of a plain batch, by which Lightning weights what is logged
    extras: dict[str, list[Any]] = field(default_factory=dict)  # what else steps returned, by microbatch
    loss: Any = 0.0
    weight: Any = 0.0

    def add(self, item: Contribution) -> None:
        self.loss = self.loss + item.loss.detach()
        self.weight = self.weight + item.weight
        for key, value in item.extras.items():
            # A view would keep the graph, with the activations of a microbatch that runs again in parts.
            self.extras.setdefault(key, []).append(value.detach() if isinstance(value, Tensor) else value)

    def output(self, item: Contribution | None = None) -> dict[str, Any]:
        """The loss of a microbatch (or one that adds nothing), whose value is the mean of all of them; and the rest."""
        total = torch.as_tensor(self.loss, device=self.device)
        weight = torch.as_tensor(self.weight, device=self.device, dtype=total.dtype)
        mean = torch.where(weight > 0, total / weight, torch.zeros_like(total))
        loss = torch.zeros((), device=self.device, requires_grad=True) if item is None else item.loss.sum()
        loss = loss.to(torch.promote_types(loss.dtype, mean.dtype), copy=True)
        loss.detach().copy_(mean.reshape(()))  # the gradient of the loss, under the value of the mean
        return {"loss": loss, **self.extras}


def call_step(strategy: ShardedStrategy, name: str, *args: Any, **kwargs: Any) -> Any:
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
        self._strategy, options = strategy, strategy.options
        self._module = strategy.lightning_module
        self._engine = engine = strategy.engine
        self._mates = strategy.attached.mates
        self._call = partial(call_step, strategy, "training_step")
        computed_in = (strategy.precision_plugin.compute_dtype, strategy.mixed_precision_policy.param_dtype)
        self._fp16 = torch.float16 in computed_in
        self._seed = strategy.broadcast(torch.initial_seed())  # of the user's `torch.manual_seed`
        self._logbook = LogBook()
        self._logged = LoggedNames(self._module)  # by the plain batch at hand
        self._measurements = Measurements(lambda: sum(engine.waits.values()), strategy.root_device)
        self._totals: list[Total] = []  # of values that were logged in this optimizer step
        self._loaders_unchecked = True
        self._has_settled = False
        self._has_said_weight = False
        self._labels = Counter(skips_first=causal_model(self._module) is not None)
        self.communicates = False  # whether the step that was tried talks to other ranks
        self._rules_of_parts: dict[Any, Verdict] = {}  # by the shapes of batches
        self._skips_nonfinite = options.on_nonfinite == "skip"
        self._retry = Retry(options.on_out_of_memory, engine, strategy.root_device, self._module.buffers())
        self._batch = _Batch(strategy.root_device)
        self._part: Part | None = None  # that ran forward last
        # The part whose backward pass is Lightning's, and what runs instead if that runs out of memory.
        self._pending: tuple[Part, Iterator[Part]] | None = None
        self._more = False  # another backward pass of this batch follows

    # -- a batch ------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; what Lightning's ``training_step`` is here."""
        is_minibatch = bool(args) and isinstance(args[0], Minibatch)
        if is_minibatch and self._loaders_unchecked:
            self._loaders_unchecked = False  # until now it was not known what they yield
            if _compat_lightning.deals_out(self._module.trainer):
                check_samplers(self._module.trainer.train_dataloader)
        trainer, is_automatic = self._module.trainer, self._module.automatic_optimization
        self._part = self._pending = None
        if trainer.fit_loop.batch_idx == 0:
            self._check_mates(args, is_minibatch)
        if is_minibatch and not is_automatic:
            self._engine.drop_emptied_anywhere()
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        batch, is_last = trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        # Lightning's `zero_grad` at the first batch of a step must reach the accumulators of all ranks.
        self._engine.begin_batch(
            opens_window=is_automatic and batch % self._accumulated == 0,
            closes_window=not is_automatic or is_last or (batch + 1) % self._accumulated == 0,
            is_last=is_last and not stops_anyway,
        )
        if is_minibatch and is_automatic:
            return self._minibatch(*args, **kwargs)
        if is_automatic and args:
            return self._plain(*args, **kwargs)
        self._engine.begin_forward()
        manual = f"With manual optimization, no batch runs again in parts. {MAKE_ROOM}."
        with nullcontext() if is_automatic else explained(manual):
            return self._call(*args, **kwargs)

    def _check_mates(self, args: tuple[Any, ...], is_minibatch: bool) -> None:
        """Refuse different batches on ranks that compute a sample together."""
        if self._mates is None or not args:
            return
        content = args[0]
        if is_minibatch:  # of a plan, microbatches may be read when they run
            content = [*content] if content.origin is None else content.plan
        self._mates.check_same("batches", digest_of(content))

    @property
    def _accumulated(self) -> int:
        """The batches of an optimizer step, by which Lightning divides the loss it is given."""
        return self._module.trainer.accumulate_grad_batches

    def _minibatch(self, minibatch: Minibatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a rank's microbatches; see Note [The last backward belongs to Lightning]."""
        self._measurements.open(minibatch)
        self._engine.begin_minibatch(len(minibatch), minibatch.plan)
        self._batch = batch = _Batch(self._strategy.root_device, args, kwargs)
        if (origin := minibatch.origin) is not None:
            batch.counter = origin.counter or (self._labels if origin.by_labels else None)
            batch.is_sum = origin.is_sum
        # A rank may help others only when its own work is done: then nothing is left for Lightning.
        last = len(minibatch) - 1 if minibatch.all_ranks is None else None
        with self._logbook.recording(self._module):
            for index, task in enumerate(self._engine.tasks(minibatch)):
                self._run(self._parts(task, index), keeps_graph=index == last)
        return batch.output(None if self._pending is None else self._pending[0].item)

    def _plain(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch that is one microbatch. Lightning's backward pass follows."""
        samples = sample_count(batch) or 1
        self._batch = _Batch(self._strategy.root_device, args, kwargs, None, False, Counting.MEAN, samples)
        parts, output = self._parts(Task(batch, 1.0, None), 0), None
        part = next(parts)
        with self._logged.noting(), part:
            output = self._forward(part)
        if part.error is None:
            self._pending = None if part.item is None else (part, parts)
            return output
        # A name is logged once: its value may be synchronised with other ranks.
        with self._logbook.recording(self._module):
            self._run(parts)
        totals = self._logbook.take()
        flush((total for total in totals if total.name not in self._logged.names), self._module)
        return self._batch.output()

    def last_backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run Lightning's own backward pass of a batch; see Note [The last backward belongs to Lightning]."""
        pending, self._pending = self._pending, None
        if pending is None:
            loss = run(loss)
            self._engine.backward_done = False
            return loss
        part, parts = pending
        with part:
            run(loss)
            self._engine.backward_done = False
        if part.error is not None:
            cut_graph(loss)
        self._run(parts)
        return loss.detach()

    # -- a microbatch -------------------------------------------------------------------------------------

    def _parts(self, task: Task, index: int, whole: Any = None, is_last_try: bool = False) -> Iterator[Part]:
        """Yield a microbatch; if it runs out of memory in its ``with``, its parts, too: Note [Run again in parts]."""
        part = Part(task, index, self._retry, whole, is_last_try)
        yield part
        if part.error is None:
            self._retry.fits(part)
            return
        if self._mates is not None:
            self._mates.all_out_of_memory(part.error, [index, part.is_part, part.item is None])
        part.undo()
        self._measurements.forget()
        if part.item is None:
            self._logbook.drop()
        if not part.counts:  # its backward pass would add zeros
            return
        if not part.is_part:
            self._measurements.ran_out.append(size_of(part.task))
        halves, reason = self._cut(part)
        if self._mates is not None:
            self._mates.check_same("parts of a microbatch that ran out of memory", len(halves), MAKE_ROOM)
        if not halves:
            self._retry.drop(part, reason)
            self._leave_out(part)
            return
        self._retry.cut(part, reason)
        for half in halves:
            yield from self._parts(half, index, part, is_last_try=len(halves) == 1)

    def _run(self, parts: Iterator[Part], keeps_graph: bool = False) -> None:
        """Run a microbatch, or what is left of it; if Lightning runs its backward pass, only forward."""
        for part in parts:
            quiet = replaced_log(self._module, lambda *_, **__: None) if part.is_logged else nullcontext()
            with part, quiet:
                self._forward(part)
                if part.item is None:
                    continue
                if not part.is_logged:
                    self._batch.add(part.item)
                if keeps_graph and not part.is_part:
                    self._pending = part, parts
                    return
                if part.is_part:
                    self._engine.retry(part.added)
                self._more = True
                try:
                    self._strategy.backward(part.item.loss / self._accumulated, self._strategy.optimizers[0])
                finally:
                    self._more = False
                part.item.detach()

    def _forward(self, part: Part) -> Any:
        """Run the user's step; returns what it returned, which holds its graph."""
        batch, task, self._part = self._batch, part.run, part
        self._measurements.begin(task.detail)
        # Counted before the step, which may take them out of the batch.
        labels = None if batch.counter is None else batch.counter.of(task.microbatch)
        counts = 1.0 if part.is_part else task.weight  # labels and items say themselves what a part counts
        if labels is not None:
            part.counts_nothing = CountsNothing(labels, counts)
        self._engine.begin_forward()
        chance = random_numbers_of(task.detail, self._strategy.root_device, self._seed)
        with chance, self._measurements.running():
            output = self._call(task.microbatch, *batch.args, **batch.kwargs)
        item = contribution(output, task.weight, batch.counting, labels, part.is_part, batch.is_sum)
        if item is None:
            if self._mates is not None:
                self._mates.all_without_loss(part.index)
            self._logbook.weigh(task.weight * batch.samples)
            return output
        if item.counting is Counting.EXACT:
            part.counts_nothing = CountsNothing(weight=counts)
        if self._skips_nonfinite and not bool(torch.isfinite(item.loss).all()):
            # It counts nothing, but goes backward, since others may wait for it, and adds zeros.
            warn_of_drop(part, "has a loss that is not finite")
            part.counts_nothing = CountsNothing(weight=0.0)
            self._leave_out(part)
            item = replace(item, loss=nothing_of(item.loss), weight=0.0)
            output = {**output, "loss": item.loss} if isinstance(output, Mapping) else item.loss
        self._logbook.weigh(item.weight * batch.samples)
        part.item = item
        self._engine.ledger.add(item.weight / self._accumulated, item.counting)
        return output

    def _leave_out(self, part: Part) -> None:
        """Let a plain batch, or a part of one, have no part in the mean."""
        if self._batch.counting is Counting.MEAN:
            self._engine.ledger.left_out += part.task.weight / self._accumulated

    def _cut(self, part: Part) -> tuple[list[Task], str]:
        """Both parts of a microbatch; or the whole, to run once more, or nothing, and what cannot be done with it."""
        task = part.task
        if isinstance(task.microbatch, Iterator):
            return [], "run again: what an iterator has yielded is gone"
        if part.is_last_try:
            return [], ""
        can_read = task.detail is not None and task.detail.samples is not None
        verdict = Verdict(Rule("sample")) if can_read else self._rule_of_parts(task.microbatch)
        if verdict.rule is None:
            return [task], f"be cut: {verdict.reason}" * bool(verdict.reason)
        try:
            halves = parts_of(task, verdict.rule)
        except Exception as problem:  # a collator that needs the whole, say
            return [task], f"be cut: {type(problem).__name__}: {problem}"
        if can_read:
            halves = [half._replace(microbatch=self.move(half.microbatch)) for half in halves]
        return halves or [task], ""

    def _rule_of_parts(self, microbatch: Any) -> Verdict:
        """What parts of a microbatch count, which only its tensors can tell; tried with some of its samples."""
        sizes, take = sizes_of(microbatch), partial(some_of, microbatch)
        if not sizes:
            return Verdict(None)  # a single sample, maybe
        shapes = tuple((path, tensor.dim()) for path, tensor in tensors_of(microbatch))
        if shapes not in self._rules_of_parts:
            self._rules_of_parts[shapes] = self.try_loss(take, sizes[:12], *self._batch.args)
        verdict, is_plain = self._rules_of_parts[shapes], self._batch.counting is Counting.MEAN
        if verdict.rule == Rule("sum"):
            if not (is_plain or self._batch.is_sum):
                return Verdict(None, 'its loss is a sum: return {"loss": loss, "num_items": n}')
            self._batch.is_sum = True
        return verdict

    def move(self, microbatch: Any) -> Any:
        """Bring what a loader has read to the device."""
        converted = self._strategy.precision_plugin.convert_input(microbatch)
        # As a Minibatch: of a plain batch, Lightning has called the first of the hooks before.
        return self._strategy.batch_to_device(Minibatch([converted]), self._strategy.root_device)[0]

    def try_loss(self, batch_of: Callable[[Sequence[int]], Any], tokens: Any, *args: Any) -> Verdict:
        """What the loss is a mean over; see Note [The loss is tried]. It leaves no trace."""

        def run(batch: Any) -> Any:
            self._engine.begin_forward()
            return self._call(batch, *args)

        verdict, self.communicates = try_loss(self._module, self._strategy.root_device, run, batch_of, tokens)
        return verdict

    # -- backward and settle ------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass, without Lightning's hooks before and after it."""
        manual = not self._module.automatic_optimization
        counts = self._part is None or not self._part.counts_nothing
        context = self._engine.backward(manual=manual, more=self._more, counts=counts)
        with context, self._engine.traced("backward"), self._measurements.running():
            yield

    def loss_divisor(self) -> float:
        """What the losses of this step are divided by; see Note [Weights under fp16]."""
        plugin, ledger = self._strategy.precision_plugin, self._engine.ledger
        if not self._fp16 or not ledger.is_weighted:
            return 1.0
        if plugin.weight_unit is None and not self._has_said_weight:
            self._has_said_weight = True  # once per step, or ranks would not meet
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
        if self._mates is not None:
            ledger = self._engine.ledger
            weight = f" with the weight {float(ledger.weight):g}" if self._mates.divide_layers else ""
            self._mates.check_same("microbatches", f"{ledger.microbatches}{weight}")
        records = self._engine.settle(self._logbook.post(), self._measurements.take())
        self._totals += self._logbook.merge([record.logs for record in records], own=self._module.global_rank)
        self._measurements.report([record.measured for record in records])

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
        self._engine.publish()
        self._has_said_weight = False
        totals, self._totals = self._totals, []
        if totals:
            with _compat_lightning.logging_as(self._module, "training_step"):
                flush(totals, self._module)
