"""``lightning-odc bench train``: runs combinations in turns, and keeps all measurements if something fails."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_odc.bench import training
from lightning_odc.bench.devices import place
from lightning_odc.bench.emulation import seconds_per_cost
from lightning_odc.bench.lengths import Samples
from lightning_odc.bench.models import count_parameters, emulated_cost, find_config
from lightning_odc.bench.options import Combination, TrainOptions
from lightning_odc.bench.processes import PROCESS_BYTES, CutShort, Ranks, check_memory
from lightning_odc.bench.report import Outcome, introduction
from lightning_odc.bench.results import WARM_UP, MinibatchRecord, Run
from lightning_odc.console import OptionError, prepare_output
from lightning_odc.host_memory import gib

PRELOAD = ("lightning.pytorch", "lightning_odc.bench.training")
_STATE_BYTES = 4 * (4 + 2)  # fp32: parameter, gradient, two moments; published shard and accumulator
_SILENT_MINIBATCHES = 2

Advance = Callable[[str], None]
Watch = Callable[[Combination, int], Sequence[Callback]]


def run_train(options: TrainOptions) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C.

    Raises:
        OptionError: the options cannot work.
    """
    options = options.filled()
    check(options)
    if options.output is not None:
        prepare_output(options.output)
    print(introduction(options), flush=True)
    outcome = measure(options)
    print(outcome.text)
    outcome.write_files()
    return outcome.code


def measure(options: TrainOptions) -> Outcome:
    """Train every combination in turns. A rank that fails and Ctrl-C end it: with a line on stderr and in the outcome.

    Args:
        options: The options, filled in and checked.
    """
    outcome = Outcome(options)
    with CutShort() as cut:
        train_all(outcome)
    outcome.code, outcome.failure, outcome.details = cut.code, cut.failure, cut.details
    return outcome


def train_all(outcome: Outcome, watch: Watch | None = None) -> None:
    """Fill the outcome's runs.

    Args:
        outcome: The outcome, with the options filled in and checked.
        watch: Callbacks that every rank gets in addition, by combination and repetition.

    Raises:
        RankFailedError: a rank raised or ended.
        KeyboardInterrupt: Ctrl-C; the ranks have ended.
    """
    options = outcome.options
    assert options.ranks is not None
    where = outcome.placement
    with _progress(options) as advance, Ranks(options.ranks, PRELOAD, where.enter, where.backend) as ranks:
        _run_all(outcome, watch, ranks, advance)


def _run_all(outcome: Outcome, watch: Watch | None, ranks: Ranks, advance: Advance) -> None:
    options = outcome.options
    assert options.runs is not None
    count = WARM_UP + options.minibatches
    if options.emulate:
        outcome.overhead, outcome.seconds_per_cost = _calibrate(options, ranks, advance)
    for repetition in range(options.repetitions):
        for combination in options.runs:
            nothing_yet: list[list[MinibatchRecord]] = [[] for _ in range(ranks.world_size)]
            run = Run(combination, repetition, nothing_yet, common_clock=not outcome.placement.gpus)
            run.estimates = training.estimated_idle(options, combination, count)
            if options.emulate and not combination.changes_plans:
                bounds = training.planned_bounds(options, combination, count)
                run.bounds = [cost * outcome.seconds_per_cost for cost in bounds]
            outcome.runs.append(run)
            title = f"{combination} {repetition + 1}/{options.repetitions}"
            callbacks = watch(combination, repetition) if watch else ()
            _train(run, options, outcome.seconds_per_cost, ranks, partial(advance, title), callbacks)


def _train(
    run: Run,
    options: TrainOptions,
    seconds_per_cost: float,
    ranks: Ranks,
    advance: Callable[[], None],
    callbacks: Sequence[Callback] = (),
) -> None:
    """Fill a run, minibatch by minibatch."""
    told = (options, run.combination, seconds_per_cost, callbacks)
    run.totals = ranks.call(training.fit, *told, heard=partial(_hear, run, advance))


def _hear(run: Run, advance: Callable[[], None], rank: int, record: MinibatchRecord) -> None:
    """A rank has ended a minibatch."""
    before = run.count
    run.ranks[rank].append(record)
    for index in range(before, run.count):
        run.resolve(index)
        advance()


def _calibrate(options: TrainOptions, ranks: Ranks, advance: Advance) -> tuple[float, float]:
    """Seconds of a minibatch in which no rank sleeps, and the unit of time: see Note [Emulated devices]."""
    assert options.runs is not None
    short = replace(options, minibatches=_SILENT_MINIBATCHES)
    overheads = []
    for combination in options.runs:
        run = Run(combination, 0, [[] for _ in range(ranks.world_size)])
        _train(run, short, 0.0, ranks, partial(advance, f"{combination} without sleep"))
        overheads.append(statistics.median(run.seconds(index) for index in run.timed))
    cost = training.mean_bound(options, options.runs[-1], WARM_UP + options.minibatches)
    return max(overheads), seconds_per_cost(max(overheads), cost, options.seconds_per_minibatch)


def check(options: TrainOptions, ranks: str = "--ranks", model: str = "a smaller --model") -> None:
    """What needs to look at devices, models, lengths and memory.

    Args:
        options: The options, filled.
        ranks: The option that says how many ranks there are, for messages.
        model: What a user writes to need less memory, for messages.

    Raises:
        OptionError: devices, the model, the lengths or memory do not suffice for them.
    """
    assert options.ranks is not None
    assert options.model is not None
    assert options.samples_per_rank is not None
    place(options.device, options.ranks)
    samples = training.cached_samples(options)
    needed = options.ranks * options.samples_per_rank
    if needed > len(samples):
        raise OptionError(
            f"a minibatch of {options.ranks} ranks x {options.samples_per_rank} samples is more than the "
            f"{len(samples)} there are"
        )
    each = PROCESS_BYTES
    if options.emulate:
        emulated_cost(options.model)
    else:
        each += _check_model(options, options.model, samples)
    what = f"{ranks} {options.ranks} with {gib(each)} GiB each"
    check_memory(options.ranks * each, what, f"fewer {ranks}, {model}, or a shorter --max-length")


def _check_model(options: TrainOptions, model: str, samples: Samples) -> int:
    """Whether the model can read the samples; returns the bytes of host memory that it takes on one rank.

    These are its state and its logits; of a model on a GPU, its parameters before they go there.
    """
    assert options.ranks is not None
    longest = int(samples.lengths.max())
    config = find_config(model, longest)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise OptionError(f"--max-length {longest} is more than the {limit} positions of --model {model}")
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and vocabulary < samples.vocabulary:
        raise OptionError(
            f"--model {model} knows {vocabulary} tokens, and the samples have {samples.vocabulary}: write "
            f'"vocab_size": {samples.vocabulary} or more'
        )
    parameters = count_parameters(model, config)
    whole = parameters * 4  # once, before it is sharded
    if options.device == "cuda":
        return whole
    state = parameters * _STATE_BYTES // options.ranks + whole
    if any(run.communication == "ddp" for run in options.runs or ()):
        state = parameters * 4 * 5
    most_tokens = int(max(options.packing_ratio, options.samples_per_microbatch) * longest)
    return state + 3 * 4 * most_tokens * (vocabulary or 0)


@contextlib.contextmanager
def _progress(options: TrainOptions) -> Iterator[Advance]:
    """One bar over everything; yields the function that moves it by one minibatch."""
    assert options.runs is not None
    each = (WARM_UP + options.minibatches) * options.repetitions
    silent = (WARM_UP + _SILENT_MINIBATCHES) * options.emulate
    columns: list[Any] = [BarColumn(24), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn()]
    columns.append(TextColumn("{task.description}"))
    # Drawn when a minibatch ends, not by a thread that would run beside the measured work.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=(each + silent) * len(options.runs))
        progress.refresh()
        yield lambda title: progress.update(task, advance=1, description=title, refresh=True)
