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

Note [Labels are counted]
~~~~~~~~~~~~~~~~~~~~~~~~~
``return self.model(**batch).loss`` is a mean over the labels of a microbatch that are not -100. The mean over those of
the minibatch is ``sum_m n_m L_m / sum_m n_m``, where ``n_m`` counts them in microbatch ``m``. So under
``weighting="auto"`` that count is the weight, whoever runs the microbatch, and the planned weight is used where there
are no integer labels. Two samples, the prompts masked (``-`` stands for -100)::

    labels                      tokens  a causal model counts           planned by tokens: wrong
    a  [[-, -, -, -, -, 7]]     6       1, the first column never       6 La + 3 Lb
    b  [[1, 2, 3]]              3       2                               counted: 1 La + 2 Lb

The planned weight still decides whether a microbatch counts: 0 means that it only keeps ranks together. A microbatch
without any label that counts has a NaN for a mean. It is left out; its backward pass runs, since with collectives the
others wait for it, and the engine adds zeros: ``0 * NaN`` is NaN, and so are the gradients of ``sum / 0``.
``"num_items"`` goes before all of that. A loss that is not a mean over labels (over samples, say) needs
``weighting="sample"`` or ``"num_items"``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.data.batch_size import label_count
from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.engine.base import Counting, Engine
from lightning_odc.errors import DisagreementError, ODCError
from lightning_odc.strategy import device_memory
from lightning_odc.strategy.causal_lm import causal_model
from lightning_odc.strategy.logbook import LogBook, flush
from lightning_odc.strategy.out_of_memory import Reliefs
from lightning_odc.strategy.precision import unit_of
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.stopwatch import Stopwatch
from lightning_odc.strategy.totals import Total


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides].

    Attributes:
        loss: The weighted (or summed) loss, with its graph; at least in fp32, which has room for weights and sums.
        weight: Its part of the denominator.
        extras: What else ``training_step`` returned.
        counting: What the weight counts.
    """

    loss: Tensor
    weight: float | Tensor
    extras: dict[str, Any]
    counting: Counting


class CountsNothing:
    """Whether a microbatch counts nothing. The answer waits for the count of its labels, and for no other work.

    Args:
        labels: The number of labels that its mean loss is over, if it is counted.
        weight: The planned weight.
    """

    def __init__(self, labels: Tensor | None = None, weight: float = 1.0) -> None:
        self._weight = weight
        self._labels = None if labels is None else labels.to("cpu", non_blocking=True)
        self._arrival = (
            None if labels is None or not labels.is_cuda else torch.cuda.current_stream().record_event()
        )

    def __bool__(self) -> bool:
        if self._labels is None or not self._weight:
            return not self._weight
        if self._arrival is not None:
            self._arrival.synchronize()
        return not bool(self._labels)


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
            self.extras.setdefault(key, []).append(value)

    def mean(self, device: torch.device) -> Tensor:
        loss = torch.as_tensor(self.loss, device=device)
        weight = torch.as_tensor(self.weight, device=device, dtype=loss.dtype)
        return torch.where(weight > 0, loss / weight, torch.zeros_like(loss))


def contribution(
    output: Any, weight: float, counting: Counting = Counting.MEAN, labels: Tensor | None = None
) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``.

    Args:
        output: The returned value. A ``"loss"`` beside ``"num_items"`` is a sum over items, else a mean.
        weight: The weight of the microbatch, where nothing says it exactly.
        counting: What that weight counts.
        labels: The number of labels that a mean is over, if it is counted; see Note [Labels are counted].

    Raises:
        TypeError: if it is something else.
    """
    if output is None:
        return None
    if isinstance(output, Tensor):
        return _of_mean(output, weight, {}, counting, labels)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        extras = {key: value for key, value in output.items() if key != "loss"}
        if "num_items" in output:
            counts = float(weight > 0)  # a microbatch of weight zero only keeps ranks together
            items = _checked(output["num_items"]) * counts
            return Contribution(_wide(output["loss"]) * counts, items, extras, Counting.EXACT)
        return _of_mean(output["loss"], weight, extras, counting, labels)
    raise TypeError(
        "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
        f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
    )


def counted_weight(output: Any, weight: float, labels: Tensor | None) -> float | Tensor:
    """What the values of a microbatch count that is evaluated; as in training, and the step may return anything.

    Args:
        output: What the step returned.
        weight: The planned weight.
        labels: The number of labels, if they are counted; see Note [Labels are counted].
    """
    counts = float(weight > 0)
    if isinstance(output, Mapping) and "num_items" in output:
        return _checked(output["num_items"]) * counts
    return weight if labels is None else labels * counts


def _of_mean(
    loss: Tensor, weight: float, extras: dict[str, Any], counting: Counting, labels: Tensor | None
) -> Contribution:
    """The contribution of a mean loss, weighted by its labels where they are counted."""
    if labels is None:
        return Contribution(_wide(loss) * weight, weight, extras, counting)
    labels = labels.to(loss.device) * float(weight > 0)
    mean = torch.where(labels > 0, _wide(loss), 0.0)  # over nothing it is NaN, and 0 * NaN would be, too
    return Contribution(mean * labels.to(mean.dtype), labels, extras, Counting.LABELS)


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


def _wide(loss: Tensor) -> Tensor:
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _checked(num_items: Any) -> float | Tensor:
    if isinstance(num_items, Tensor):
        return num_items.detach().double()  # summed as exactly as numbers of Python are
    if not isinstance(num_items, numbers.Real) or not 0 <= float(num_items) < math.inf:
        raise ValueError(
            f'"num_items" must be a finite number of at least 0, for example labels.ne(-100).sum(); got {num_items!r}.'
        )
    return float(num_items)


def call_step(strategy: ShardedStrategy, engine: Engine, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a step of the module through its ``__call__``, where ``fully_shard`` has its hooks."""
    with strategy.precision_plugin.forward_context(), engine.traced("forward", step=name):
        return _compat.call_as_forward(strategy.model, strategy.lightning_module, name, *args, **kwargs)


class Training:
    """The training steps of one fit.

    Args:
        strategy: The strategy, set up.
        engine: The engine of its model.
        fp16: Whether the model computes in fp16.

    Attributes:
        leaves_out: Whether the microbatch at hand counts nothing, so that neither its loss nor its gradients do.
        reliefs: What was not run as planned since the last settle.
    """

    def __init__(self, strategy: ShardedStrategy, engine: Engine, fp16: bool) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._engine = engine
        self._fp16 = fp16
        self._logbook = LogBook()
        self._stopwatch = Stopwatch(lambda: sum(engine.waits.values()), strategy.root_device)
        self._memory = device_memory.MemoryMeter(device_memory.memory_of(strategy.root_device), engine)
        self.reliefs = Reliefs()
        self._totals: list[Total] = []  # of values that were logged in this optimizer step
        self.leaves_out = CountsNothing()
        self._more = False  # another backward pass of this batch follows
        self._has_stepped = False  # an optimizer of Lightning
        self._has_settled = False  # in this batch
        self._hooks_wait = False
        self._has_said_weight = False
        self._shifts_labels = causal_model(self._module) is not None

    def compare_batches(self) -> None:
        """Find out now, not by a hang at the end of the epoch, that ranks will take different numbers of steps."""
        trainer = self._module.trainer
        batches = trainer.num_training_batches
        counts = self._engine.exchange("begin training", -1 if batches == float("inf") else batches)
        enough = trainer.max_steps * trainer.accumulate_grad_batches
        stops_before = trainer.max_steps > 0 and min(counts) >= enough
        if len(set(counts)) > 1 and not stops_before and -1 not in counts:
            raise DisagreementError(
                f"The ranks have {counts} training batches per epoch (by rank). Every rank needs the same number of "
                "Lightning batches; unequal work belongs inside a Minibatch (0 to k microbatches). With a "
                "distributed sampler, let it pad or drop: DistributedSampler(..., drop_last=True)."
            )

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
        self._begin_batch("Minibatch" if is_minibatch else "plain batch")
        is_automatic = self._module.automatic_optimization
        if is_minibatch and is_automatic:
            return self._run(*args, **kwargs)
        output = call_step(self._strategy, self._engine, "training_step", *args, **kwargs)
        if not is_automatic:
            self._step_in_hooks()
        elif (item := contribution(output, 1.0)) is not None:
            self._engine.ledger.add(item.weight / self._accumulated, item.counting)
        return output

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
        self.leaves_out = CountsNothing()
        is_first = trainer.fit_loop.batch_idx % self._accumulated == 0
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not stops_anyway
        opens_window = self._module.automatic_optimization and is_first
        self._engine.begin_batch(opens_window=opens_window, kind=kind, is_last=is_last)

    def _run(self, minibatch: Minibatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a rank's microbatches; see Note [The last backward belongs to Lightning]."""
        self._stopwatch.open(minibatch)
        self._memory.open(minibatch)
        self._engine.begin_minibatch(len(minibatch), minibatch.plan)
        sums, by_labels = _Sums(), minibatch.origin is not None and minibatch.origin.by_labels
        pending: Tensor | None = None  # the loss of the microbatch before, not yet backpropagated
        with self._logbook.recording(self._module):
            for task in self._engine.tasks(minibatch):
                if pending is not None:
                    self._backward(pending)
                item = self._forward(task, by_labels, *args, **kwargs)
                pending = None if item is None else item.loss
                if item is not None:
                    self._engine.ledger.add(item.weight / self._accumulated, item.counting)
                    sums.add(item)
                if pending is not None and minibatch.all_ranks is not None:
                    # A rank may help others only when its own work is done: nothing is left for Lightning.
                    self._backward(pending)
                    pending = None
        device = self._strategy.root_device
        if pending is None:
            pending = torch.zeros((), device=device, requires_grad=True)
        loss = cast(Tensor, _WithValue.apply(pending, sums.mean(device)))  # type: ignore[no-untyped-call]
        return {"loss": loss, **sums.extras}

    def _forward(self, task: Task, by_labels: bool, *args: Any, **kwargs: Any) -> Contribution | None:
        self._stopwatch.begin(task.detail)
        self._memory.begin(task.detail)
        # Counted before the step, which may take them out of the batch.
        labels = label_count(task.microbatch, self._shifts_labels) if by_labels else None
        self.leaves_out = CountsNothing(labels, task.weight)
        with random_numbers_of(task.detail, self._strategy.root_device), self._stopwatch.running():
            output = call_step(
                self._strategy, self._engine, "training_step", task.microbatch, *args, **kwargs
            )
        item = contribution(output, task.weight, Counting.PLANNED, labels)
        if item is not None and item.counting is Counting.EXACT:
            self.leaves_out = CountsNothing(weight=task.weight)
        self._logbook.weigh(task.weight if item is None else item.weight)
        return item

    def _backward(self, loss: Tensor) -> None:
        """Backpropagate as Lightning does: its hooks, the loss scale, and then `around_backward`."""
        self._more = True
        try:
            self._strategy.backward(loss / self._accumulated, self._strategy.optimizers[0])
        finally:
            self._more = False

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass, without Lightning's hooks before and after it."""
        manual = not self._module.automatic_optimization
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
        measured = [self._stopwatch.take(), self._memory.take(self.reliefs.take_reliefs())]
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
            ODCError: with the two ways to end a step.
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
