"""The demo: a preset of ``lightning-odc bench train``, with a friendly report and a timeline of every mode."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_odc.bench import train
from lightning_odc.bench.corpus import Corpus, read_samples
from lightning_odc.bench.options import AUTO, SHUFFLED, Combination, TrainOptions, available_cores
from lightning_odc.bench.processes import RankFailedError, threads_per_rank
from lightning_odc.bench.report import BUSY_LOAD, LOSS_TOLERANCE, Outcome, length_facts
from lightning_odc.bench.results import WARM_UP, Split, loss_difference
from lightning_odc.callbacks import TimelineRecorder
from lightning_odc.console import prepare_output
from lightning_odc.demo.options import DemoOptions, Mode, Order
from lightning_odc.demo.result import Result, mode_of, timeline_folder

BINS = 10
SPREAD = 0.15
"""Relative range of the repetitions' speed-ups above which they say that something disturbed the run."""


def run_demo(options: DemoOptions) -> int:
    """Train, print, write.

    Returns:
        The exit code: 0, or 1 if the losses of the modes differ by more than rounding explains.

    Raises:
        OptionError: the output folder cannot be written to, or text, memory or GPUs do not suffice for the options.
        SystemExit: a rank failed.
        KeyboardInterrupt: Ctrl-C; the processes that were started have ended.
    """
    prepare_output(options.output)
    console = Console(highlight=False, soft_wrap=True)
    outcome = Outcome(preset(options))
    train.check(outcome.options, "--devices", "fewer --layers")
    corpus = read_samples(options.max_length, equal=options.equal_lengths)
    show_data(console, options, corpus, outcome)
    try:
        train.train_all(outcome, partial(timeline_recorders, options))
    except RankFailedError as error:
        raise SystemExit(f"{error.details}lightning-odc: {error}") from None
    result = Result(options, corpus, outcome)
    result.write_files()
    show_results(console, result)
    return 0 if outcome.losses_agree else 1


def preset(options: DemoOptions) -> TrainOptions:
    """The demo as a benchmark."""
    return TrainOptions(
        output=options.output,
        runs=tuple(combination_of(mode, options.order) for mode in options.communication),
        model=f"{options.layers}x{options.hidden_size}",
        lengths="equal" if options.equal_lengths else "stdlib",
        ranks=options.devices,
        samples_per_rank=options.samples_per_rank,
        samples_per_microbatch=options.samples_per_microbatch,
        minibatches=options.minibatches,
        repetitions=options.repetitions,
        max_length=options.max_length,
        precision=options.precision,
        device=options.device,
        seed=options.seed,
    )


def combination_of(mode: Mode, order: Order) -> Combination:
    """What is run under a mode: one plan for all ways to communicate, and what the strategy makes of the same data."""
    if mode == "balanced":
        return Combination("on_demand", AUTO)
    return Combination(mode, SHUFFLED if order == "shuffled" else "local_sort")


def timeline_recorders(
    options: DemoOptions, combination: Combination, repetition: int
) -> list[TimelineRecorder]:
    """What records the last minibatch of the last repetition, the same one under every mode."""
    if repetition < options.repetitions - 1:
        return []
    last = WARM_UP + options.minibatches - 1
    return [TimelineRecorder(timeline_folder(options.output, mode_of(combination)), (last, last))]


def show_data(console: Console, options: DemoOptions, corpus: Corpus, outcome: Outcome) -> None:
    """Print what is trained on and how ranks share it, before the run."""
    cores, load, placement = available_cores(), outcome.load, outcome.placement
    console.print(
        f"[bold]{len(corpus.samples):,} functions and classes[/] of Python {platform.python_version()}'s "
        f"standard library; {corpus.dropped:,} longer than {corpus.max_length:,} tokens left out"
    )
    facts = length_facts(corpus.lengths)
    console.print("tokens: " + ", ".join(f"{name} {value:,.0f}" for name, value in facts.items()))
    console.print(histogram_text(corpus.lengths, corpus.max_length))
    own = " (balanced: as it chooses)" if "balanced" in options.communication else ""
    each = f"{threads_per_rank(options.devices)} thread(s) per rank"
    if placement.gpus:
        each = placement.caption or "a GPU for each rank"
    console.print(
        f"minibatch: {options.devices} rank(s) x {options.samples_per_rank} samples, "
        f"{options.samples_per_microbatch} per microbatch, {options.order}{own}; {each}"
    )
    if load > BUSY_LOAD * cores:
        console.print(f"[yellow]this machine is busy (load {load / cores:.1f} per core): expect uneven times")
    if options.devices > cores and not placement.gpus:
        console.print(
            f"[yellow]{options.devices} ranks share {cores} cores: a waiting rank lends its core to a busy one, so the "
            "times say little about the modes"
        )


def histogram(lengths: Sequence[int], longest: int) -> list[tuple[int, int, int]]:
    """``(from, to, count)`` of :data:`BINS` equal bins over ``1..longest``, both ends included."""
    edges = [round(longest * step / BINS) for step in range(BINS + 1)]
    pairs = itertools.pairwise(edges)
    return [(low + 1, high, sum(low < length <= high for length in lengths)) for low, high in pairs]


def histogram_text(lengths: Sequence[int], longest: int, width: int = 40) -> str:
    """The histogram as lines of blocks, the fullest bin ``width`` blocks wide."""
    bins = histogram(lengths, longest)
    fullest = max(count for *_, count in bins)
    digits = len(f"{longest:,}")
    lines = []
    for low, high, count in bins:
        bar = "█" * round(width * count / fullest) or ("▏" if count else "")
        lines.append(f"{low:>{digits},} - {high:>{digits},}  {bar} {count:,}")
    return "\n".join(lines)


def show_results(console: Console, result: Result) -> None:
    """Print the table, whether the losses agree, and where the files are."""
    options, outcome = result.options, result.outcome
    if caption := outcome.placement.caption:
        console.print(f"[yellow]{caption}")
    console.print(results_table(result))
    if any(result.doubt(mode) for mode in result.runs):
        console.print("?: not measurable on this machine: the repetitions differ by more than the modes do")
    difference = loss_difference(outcome.runs)
    verdict = "[green]losses agree[/]" if outcome.losses_agree else "[bold red]LOSSES DIFFER[/]"
    reason = "" if math.isfinite(difference) else "; a loss is NaN or infinite"
    tolerance = f"(tolerance {LOSS_TOLERANCE[options.precision]:.0e}{reason})"
    console.print(f"{verdict}: largest relative difference {difference:.1e} {tolerance}")
    if "balanced" in result.runs:
        policy = result.runs["balanced"]["policy"]
        console.print(f'balanced is Trainer(strategy="odc"); it chose policy "{policy}"')
    if result.gain is not None:
        console.print(gain_text(result.gain))
        if not result.gain.doubt:
            show_repetitions(console, result, mode_of(result.gain.fast))
    console.print(
        f"files in {options.output}/:\n"
        f"  timelines.png       every rank in minibatch {options.minibatches}, all modes; grey is waiting\n"
        "  timelines/<mode>/   the same as traces: open timeline.json in https://ui.perfetto.dev\n"
        "  minibatches.png, lengths.png, result.json"
    )


def gain_text(gain: Split) -> str:
    """The whole gain, and what it is a product of."""
    said = f"speed-up of {mode_of(gain.fast)} over collective:"
    if gain.doubt:
        return f"{said} not measurable on this machine: {gain.doubt}"
    return f"{said} [bold]x{gain.total[1]:.2f}[/] = " + ", times ".join(
        f"x{factor[1]:.2f} {cause}" for cause, factor in gain.factors
    )


def show_repetitions(console: Console, result: Result, mode: Mode) -> None:
    """Print the speed-up of each repetition, if there are several."""
    pairs = result.speedup_by_repetition(mode)
    if len(pairs) < 2:
        return
    uneven = max(pairs) / min(pairs) > 1 + SPREAD
    console.print(
        f"by repetition: {', '.join(f'x{pair:.2f}' for pair in pairs)}; "
        f"undisturbed: x{result.speedup_undisturbed(mode):.2f}"
        + (" [yellow](they differ: was the machine busy?)" if uneven else "")
    )


def show_speedup(result: Result, mode: str) -> str:
    """The speed-up of a mode; a question mark where it means nothing, a dash where collectives were not run."""
    if not result.speedups:
        return "-"
    return "?" if result.doubt(mode) else f"x{result.speedups[mode]:.2f}"


def results_table(result: Result) -> Table:
    """One row per mode, at most 80 characters wide."""
    headings = ["mode", "samples\n/s", "tokens\n/s", "s/minibatch\n[q1-q3]", "final\nloss", "speed-up"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in [*headings, "idle", "over\nbound"]:
        table.add_column(escape(heading), justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode, run in result.runs.items():
        first, median, third = run["seconds_quartiles"]
        cells = [
            mode,
            f"{run['samples_per_second']:.2f}",
            f"{run['tokens_per_second']:,.0f}",
            f"{median:.3f} [{first:.3f}-{third:.3f}]",
            f"{run['loss'][-1]:.4f}",
            show_speedup(result, mode),
            *("-" if run[name] is None else f"{run[name]:z.1%}" for name in ("idle_share", "over_bound")),
        ]
        table.add_row(*map(escape, cells))
    return table
