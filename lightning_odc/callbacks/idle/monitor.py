"""`DeviceIdleMonitor`: Lightning's hooks translated into a measurement, and the measurement into logged values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_odc.arguments import Count, checked
from lightning_odc.callbacks.idle.measurement import IdleMeasurement
from lightning_odc.callbacks.idle.summary import IdleSummary, Logged
from lightning_odc.data.convert import only
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.errors import ODCError
from lightning_odc.strategy.odc import ODCStrategy


@checked
class DeviceIdleMonitor(Callback):
    """Logs how long devices waited, for what, and how unevenly they were loaded, per optimizer step and per epoch.

    At the end of each epoch it prints one line: waiting, padding, samples, tokens, FLOPs per second and peak memory.

    Values, each also with the suffix ``_epoch``; seconds are means over ranks, per optimizer step:

    - ``idle/fraction``, ``idle/worst_fraction``, ``idle/worst_rank``: waiting as a part of the time, over all ranks,
      and for the rank that waited most;
    - ``idle/<cause>_seconds``: ``read``, ``lock``, ``settle``, ``network``, ``collective``, ``within_group``,
      ``broadcast``, ``data``;
    - ``idle/within_group_fraction``: the part of ``idle/fraction`` in collectives of ranks that compute one sample;
    - ``busy_seconds``, ``step_seconds``; ``imbalance``, the busiest rank's busy time over the mean;
    - ``gpu/<part>_seconds``: ``kernel``, ``collective``, ``empty``, if steps on GPUs are profiled;
    - ``microbatches`` of all ranks in a step, ``samples_per_second``;
    - ``computed_tokens_per_second`` with padding; ``tokens_per_second`` without it, and ``padding/fraction``, its part
      of the computed tokens, if a mask, labels or the bounds of packed rows tell what is padding;
    - ``peak_memory_bytes``, of the rank that has held most since it started: by torch's allocator on GPUs, else on the
      host;
    - per epoch, ``model_flops_per_second``: 6 per trainable parameter and real token, 4 per frozen one;
      ``model_flops_fraction``, its part of the devices' peak in bf16, on GPUs that Lightning's ``get_available_flops``
      knows;
    - with a `BalancedDataLoader`, by the latest step: ``memory/max_tokens``;
      ``memory/ran_out``, microbatches so far that ran out of memory.

    The strategy decides which of them can be measured. The others are left out, never guessed. The page *Idle time* of
    the documentation has the list. No rank waits in a step for a message of the monitor: ranks send one per row that is
    logged, in a thread. The row is logged when all have come, usually one step later, under the number of its own step.

    Args:
        every_n_steps: Number of optimizer steps whose mean is logged; by default ``Trainer(log_every_n_steps=...)``.
        per_rank: Whether to log the values of single ranks, too, as ``..._rank0``, ``..._rank1`` and so on.
        progress_bar: Show ``idle/fraction`` (or data waits if it is not measured) in the progress bar.

    Attributes:
        last_step: The values that were last logged for steps, even without a logger.
        last_epoch: The values of the last epoch.
        complete: Whether all waiting for other ranks is measured under this strategy.

    Raises:
        ValueError: A number of steps below 1.
    """

    def __init__(
        self, *, every_n_steps: Count | None = None, per_rank: bool = True, progress_bar: bool = False
    ) -> None:
        self.every_n_steps = every_n_steps
        self.per_rank = per_rank
        self.progress_bar = progress_bar
        self.complete = False
        self.last_step: Logged = {}
        self.last_epoch: Logged = {}
        self._measurement: IdleMeasurement | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_step = {}
        self.last_epoch = {}
        with self._harmless(trainer):
            self._measurement = IdleMeasurement(trainer, pl_module, self._interval(trainer))
        self.complete = True
        self._look_for_gaps(trainer)
        if self.complete and self._measurement.watch.samples:
            rank_zero_info(
                "DeviceIdleMonitor profiles single steps, for about 1 % of the time: on GPUs, only the records of "
                "kernels show which rank waits in a collective. Meanwhile no other torch.profiler can run."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._measurement is not None:
            self._measurement.begin_batch(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._measurement is not None:
            self._measurement.watch.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._measurement is not None:
            self._measurement.watch.after_backward()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        measurement = self._measurement
        if measurement is None:
            return
        with self._harmless(trainer):
            if not measurement.end_batch(trainer.global_step):
                return
            logged = self._log_steps(trainer, measurement, measurement.receive())
            name = "idle/data_seconds"
            if self.complete:
                name = "idle/fraction"
            if logged and self.progress_bar and name in self.last_step:
                pl_module.log(name, self.last_step[name], prog_bar=True, logger=False, batch_size=1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._measurement is not None:
            with self._harmless(trainer):
                self._measurement.pause()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measurement = self._measurement
        if measurement is None:
            return
        with self._harmless(trainer):
            measurement.pause()
            self._log_steps(trainer, measurement, measurement.receive(wait=True))
            epoch, measurement.epoch = measurement.epoch, IdleSummary()
            values = measurement.values(epoch, self.per_rank) | _memory_values(trainer)
            _add_flops(trainer, pl_module, values)
            self.last_epoch = {f"{name}_epoch": value for name, value in values.items()}
            self._write(trainer, {**self.last_epoch, "epoch": trainer.current_epoch}, trainer.global_step - 1)
            where = f"epoch {trainer.current_epoch}"
            if isinstance(trainer.strategy, ODCStrategy):
                where += f", {trainer.strategy.communication}"
            rank_zero_info(f"DeviceIdleMonitor, {where}: {_in_words(values)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)

    def _interval(self, trainer: Trainer) -> int:
        """Optimizer steps in a row that is logged; 0 for no rows."""
        return self.every_n_steps or cast(Any, trainer).log_every_n_steps

    def _log_steps(self, trainer: Trainer, measurement: IdleMeasurement, steps: Iterator[int]) -> bool:
        """Log whenever enough steps have come together; returns whether they ever had."""
        interval = self._interval(trainer)
        logged = False
        for step in steps:
            if interval and measurement.recent.steps >= interval:
                self._look_for_gaps(trainer)
                recent, measurement.recent = measurement.recent, IdleSummary()
                self.last_step = measurement.values(recent, self.per_rank) | _memory_values(trainer)
                self._write(trainer, self.last_step, step)
                logged = True
        return logged

    def _write(self, trainer: Trainer, values: Logged, step: int) -> None:
        """Hand the values to every logger. One that fails does not end the training."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            try:
                logger.log_metrics(dict(values), step=step)
            except Exception as error:
                rank_zero_warn(
                    f"{type(logger).__name__} cannot log what DeviceIdleMonitor measures: "
                    f"{type(error).__name__}: {error}"
                )

    def _look_for_gaps(self, trainer: Trainer) -> None:
        """Say once what is not measured."""
        if self._measurement is not None and self.complete and not self._measurement.complete:
            strategy = trainer.strategy
            where = f"under {type(strategy).__name__} on {strategy.root_device.type}"
            if why := self._measurement.watch.why:
                where += f" ({why})"
            rank_zero_warn(
                f"DeviceIdleMonitor cannot see all waiting for other ranks {where}: it logs throughput and waiting for "
                "data, and no idle fraction."
            )
        self.complete = self._measurement is not None and self._measurement.complete

    @contextmanager
    def _harmless(self, trainer: Trainer) -> Iterator[None]:
        """An error of the measurement ends the measurement, not the training; what a peer did is passed on."""
        try:
            yield
        except ODCError:
            raise
        except RuntimeError as error:
            rank_zero_warn(f"DeviceIdleMonitor does nothing under {type(trainer.strategy).__name__}: {error}")
            self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        measurement, self._measurement = self._measurement, None
        if measurement is not None:
            measurement.release(trainer)


#: What the line of an epoch ends with: names of values, in which unit, and its name.
_FIGURES = {
    "samples_per_second": (1, "samples/s"),
    "tokens_per_second": (1, "tokens/s"),
    "model_flops_per_second": (1e12, "TFLOP/s"),
    "model_flops_fraction": (0.01, "% of the devices' peak"),
    "peak_memory_bytes": (1e9, "GB of memory at most"),
}


def _in_words(values: Logged) -> str:
    """What happened in an epoch, for people."""
    waiting = "waiting for other ranks is not measured"
    if "idle/fraction" in values:
        waiting = f"ranks waited {100 * values['idle/fraction']:.3g} % of the time"
    padding = "how many tokens were padding is unknown"
    if "padding/fraction" in values:
        padding = f"{100 * values['padding/fraction']:.3g} % of the computed tokens were padding"
    figures = [f"{values[name] / one:.4g} {unit}" for name, (one, unit) in _FIGURES.items() if name in values]
    return f"{waiting}; {padding}; {', '.join(figures)}"


def _add_flops(trainer: Trainer, module: LightningModule, values: Logged) -> None:
    """What the model computes for real tokens, without attention, and its part of what the devices can do at most."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy) and not isinstance(strategy, ODCStrategy):
        return  # of FSDP1: a parameter counts what this rank has of it
    if "tokens_per_second" not in values:
        return
    # Multiplications and additions: two in the forward pass, two for the gradient of what goes in, two for its own.
    per_token = sum((4 + 2 * one.requires_grad) * one.numel() for one in module.parameters())
    flops = per_token * values["tokens_per_second"]
    values["model_flops_per_second"] = flops
    peak = get_available_flops(strategy.root_device, torch.bfloat16)
    if peak:
        values["model_flops_fraction"] = flops / (peak * trainer.world_size)


def _memory_values(trainer: Trainer) -> Logged:
    loader = only(trainer.train_dataloader)
    if isinstance(loader, BalancedDataLoader):
        return loader.memory_values
    return {}
