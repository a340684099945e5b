"""A training step on this rank, from Lightning's call to the user's ``training_step``, and on to backward and settle.

Read `Training` from the top: `step` runs a batch, `around_backward` is the context of every backward pass, `settle`
completes the gradients, `end_step` publishes the parameters.

Note [The last backward belongs to Lightning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning calls ``training_step`` once per batch, then ``zero_grad``, then ``backward`` once. Of a `Minibatch`, all
microbatches run inside that one ``training_step`` call, and all but the last are backpropagated there. The last loss
is returned with its graph, and *with the value* of all this rank's microbatches, so that progress bars,
``on_train_batch_end`` and loggers see all of them. A rank without microbatches returns a zero. So do ranks that help
each other: there, no backward pass is left for later.

An example: this rank's ``Minibatch([a, b, c], weights=[3, 5, 2])``, with the losses ``La``, ``Lb``, ``Lc``. ::

    Lightning              here                                    accumulated gradient of the rank
    training_step(...)     forward(a)                              0
                           forward(b) follows: backward(3 La)      3 gLa
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.data.batch_size import sample_count
from lightning_odc.data.checks import check_samplers
from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.data.split import pieces_of
from lightning_odc.data.weighting import Counter, Rule, Verdict, tensors_of
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Counting, Engine
from lightning_odc.errors import ODCError
from lightning_odc.strategy import device_memory
from lightning_odc.strategy.causal_lm import causal_model
from lightning_odc.strategy.contribution import Contribution, CountsNothing, contribution, nothing_of
from lightning_odc.strategy.logbook import LogBook, LoggedNames, flush, replaced_log
from lightning_odc.strategy.loss_trial import CollectiveListener, try_loss, untouched
from lightning_odc.strategy.out_of_memory import Answer, Attempt, Relief, Rescue, cut_graph
from lightning_odc.strategy.precision import unit_of
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.stopwatch import Stopwatch
from lightning_odc.strategy.totals import Total


@dataclass
class _Sums:
    """What the microbatches of a minibatch add up to on this rank."""

    loss: Any = 0.0
    weight: Any = 0.0
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, item: Contribution) -> None:
        self.loss = self.loss + item.loss.detach()
        self.weight = self.weight + item.weight
        for key, value in item.extras.items():
            # A view would keep the graph, with the activations of a microbatch that runs again in parts.
            self.extras.setdefault(key, []).append(value.detach() if isinstance(value, Tensor) else value)

    def mean(self, device: torch.device) -> Tensor:
        loss = torch.as_tensor(self.loss, device=device)
        weight = torch.as_tensor(self.weight, device=device, dtype=loss.dtype)
        return torch.where(weight > 0, loss / weight, torch.zeros_like(loss))


@dataclass
class _Batch:
    """How the microbatches of a batch run.

    Attributes:
        args: What ``training_step`` takes behind the microbatch.
        kwargs: The rest of it.
        counter: What is counted in the microbatch instead of its weight.
        is_sum: Whether the loss is a sum, which no weight multiplies.
        counting: What planned weights count.
        samples: The number of its samples if it is a plain one, by which Lightning weights what is logged.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    counter: Counter | None = None
    is_sum: bool = False
    counting: Counting = Counting.PLANNED
    samples: int = 1


class _WithValue(torch.autograd.Function):
    """The first argument's gradient under the second one's value."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        ctx.shape = loss.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype).reshape(ctx.shape), None


def call_step(strategy: ShardedStrategy, engine: Engine, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a step of the module through its ``__call__``, where ``fully_shard`` has its hooks."""
    module = strategy.lightning_module
    assert module is not None
    forward = module.forward
    try:
        with strategy.precision_plugin.forward_context(), engine.traced("forward", step=name):
            return _compat.call_as_forward(strategy.model, module, name, *args, **kwargs)
    except BaseException:
        # Lightning has put the step in its place, and takes it back when the step begins. A hook may fail before.
        module.forward = forward  # type: ignore[method-assign]
        raise


class Training:
    """The training steps of one fit.

    Args:
        strategy: The strategy, set up.
        engine: The engine of its model.
        fp16: Whether the model computes in fp16.
        on_out_of_memory: What to do with a microbatch that runs out of memory.
        skips_nonfinite: Whether microbatches are left out whose loss is not finite.

    Attributes:
        leaves_out: Whether the microbatch at hand counts nothing, so that neither its loss nor its gradients do.
        reliefs: What was cut or left out in the optimizer step that has settled last.
        communicates: Whether the step that was tried talks to other ranks.
    """

    def __init__(
        self,
        strategy: ShardedStrategy,
        engine: Engine,
        fp16: bool,
        on_out_of_memory: Answer = "raise",
        skips_nonfinite: bool = False,
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._engine = engine
        self._fp16 = fp16
        self._seed = strategy.broadcast(torch.initial_seed())  # of the user's `torch.manual_seed`
        self._logbook = LogBook()
        self._logged = LoggedNames(self._module)  # by the plain batch at hand
        self._stopwatch = Stopwatch(lambda: sum(engine.waits.values()), strategy.root_device)
        self._memory = device_memory.MemoryMeter(device_memory.memory_of(strategy.root_device), engine)
        self._totals: list[Total] = []  # of values that were logged in this optimizer step
        self.leaves_out = CountsNothing()
        self._loaders_unchecked = True
        self._more = False  # another backward pass of this batch follows
        self._has_stepped = False  # an optimizer of Lightning
        self._has_settled = False  # in this batch
        self._hooks_wait = False
        self._has_said_weight = False
        self._labels = Counter(skips_first=causal_model(self._module) is not None)
        self.communicates = False
        self._rules_of_parts: dict[Any, Verdict] = {}  # by the shapes of batches
        self._skips_nonfinite = skips_nonfinite
        buffers = self._module.buffers()
        self._rescue = Rescue(on_out_of_memory, engine, self, strategy.root_device, buffers)
        self._batch = _Batch()
        self._last: Attempt | None = None  # whose backward pass is Lightning's
        self.reliefs: list[Relief] = []
        self._index = 0  # of the microbatch that runs forward
        self._added: Added | None = None  # of the batch that a user runs again

    def take_reliefs(self) -> list[Relief]:
        """What was cut or left out since the last call."""
        return self._rescue.reliefs.take_reliefs()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; what Lightning's ``training_step`` is here.

        Args:
            *args: A batch or a `Minibatch`, and what else ``training_step`` takes.
            **kwargs: The rest of it.

        Returns:
            What the user's ``training_step`` returned; for a `Minibatch` ``{"loss": ...}``, and for everything else
            that ``training_step`` returned the list over microbatches.
        """
        is_minibatch = bool(args) and isinstance(args[0], Minibatch)
        if is_minibatch and self._loaders_unchecked:
            self._loaders_unchecked = False  # until now it was not known what they yield
            if _compat.deals_out(self._module.trainer):
                check_samplers(self._module.trainer.train_dataloader)
        self._begin_batch("Minibatch" if is_minibatch else "plain batch")
        is_automatic = self._module.automatic_optimization
        if is_minibatch and is_automatic:
            return self._run(*args, **kwargs)
        if is_automatic and args:
            return self._plain(*args, **kwargs)
        self._engine.begin_forward()
        output = call_step(self._strategy, self._engine, "training_step", *args, **kwargs)
        if not is_automatic:
            self._step_in_hooks()
        return output

    def _plain(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch that is one microbatch. Lightning's backward pass follows."""
        self._batch = _Batch(args, kwargs, counting=Counting.MEAN, samples=sample_count(batch) or 1)
        with self._logged.noting():
            attempt, output, failure = self._forward(Task(batch, 1.0, None), 0)
        if failure is not None:
            return self._plain_in_parts(attempt, failure)
        if attempt.item is None:
            return None
        self.count(attempt.item)
        self._last = attempt
        return output

    def _plain_in_parts(self, attempt: Attempt, failure: Exception) -> dict[str, Any]:
        """Run a plain batch in parts. A name is logged once: its value may be synchronised with other ranks."""
        sums = _Sums()
        with self._logbook.recording(self._module):
            for item in self._rescue.again(attempt, failure):
                sums.add(item)
        flush([one for one in self._logbook.take() if one.name not in self._logged.names], self._module)
        return {"loss": self._with_value(None, sums), **sums.extras}

    @property
    def _accumulated(self) -> int:
        """The batches of an optimizer step, by which Lightning divides the loss it is given."""
        return self._module.trainer.accumulate_grad_batches

    def _begin_batch(self, kind: str) -> None:
        """What Lightning's ``zero_grad`` does at the first batch of a step must reach all ranks' accumulators."""
        trainer = self._module.trainer
        if trainer.fit_loop.batch_idx == 0:
            self.check_hooks_ran()
        self._has_settled = False
        self._last = None
        self.leaves_out = CountsNothing()
        is_first = trainer.fit_loop.batch_idx % self._accumulated == 0
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not stops_anyway
        opens_window = self._module.automatic_optimization and is_first
        if kind == "Minibatch" and not self._module.automatic_optimization:
            self._engine.drop_emptied_anywhere()
        self._engine.begin_batch(opens_window=opens_window, kind=kind, is_last=is_last)

    def _run(self, minibatch: Minibatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a rank's microbatches; see Note [The last backward belongs to Lightning]."""
        self._stopwatch.open(minibatch)
        self._memory.open(minibatch)
        self._engine.begin_minibatch(len(minibatch), minibatch.plan)
        counter = is_sum = None
        if (origin := minibatch.origin) is not None:
            counter, is_sum = origin.counter or (self._labels if origin.by_labels else None), origin.is_sum
        self._batch, sums = _Batch(args, kwargs, counter, bool(is_sum)), _Sums()
        pending: Attempt | None = None  # the microbatch before, not yet backpropagated
        with self._logbook.recording(self._module):
            for index, task in enumerate(self._engine.tasks(minibatch)):
                if pending is not None:
                    self._finish(pending)
                pending = None  # its graph must not outlive it
                pending = self._begin(task, index, sums)
                if pending is not None and minibatch.all_ranks is not None:
                    # A rank may help others only when its own work is done: nothing is left for Lightning.
                    self._finish(pending)
                    pending = None
        self._last = pending
        return {"loss": self._with_value(pending, sums), **sums.extras}

    def _begin(self, task: Task, index: int, sums: _Sums) -> Attempt | None:
        """Run a microbatch as far as to its loss; returns it if there is something to backpropagate."""
        attempt, _, failure = self._forward(task, index)
        if failure is not None:
            for item in self._rescue.again(attempt, failure):
                sums.add(item)
            return None
        if attempt.item is None:
            return None
        self.count(attempt.item)
        sums.add(attempt.item)
        return attempt

    def _forward(self, task: Task, index: int) -> tuple[Attempt, Any, Exception | None]:
        """Run a microbatch forward; returns also what its step returned, and the error if memory ran out."""
        self._index = index
        attempt = Attempt(task, index, self._strategy.root_device, self._rescue.buffers)
        output = None
        with self._rescue.watching() as failures:
            output, attempt.item = self._outcome(attempt.run)
        return attempt, output, failures[0] if failures else None

    def _finish(self, attempt: Attempt) -> None:
        """Backpropagate a microbatch."""
        assert attempt.item is not None
        with self._rescue.watching() as failures:
            self.backward(attempt.item.loss)
            self._rescue.fits(attempt)
        if failures:
            self._rescue.again(attempt, failures[0])

    def _with_value(self, attempt: Attempt | None, sums: _Sums) -> Tensor:
        """The loss of a microbatch under the value of all of them; without one a loss that adds nothing."""
        device = self._strategy.root_device
        none = torch.zeros((), device=device, requires_grad=True)
        pending = none if attempt is None or attempt.item is None else attempt.item.loss
        return cast(Tensor, _WithValue.apply(pending, sums.mean(device)))  # type: ignore[no-untyped-call]

    def last_backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run Lightning's own backward pass of a batch; see Note [The last backward belongs to Lightning].

        Args:
            loss: What Lightning holds, too.
            run: Backpropagates it.
        """
        attempt, self._last = self._last, None
        if attempt is None:
            loss = run(loss)
            self._engine.is_behind = False
            return loss
        with self._rescue.watching() as failures:
            run(loss)
            self._engine.is_behind = False
            self._rescue.fits(attempt)
        if failures:
            cut_graph(loss)
            self._rescue.again(attempt, failures[0])
        return loss.detach()

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """What `ODCStrategy.retrying` does."""
        before = self._added
        self._added = self._rescue.let_go(before or Added())
        try:
            yield
        finally:
            self._added = before

    # -- what `Rescue` calls ------------------------------------------------------------------------------

    def move(self, microbatch: Any) -> Any:
        converted = self._strategy.precision_plugin.convert_input(microbatch)
        # As a Minibatch: of a plain batch, Lightning has called the first of the hooks before.
        return self._strategy.batch_to_device(Minibatch([converted]), self._strategy.root_device)[0]

    def try_loss(
        self, batch_of: Callable[[Sequence[int]], Any], tokens: Sequence[int], *args: Any
    ) -> Verdict:
        """What the loss is a mean over; see Note [The loss is tried]. It leaves no trace.

        Args:
            batch_of: Makes a batch of some samples, by their positions.
            tokens: The lengths of the samples.
            *args: What else ``training_step`` takes.
        """
        listener = CollectiveListener()
        with untouched(self._module, self._strategy.root_device) as restore:

            def run(batch: Any) -> Any:
                restore()  # so that the same samples have the same loss
                self._engine.begin_forward()
                return call_step(self._strategy, self._engine, "training_step", batch, *args)

            def made(group: Sequence[int]) -> Any:
                restore()
                return batch_of(group)

            verdict = try_loss(run, made, tokens, listener)
        self.communicates = listener.heard
        return verdict

    def rule_of_parts(self, microbatch: Any) -> Verdict:
        """What parts of a microbatch count, which only its tensors can tell; tried with some of its samples."""
        found = pieces_of(microbatch)
        if found is None:
            return Verdict(None)  # a single sample, maybe
        sizes, take = found
        shapes = tuple((path, tensor.dim()) for path, tensor in tensors_of(microbatch))
        if shapes not in self._rules_of_parts:
            self._rules_of_parts[shapes] = self.try_loss(take, sizes[:12], *self._batch.args)
        verdict, is_plain = self._rules_of_parts[shapes], self._batch.counting is Counting.MEAN
        if verdict.rule == Rule("sum"):
            if not (is_plain or self._batch.is_sum):
                return Verdict(None, 'its loss is a sum: return {"loss": loss, "num_items": n}')
            self._batch.is_sum = True
        return verdict

    def forward(self, task: Task) -> Contribution | None:
        return self._outcome(task, is_part=True)[1]

    def _outcome(self, task: Task, is_part: bool = False) -> tuple[Any, Contribution | None]:
        """Run a step; returns what it returned, which holds its graph, and what that contributes."""
        batch = self._batch
        self.leaves_out = CountsNothing(weight=task.weight)
        self._stopwatch.begin(task.detail)
        self._memory.begin(task.detail)
        # Counted before the step, which may take them out of the batch.
        labels = None if batch.counter is None else batch.counter.of(task.microbatch)
        counts = (
            1.0 if is_part else task.weight
        )  # of labels and items, which say themselves what a part counts
        if labels is not None:
            self.leaves_out = CountsNothing(labels, counts)
        self._engine.begin_forward()
        with (
            random_numbers_of(task.detail, self._strategy.root_device, self._seed),
            self._stopwatch.running(),
        ):
            output = call_step(
                self._strategy, self._engine, "training_step", task.microbatch, *batch.args, **batch.kwargs
            )
        item = contribution(output, task.weight, batch.counting, labels, is_part, batch.is_sum)
        if item is not None and item.counting is Counting.EXACT:
            self.leaves_out = CountsNothing(weight=counts)
        if item is not None and self._skips_nonfinite and not bool(torch.isfinite(item.loss).all()):
            item = self._left_out(item, task)
            output = {**output, "loss": item.loss} if isinstance(output, Mapping) else item.loss
        self._logbook.weigh((task.weight if item is None else item.weight) * batch.samples)
        return output, item

    def _left_out(self, item: Contribution, task: Task) -> Contribution:
        """A contribution that counts nothing. It goes backward, since others may wait for it, and adds zeros."""
        self._rescue.reliefs.note(task, self._index, "skip", "nonfinite")
        self.leaves_out = CountsNothing(weight=0.0)
        self.leave_out(task)
        return replace(item, loss=nothing_of(item.loss), weight=0.0)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate as Lightning does: its hooks, the loss scale, and then `around_backward`."""
        self._more = True
        try:
            self._strategy.backward(loss / self._accumulated, self._strategy.optimizers[0])
        finally:
            self._more = False

    def count(self, item: Contribution) -> None:
        self._engine.ledger.add(item.weight / self._accumulated, item.counting)

    def break_off(self, item: Contribution | None) -> None:
        self._stopwatch.forget()
        if item is None:
            self._logbook.drop()
        else:
            self._engine.ledger.withdraw(item.weight / self._accumulated, item.counting)

    def leave_out(self, task: Task) -> None:
        if self._batch.counting is Counting.MEAN:
            self._engine.ledger.leave_out(task.weight / self._accumulated)

    def quiet(self) -> AbstractContextManager[None]:
        return replaced_log(self._module, lambda *_, **__: None)

    # -- backward and settle ------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass, without Lightning's hooks before and after it."""
        manual = not self._module.automatic_optimization
        if self._added is not None:
            self._engine.resume(self._added)
        context = self._engine.backward(manual=manual, more=self._more, counts=not self.leaves_out)
        with context, self._engine.traced("backward"), self._stopwatch.running():
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
        if self._engine.settled:
            return
        self._has_settled, self._hooks_wait = True, False
        self.loss_divisor()  # the others may ask for this rank's weight, also if it had no backward pass
        self.reliefs = self.take_reliefs()
        measured = [self._stopwatch.take(), self._memory.take(self.reliefs)]
        records = self._engine.settle(self._logbook.post(), measured)
        self._totals += self._logbook.merge([record.logs for record in records], own=self._module.global_rank)
        self._stopwatch.report([record.measured[0] for record in records])
        self._memory.report([record.measured[1] for record in records])

    def _step_in_hooks(self) -> None:
        """End the step of a batch with manual optimization, if hooks of parameters step and no optimizer does.

        Otherwise ``step()`` of an optimizer settles and publishes.
        """
        if self._has_stepped or self._has_settled:
            return
        self._engine.reshard()
        shards = set(self._module.parameters())
        if not any(map(_compat.gradient_hooks_of, shards)):
            return
        optimizers = self._strategy.optimizers
        stepped = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        if shards.isdisjoint(stepped):
            self.settle()
            self._publish()
        else:  # one of these optimizers may step in a later batch
            self._hooks_wait = True

    def check_hooks_ran(self) -> None:
        """Refuse an epoch in which hooks of parameters waited for a step that never came.

        Raises:
            ODCError: No step ended; the message has the two ways to end one.
        """
        if self._hooks_wait:
            raise ODCError(
                "Hooks of `register_post_accumulate_grad_hook` are called at the optimizer step, when gradients are "
                "complete. No optimizer that `configure_optimizers` returned has stepped in this epoch. If the hooks "
                "step their own optimizers, return None from `configure_optimizers`. Or end each step in "
                "`training_step`, after `self.manual_backward(loss)`:\n"
                "    self.trainer.strategy.settle_gradients()\n"
                "    self.trainer.strategy.publish_parameters()"
            )

    def end_step(self) -> None:
        """An optimizer of Lightning has stepped: publish the parameters and log the values of the step."""
        self._has_stepped = True
        self._publish()

    def _publish(self) -> None:
        self._engine.publish()
        self._has_said_weight = False
        totals, self._totals = self._totals, []
        if totals:
            with _compat.logging_as(self._module, "training_step"):
                flush(totals, self._module)
