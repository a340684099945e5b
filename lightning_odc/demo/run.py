"""Runs the demo: the same minibatches under every mode, in turns, through Lightning's own ``Trainer``.

Lightning starts the other ranks by running the command again with ``LOCAL_RANK`` in the environment, so
every rank comes through :func:`run_demo`; only the first one shows and writes anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_odc import ODCStrategy
from lightning_odc.callbacks import TimelineRecorder
from lightning_odc.demo.corpus import Corpus, Plan, equal_pieces, plan_minibatches, read_corpus
from lightning_odc.demo.data import DemoData
from lightning_odc.demo.measure import Recorder
from lightning_odc.demo.model import SHARDED_LAYERS, ByteModel
from lightning_odc.demo.options import DemoOptions, Mode, available_cores, prepare_output
from lightning_odc.demo.outcome import Outcome, timeline_folder
from lightning_odc.demo.processes import OneMachine, other_ranks
from lightning_odc.demo.result import WARM_UP, Repetition


def run_demo(options: DemoOptions) -> int:
    """Run the demo as one of its ranks; the first rank prints the report and writes the files.

    To be called by a command that does nothing else, as ``lightning-odc demo`` is, because Lightning runs
    the same command again for the other ranks.

    Returns:
        The exit code: 0, or 1 if the losses of the modes differ by more than rounding explains.

    Raises:
        OptionError: the output folder cannot be written to.
        CorpusError: the text does not suffice for the options.
        KeyboardInterrupt: Ctrl-C; the processes that were started have ended.
    """
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    console = Console(quiet=not first, highlight=False, soft_wrap=True)
    if first:
        prepare_output(options.output)
    _quieten()
    torch.set_num_threads(threads_per_rank(options))
    corpus, plan = make_data(options)
    outcome = Outcome(options, corpus, threads_per_rank(options))
    outcome.show_data(console)
    with _progress_bar(options, shown=first) as advance:
        outcome.repetitions = train_all(options, corpus, plan, advance)
    if not first:
        return 0
    outcome.write_files()
    outcome.show_results(console)
    return 0 if outcome.losses_agree else 1


def threads_per_rank(options: DemoOptions) -> int:
    """The cores divided among the ranks. Lightning's launcher does this in the first process alone."""
    return max(1, available_cores() // options.devices)


def make_data(options: DemoOptions) -> tuple[Corpus, Plan]:
    """The samples, and which of them each rank trains on in each minibatch; the same on every rank."""
    corpus = read_corpus(options.max_length)
    if options.equal_lengths:
        corpus = equal_pieces(corpus)
    plan = plan_minibatches(
        corpus.lengths,
        ranks=options.devices,
        samples_per_rank=options.samples_per_rank,
        minibatches=WARM_UP + options.minibatches,
        seed=options.seed,
        longest_first=options.order == "sorted",
    )
    return corpus, plan


def train_all(
    options: DemoOptions, corpus: Corpus, plan: Plan, advance: Callable[[str], None]
) -> list[Repetition]:
    """Train every repetition of every mode, the modes in turns so that a slow minute hits all of them.

    ``advance`` is called after each minibatch with a line on where the run is.
    """
    repetitions = []
    with other_ranks() as others:
        for number in range(1, options.repetitions + 1):
            for mode in options.communication:
                title = f"{mode} {number}/{options.repetitions}"
                recorder = Recorder(partial(_tell, advance, title))
                timeline = timeline_recorder(options, mode) if number == options.repetitions else None
                trainer = make_trainer(options, mode, recorder, timeline)
                others.watch(trainer)
                fit(trainer, options, DemoData(corpus, plan, options.samples_per_microbatch), recorder)
                recorded = None if timeline is None else timeline.timeline
                repetitions.append(Repetition(mode, recorder.ranks, recorded))
    return repetitions


def _tell(advance: Callable[[str], None], title: str, loss: float) -> None:
    """One more minibatch is done."""
    advance(f"{title}  loss {loss:.3f}")


def timeline_recorder(options: DemoOptions, mode: Mode) -> TimelineRecorder:
    """Records the last minibatch alone, the same one under every mode."""
    last = WARM_UP + options.minibatches - 1
    return TimelineRecorder(timeline_folder(options.output, mode), (last, last))


def make_trainer(
    options: DemoOptions, mode: Mode, recorder: Recorder, timeline: TimelineRecorder | None = None
) -> Trainer:
    """A trainer as a user would write it, with everything switched off that is not being measured."""
    return Trainer(
        strategy=ODCStrategy(communication=mode, auto_wrap_policy=SHARDED_LAYERS),
        accelerator="cpu",
        devices=options.devices,
        precision=options.precision,
        max_epochs=1,
        callbacks=[recorder] if timeline is None else [recorder, timeline],
        plugins=[OneMachine()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(trainer: Trainer, options: DemoOptions, data: DemoData, recorder: Recorder) -> None:
    """One repetition, from the same initial weights every time."""
    model = ByteModel(
        layers=options.layers,
        hidden_size=options.hidden_size,
        max_length=options.max_length,
        seed=options.seed,
    )
    try:
        trainer.fit(model, data)
    except SystemExit:
        if recorder.interrupted:
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _progress_bar(options: DemoOptions, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """One bar over all modes and repetitions; yields the function that moves it by one minibatch."""
    console = Console(stderr=True, quiet=not shown)
    where = TextColumn("{task.description}")
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), where)
    # Drawn when a minibatch ends, not by a thread that would run beside the measured work.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        minibatches = (WARM_UP + options.minibatches) * options.repetitions * len(options.communication)
        task = progress.add_task("starting", total=minibatches)
        progress.refresh()

        def advance(description: str) -> None:
            progress.update(task, advance=1, description=description, refresh=True)

        yield advance


def _quieten() -> None:
    """Lightning's hints are for the reader of a training script, which this is not."""
    # Both names of Lightning: where both packages are installed, the last one imported gets all messages.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
