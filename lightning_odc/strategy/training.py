"""Training from one optimizer step to the next on this rank: batches, what they log, how long they take, the settle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_odc import _compat
from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.data.rng import random_numbers_of
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy.logbook import LogBook, flush
from lightning_odc.strategy.precision import ODCPrecision, unit_of
from lightning_odc.strategy.stopwatch import Stopwatch
from lightning_odc.strategy.totals import Total
from lightning_odc.strategy.unroll import contribution, run_share


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
        self._has_optimizer = False
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
        self.loss_divisor()  # the others may ask for this rank's weight, also if it had no backward pass
        records = self._engine.settle({"logs": self._logbook.post(), "times": self._stopwatch.take()})
        logs = [record["logs"] for record in records]
        self._totals += self._logbook.merge(logs, own=self._module.global_rank)
        self._stopwatch.report([record["times"] for record in records])

    def step_in_hooks(self, optimizers: Iterable[Optimizer]) -> None:
        """End the step of a batch with manual optimization, if hooks of parameters step and no optimizer does.

        Otherwise ``step()`` of an optimizer settles and publishes.
        """
        if self._has_optimizer:
            return
        self._engine.reshard()
        shards = set(self._module.parameters())
        stepped = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        self._has_optimizer = not shards.isdisjoint(stepped)
        if not self._has_optimizer and any(map(_compat.gradient_hooks_of, shards)):
            self.settle()
            self.end_step()

    def end_step(self) -> None:
        """The optimizer has stepped: publish the parameters and log the values of the step."""
        self._engine.publish()
        self._has_said_weight = False
        totals, self._totals = self._totals, []
        if totals:
            with _compat.logging_as(self._module, "training_step"):
                flush(totals, self._module)
