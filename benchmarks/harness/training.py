"""Trains combinations in turns, each on every rank at once, and keeps all measurements if something fails."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader

from benchmarks.command import QUIET, OptionError, prepare_output
from benchmarks.harness.lockstep import LockstepStrategy
from benchmarks.harness.options import AUTO, Combination
from benchmarks.harness.processes import PROCESS_BYTES, Placement, RankProcesses, Tell, check_memory, place
from benchmarks.harness.results import WARM_UP, MinibatchRecord, Run, Totals
from benchmarks.harness.workload import Workload
from lightning_odc.callbacks.idle.measurement import watch_for
from lightning_odc.callbacks.idle.sources import Watch
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.host_memory import gib
from lightning_odc.run.session import choose_policy
from lightning_odc.strategy.odc import ODCStrategy
from notebooks.support.models import BenchModule

if TYPE_CHECKING:
    from benchmarks.harness.report import Outcome

PRELOAD = ("lightning.pytorch", "benchmarks.harness.training")

CallbacksOf = Callable[[Combination, int], Sequence[Callback]]
"""More callbacks of a combination in a repetition."""


def run_train(outcome: Outcome, callbacks_of: CallbacksOf | None = None) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C."""
    check(outcome.workload)
    if outcome.options.output is not None:
        prepare_output(outcome.options.output)
    with outcome.cut:
        print(outcome.introduction, flush=True)
        train_all(outcome, callbacks_of)
    outcome.show()
    outcome.write_files()
    return outcome.cut.code


def check(workload: Workload) -> None:
    """What needs to look at devices, models, lengths and memory."""
    options = workload.options
    place(options.device, options.ranks)
    samples = options.ranks * options.samples_per_rank
    if samples > len(workload.samples):
        raise OptionError(
            f"a minibatch of {options.ranks} ranks x {options.samples_per_rank} samples is more than the "
            f"{len(workload.samples)} there are"
        )
    each = PROCESS_BYTES + workload.check()
    what = f"{options.ranks} ranks with {gib(each)} GiB each"
    check_memory(options.ranks * each, what, "fewer ranks, a smaller --model, or a shorter --max-length")


def train_all(outcome: Outcome, callbacks_of: CallbacksOf | None = None) -> None:
    """Fill the outcome's runs. A bar shows how many minibatches of all of them have ended."""
    options = outcome.options
    placement = outcome.placement
    minibatches = (WARM_UP + options.minibatches) * options.repetitions * len(options.runs)
    # Drawn when a minibatch ends, not by a thread that would run beside the measured work.
    progress = Progress(console=Console(stderr=True), auto_refresh=False, transient=True)
    with progress, RankProcesses(options.ranks, PRELOAD, placement.enter, placement.backend) as ranks:
        bar = progress.add_task("starting", total=minibatches)
        progress.refresh()
        for repetition, combination in itertools.product(range(options.repetitions), options.runs):
            nothing_yet: list[list[MinibatchRecord]] = [[] for _ in range(options.ranks)]
            run = Run(combination, repetition, nothing_yet, common_clock=not placement.gpus)
            outcome.runs.append(run)
            title = f"{outcome.name_of(combination)} {repetition + 1}/{options.repetitions}"

            def heard(rank: int, record: MinibatchRecord, run: Run = run, title: str = title) -> None:
                before = run.count
                run.ranks[rank].append(record)
                for index in range(before, run.count):
                    run.resolve(index)
                    progress.update(bar, advance=1, description=title, refresh=True)

            callbacks: Sequence[Callback] = ()
            if callbacks_of is not None:
                callbacks = callbacks_of(combination, repetition)
            run.totals = ranks.call(fit, outcome.workload, combination, callbacks, heard=heard)


# -- on a rank --------------------------------------------------------------------------------------------------------


def fit(
    rank: int,
    world_size: int,
    workload: Workload,
    combination: Combination,
    callbacks: Sequence[Callback] = (),
    *,
    tell: Tell,  # a function that takes the records
) -> Totals:
    """Train one combination on this rank; reports a `MinibatchRecord` after each minibatch."""
    placement = place(workload.options.device, world_size)
    _begin_memory(placement.devices[rank])
    loader: DataLoader[Any] | BalancedDataLoader
    if combination.policy == AUTO:
        loader = workload.plain_loader()
    else:
        loader = workload.loader(combination, rank)
    recorder = MinibatchRecorder(tell)
    all_callbacks = [recorder, *callbacks, *workload.callbacks(combination)]
    trainer = make_trainer(workload, combination, placement, all_callbacks)
    trainer.fit(workload.module(rank), loader)
    return recorder.totals


class MinibatchRecorder(Callback):
    """Reports every minibatch after it has ended."""

    def __init__(self, tell: Tell) -> None:
        self.totals = Totals()  # of this rank, after the fit
        self._tell = tell
        self._before: MinibatchRecord | None = None  # what was spent when the minibatch began
        self._loss = (0.0, 0)  # sum over tokens, and how many they are
        self._ended = 0.0
        self._watch = Watch(complete=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = watch_for(trainer, pl_module, waits=None)  # what the host sees
        self._watch.counting = True  # there is nothing but training

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._close(trainer, time.monotonic())
        self._before = _spent(trainer, time.monotonic())
        self._watch.begin_batch()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, BenchModule)
        self._loss = pl_module.take_loss()
        self._ended = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After the last minibatch there is no next start: its span ends with it.
        self._close(trainer, self._ended)
        self.totals.sees_waits = self._watch.complete
        self._watch.release()
        strategy = cast(ODCStrategy, trainer.strategy)
        self.totals.window_bytes = strategy.engine.window_bytes
        self.totals.traffic = asdict(strategy.engine.traffic)
        self.totals.policy = cast(Any, trainer.train_dataloader).recipe.policy
        self.totals.peak_bytes = _peak_bytes(strategy.root_device)

    def _close(self, trainer: Trainer, now: float) -> None:
        """End the running minibatch, if there is one, at ``now``."""
        before = self._before
        done = _spent(trainer, now)
        meetings = self._watch.take_meetings()
        done.meetings = self._watch.read(meetings)
        if before is None:
            return
        done.loss_sum, done.tokens = self._loss
        for cause in done.waits:
            done.waits[cause] -= before.waits.get(cause, 0.0)
        done.seconds -= before.seconds
        done.settling -= before.settling
        done.processor -= before.processor
        done.bytes_read -= before.bytes_read
        self._tell(done)


def _spent(trainer: Trainer, now: float) -> MinibatchRecord:
    """What this rank has spent up to now, from any beginning; only differences count."""
    engine = cast(ODCStrategy, trainer.strategy).engine
    return MinibatchRecord(
        now,
        {str(cause): seconds for cause, seconds in engine.waits.items()},
        loss_sum=0.0,
        tokens=0,
        settling=engine.settling,
        processor=time.process_time(),
        bytes_read=engine.traffic.bytes_read,
    )


def make_trainer(
    workload: Workload, combination: Combination, placement: Placement, callbacks: list[Callback]
) -> Trainer:
    """The trainer of one rank, whose process group is there already."""
    communication: Any = combination.communication
    make_strategy: Callable[..., ODCStrategy] = partial(ODCStrategy, communication=communication)
    if communication == "lockstep":
        make_strategy = LockstepStrategy
    balancing: dict[str, Any] = {"balance": None}
    if combination.policy == AUTO:
        # What ``strategy="odc"`` chooses, by its name: ``"auto"`` leaves samples of equal length alone, which a
        # control compares.
        choice = choose_policy(
            communication, placement.ranks, placement.devices[0].type, can_read=True, is_fixed=False
        )
        cost = workload.planned_cost(combination)
        balancing = {"balance": choice, "cost": cost, "max_tokens": workload.max_tokens}
    units: Any = workload.units
    strategy = make_strategy(
        parallel_devices=placement.devices,
        auto_wrap_policy=units,
        sharding_strategy="FULL_SHARD",
        hang_report_after=None,
        **balancing,
    )
    return Trainer(
        strategy=strategy,
        accelerator=placement.accelerator,
        precision=workload.options.precision,  # type: ignore[arg-type]
        max_steps=WARM_UP + workload.options.minibatches,
        callbacks=callbacks,
        plugins=[LightningEnvironment()],  # this machine alone, also inside a cluster's job
        use_distributed_sampler=False,
        **QUIET,
    )


def _begin_memory(device: torch.device) -> None:
    """Give back what earlier runs have freed, and reset the peak that the device or the kernel has counted."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Peak of the memory of a GPU, or of this process, without windows and files, which only grow during a run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kib = {"VmHWM": 0, "RssShmem": 0, "RssFile": 0}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, text = line.partition(":")
        if name in kib:
            kib[name] = int(text.split()[0])
    private = kib["VmHWM"] - kib["RssShmem"] - kib["RssFile"]
    return max(private, 0) * 1024
