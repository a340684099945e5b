"""A training step on this rank: microbatches, their weights and times, and the settle.

The times are for a cost that learns: wall time less the engine's measured waits, in forward and backward together. Data
loading, the optimizer and logging are not in it. What was measured travels with the record that ends an optimizer step.

Note [The last backward belongs to Lightning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning calls ``training_step`` once per batch, then ``zero_grad``, then ``backward`` once. For a minibatch the
strategy runs all microbatches inside that one ``training_step`` call and backpropagates all but the last itself; the
last one's loss is returned with its graph. It is returned *with the value* of the whole share, so that progress
bars, ``on_train_batch_end`` and loggers see the minibatch. A share without microbatches returns a zero, and so does
one whose ranks help each other: there, no backward pass is left for later.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_odc import _compat
from lightning_odc.data.lagged_cost import LaggedCost, Measurement
from lightning_odc.data.minibatch import Detail, Minibatch, Task
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.engine.base import Counting, Engine
from lightning_odc.errors import DisagreementError, ODCError
from lightning_odc.strategy.logbook import LogBook, flush
from lightning_odc.strategy.precision import ODCPrecision, unit_of
from lightning_odc.strategy.totals import Total

_MOST_SAMPLES = 2000
"""Of a rank, in one record: a record has 64 KiB, and so many lengths tell a cost all it can learn in one step."""


class Stopwatch:
    """Runs while a rank works, if the loader wants to know.

    Args:
        waits: seconds that this rank has waited for others so far.
        device: whose work is waited for before the clock is read.
    """

    def __init__(self, waits: Callable[[], float], device: torch.device) -> None:
        self._waits = waits
        self._device = device
        self._learning: LaggedCost | None = None
        self._number = 0
        self._measured: list[tuple[int, list[int], float]] = []
        self._is_set = False

    def open(self, share: Minibatch) -> None:
        """A share of a minibatch begins."""
        self._is_set = False
        if share.origin is not None and share.origin.cost is not None:
            self._learning, self._number = share.origin.cost, share.origin.number

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        self._is_set = self._learning is not None and detail is not None
        if self._is_set and detail is not None:
            self._measured.append((self._number, detail.lengths, 0.0))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what belongs to the current microbatch."""
        if not self._is_set:
            yield
            return
        begin = self._now()
        yield
        number, lengths, seconds = self._measured.pop()
        self._measured.append((number, lengths, seconds + self._now() - begin))

    def take(self) -> list[Measurement]:
        """What was measured since the last call, at most 2000 samples of it, evenly chosen; then start anew."""
        measured, self._measured = self._measured, []
        self._is_set = False
        samples = sum(len(lengths) for _, lengths, _ in measured)
        return [row for row in measured[:: max(-(-samples // _MOST_SAMPLES), 1)] if row[2] > 0]

    def report(self, by_rank: Sequence[Sequence[Measurement]]) -> None:
        """Tell the loader what all ranks measured."""
        if self._learning is not None:
            self._learning.observe(by_rank)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._waits()


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides].

    Attributes:
        loss: the weighted (or summed) loss, with its graph; at least in fp32, which has room for weights and sums.
        weight: its share of the denominator.
        extras: what else ``training_step`` returned.
        counting: what the weight counts.
    """

    loss: Tensor
    weight: float | Tensor
    extras: dict[str, Any]
    counting: Counting


@dataclass
class _Totals:
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


def contribution(output: Any, weight: float, counting: Counting = Counting.MEAN) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``.

    Args:
        output: the returned value; a ``"loss"`` beside ``"num_items"`` is a sum over items, else a mean.
        weight: of the microbatch, where ``num_items`` does not say it exactly.
        counting: what that weight counts.

    Raises:
        TypeError: if it is something else.
    """
    if output is None:
        return None
    if isinstance(output, Tensor):
        return Contribution(_wide(output) * weight, weight, {}, counting)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        extras = {key: value for key, value in output.items() if key != "loss"}
        if "num_items" in output:
            counts = float(weight > 0)  # a microbatch of weight zero only keeps ranks together
            items = _checked(output["num_items"]) * counts
            return Contribution(_wide(output["loss"]) * counts, items, extras, Counting.EXACT)
        return Contribution(_wide(output["loss"]) * weight, weight, extras, counting)
    raise TypeError(
        "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
        f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
    )


def run_share(
    minibatch: Minibatch,
    *,
    engine: Engine,
    logbook: LogBook,
    step: Callable[[Task], Any],
    backward: Callable[[Tensor], None],
    normalize: int,
    device: torch.device,
) -> dict[str, Any]:
    """Run a rank's share of a minibatch; see Note [The last backward belongs to Lightning].

    Args:
        minibatch: the share.
        engine: told about every microbatch and its weight.
        logbook: told how much what was logged counts.
        step: the user's ``training_step`` on one microbatch.
        backward: backpropagates a loss that is not the last.
        normalize: ``accumulate_grad_batches``, by which Lightning divides the loss it is given.
        device: where a share without microbatches makes its zero.

    Returns:
        ``{"loss": ...}`` plus, for everything else that ``training_step`` returned, the list over microbatches.
    """
    engine.begin_minibatch(len(minibatch), minibatch.plan)
    totals = _Totals()
    pending: Tensor | None = None
    helping = minibatch.all_ranks is not None
    for task in engine.tasks(minibatch):
        if pending is not None:
            backward(pending / normalize)
        pending = None
        item = contribution(step(task), task.weight, Counting.PLANNED)
        logbook.weigh(task.weight if item is None else item.weight)
        if item is None:
            continue
        engine.ledger.add(item.weight / normalize, item.counting)
        totals.add(item)
        pending = item.loss
        if helping:  # a rank may take over work only when its own is done: no backward pass is left for later
            backward(pending / normalize)
            pending = None
    value = totals.mean(device)
    if pending is None:
        pending = torch.zeros((), device=device, requires_grad=True)
    loss = cast(Tensor, _WithValue.apply(pending, value))  # type: ignore[no-untyped-call]
    return {"loss": loss, **totals.extras}


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


class Training:
    """One fit.

    Args:
        module: that is trained.
        engine: of its model.
        device: on which it is trained.
        fp16: the plugin of a model that computes in fp16, else ``None``.
    """

    def __init__(
        self, module: LightningModule, engine: Engine, device: torch.device, fp16: ODCPrecision | None = None
    ) -> None:
        self._module = module
        self._engine = engine
        self._device = device
        self._logbook = LogBook()
        self._stopwatch = Stopwatch(lambda: sum(engine.waits.values()), device)
        self._totals: list[Total] = []
        self._more = False
        self._has_stepped = False  # an optimizer of Lightning
        self._has_settled = False  # in this batch
        self._hooks_wait = False
        self._fp16 = fp16
        self._has_said_weight = False

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

    def begin_batch(self, kind: str) -> None:
        """A batch of this kind (for messages) begins.

        What Lightning's ``zero_grad`` does at the first batch of a step must reach all ranks' accumulators.
        """
        trainer = self._module.trainer
        if trainer.fit_loop.batch_idx == 0:
            self.check_hooks_ran()
        self._has_settled = False
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not stops_anyway
        opens_window = self._module.automatic_optimization and is_first
        self._engine.begin_batch(opens_window=opens_window, kind=kind, is_last=is_last)

    def count(self, output: Any) -> None:
        """Enter what ``training_step`` returned for a plain batch into the books."""
        item = contribution(output, 1.0)
        if item is not None:
            weight = item.weight / self._module.trainer.accumulate_grad_batches
            self._engine.ledger.add(weight, item.counting)

    def run_share(
        self, share: Minibatch, step: Callable[[Any], Any], backward: Callable[[Tensor], Any]
    ) -> dict[str, Any]:
        """Run a rank's microbatches; see `run_share` of `unroll`.

        Args:
            share: the microbatches.
            step: the user's ``training_step`` on one of them.
            backward: backpropagates a loss.
        """

        def run(task: Task) -> Any:
            self._stopwatch.begin(task.detail)
            with random_numbers_of(task.detail, self._device), self._stopwatch.running():
                return step(task.microbatch)

        def backward_and_go_on(loss: Tensor) -> None:
            self._more = True
            try:
                backward(loss)
            finally:
                self._more = False

        self._stopwatch.open(share)
        with self._logbook.recording(self._module):
            return run_share(
                share,
                engine=self._engine,
                logbook=self._logbook,
                step=run,
                backward=backward_and_go_on,
                normalize=self._module.trainer.accumulate_grad_batches,
                device=self._device,
            )

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass."""
        manual = not self._module.automatic_optimization
        context = self._engine.backward(manual=manual, more=self._more)
        with context, self._engine.traced("backward"), self._stopwatch.running():
            yield

    def loss_divisor(self) -> float:
        """What the losses of this step are divided by; see Note [Weights under fp16]."""
        if self._fp16 is None or not self._engine.ledger.is_weighted:
            return 1.0
        if self._fp16.weight_unit is None and not self._has_said_weight:
            self._has_said_weight = True  # once per step, or ranks would not meet
            ledger, accumulated = self._engine.ledger, self._module.trainer.accumulate_grad_batches
            weight = float(ledger.weight) * accumulated / max(ledger.microbatches, 1)
            self._fp16.weight_unit = unit_of(self._engine.exchange("first weights under fp16", weight))
        self._engine.weight_unit = self._fp16.weight_unit or 1.0
        return self._engine.weight_unit

    def settle(self) -> None:
        """Complete the gradients, once per optimizer step."""
        if self._engine.settled:
            return
        self._has_settled, self._hooks_wait = True, False
        self.loss_divisor()  # the others may ask for this rank's weight, also if it had no backward pass
        records = self._engine.settle(self._logbook.post(), self._stopwatch.take())
        self._totals += self._logbook.merge([record.logs for record in records], own=self._module.global_rank)
        self._stopwatch.report([record.times for record in records])

    def step_in_hooks(self, optimizers: Iterable[Optimizer]) -> None:
        """End the step of a batch with manual optimization, if hooks of parameters step and no optimizer does.

        Otherwise ``step()`` of an optimizer settles and publishes.
        """
        if self._has_stepped or self._has_settled:
            return
        self._engine.reshard()
        shards = set(self._module.parameters())
        if not any(map(_compat.gradient_hooks_of, shards)):
            return
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
