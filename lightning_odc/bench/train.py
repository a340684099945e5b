"""``lightning-odc bench``: runs combinations in turns, and keeps all measurements if something fails."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_odc.bench import training
from lightning_odc.bench.devices import place
from lightning_odc.bench.options import Combination, TrainOptions
from lightning_odc.bench.processes import PROCESS_BYTES, Ranks, check_memory
from lightning_odc.bench.report import Outcome
from lightning_odc.bench.results import WARM_UP, MinibatchRecord, Run
from lightning_odc.bench.workload import Workload
from lightning_odc.console import OptionError, prepare_output
from lightning_odc.host_memory import gib

PRELOAD = ("lightning.pytorch", "lightning_odc.bench.training")

Advance = Callable[[str], None]
Watch = Callable[[Combination, int], Sequence[Callback]]


def run_train(outcome: Outcome, watch: Watch | None = None) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C."""
    check(outcome.workload)
    if outcome.options.output is not None:
        prepare_output(outcome.options.output)
    with outcome.cut:
        outcome.introduce()
        train_all(outcome, watch)
    outcome.show()
    outcome.write_files()
    return outcome.cut.code


def train_all(outcome: Outcome, watch: Watch | None = None) -> None:
    """Fill the outcome's runs."""
    options, where = outcome.options, outcome.placement
    with _progress(options) as advance, Ranks(options.ranks, PRELOAD, where.enter, where.backend) as ranks:
        for repetition, combination in itertools.product(range(options.repetitions), options.runs):
            nothing_yet: list[list[MinibatchRecord]] = [[] for _ in range(options.ranks)]
            run = Run(combination, repetition, nothing_yet, common_clock=not where.gpus)
            run.estimates = outcome.workload.estimated_idle(combination, WARM_UP + options.minibatches)
            outcome.runs.append(run)
            title = f"{outcome.name_of(combination)} {repetition + 1}/{options.repetitions}"
            heard = partial(_hear, run, partial(advance, title))
            callbacks = watch(combination, repetition) if watch else ()
            run.totals = ranks.call(training.fit, outcome.workload, combination, callbacks, heard=heard)


def _hear(run: Run, advance: Callable[[], None], rank: int, record: MinibatchRecord) -> None:
    """A rank has ended a minibatch."""
    before = run.count
    run.ranks[rank].append(record)
    for index in range(before, run.count):
        run.resolve(index)
        advance()


def check(workload: Workload) -> None:
    """What needs to look at devices, models, lengths and memory."""
    options = workload.options
    place(options.device, options.ranks)
    needed = options.ranks * options.samples_per_rank
    if needed > len(workload.samples):
        raise OptionError(
            f"a minibatch of {options.ranks} ranks x {options.samples_per_rank} samples is more than the "
            f"{len(workload.samples)} there are"
        )
    each = PROCESS_BYTES + workload.check()
    what = f"{options.ranks} ranks with {gib(each)} GiB each"
    check_memory(options.ranks * each, what, "fewer ranks, a smaller --model, or a shorter --max-length")


@contextlib.contextmanager
def _progress(options: TrainOptions) -> Iterator[Advance]:
    """One bar over everything; yields the function that moves it by one minibatch."""
    total = (WARM_UP + options.minibatches) * options.repetitions * len(options.runs)
    columns: list[Any] = [BarColumn(24), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn()]
    columns.append(TextColumn("{task.description}"))
    # Drawn when a minibatch ends, not by a thread that would run beside the measured work.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        progress.refresh()
        yield lambda title: progress.update(task, advance=1, description=title, refresh=True)
