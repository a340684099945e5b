"""The paper's parametric study on emulated devices, beside what the paper published: ``make bench NAME=sweep``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import check_options, markdown, option, prepare_output
from benchmarks.emulate import EmulatedOptions, EmulatedOutcome, EmulatedWorkload, measure
from benchmarks.harness.options import PAPERS_OWN, Combination
from benchmarks.harness.report import machine, show_percent, show_ratio
from benchmarks.harness.results import Interval, loss_difference, ratio_interval, times
from benchmarks.harness.training import check
from lightning_odc.files import write_json, write_whole

# Lockstep meets as collectives do. On a few cores gloo's own time is not what a real machine's collectives take, and
# bytes are not emulated, so they are left out of the comparison.
BASELINE = Combination("lockstep", PAPERS_OWN)
OWN_BASELINE = Combination("lockstep", "lb_micro")
BEST = Combination("on_demand", "lb_mini")
RUNS = (BASELINE, OWN_BASELINE, BEST)
ARITHMETIC = 100
GOLDEN = EmulatedOptions(output=None, runs=RUNS, repetitions=1)
"""The paper's setting: 1.5B, LongAlign 64K, 8 devices, 4 samples per device, packing ratio 1."""

VALUES: dict[str, tuple[str, Sequence[Any]]] = {
    "devices": ("ranks", (2, 4, 8, 16, 32)),
    "minibatch": ("samples_per_rank", (1, 2, 4, 8)),
    "length": ("max_length", (8192, 16384, 32768, 65536, 131072)),
    "packing": ("packing_ratio", (1.0, 2.0, 4.0, 8.0)),
    "balanced": ("ranks", (2, 4, 8)),
}
"""What each sweep varies; the last one is the control, whose samples have one length."""

PUBLISHED: dict[tuple[str, Any], str] = {
    ("devices", 8): "1.34",
    ("devices", 32): "higher than with 8",
    ("minibatch", 1): "1.00",
    ("minibatch", 4): "1.34",
    ("length", 8192): "about 1.25",
    ("length", 65536): "1.34",
    ("length", 131072): "about 1.35",
    ("packing", 1.0): "1.34",
    ("packing", 8.0): "about 1.15",
}
"""Speed-up of ODC LB-Mini over Collective LB-Micro in the paper (arXiv 2601.19362): numbers from its text and tables,
"about" where they are read off a plot, within 5 points."""


@dataclass(frozen=True)
class SweepOptions:
    """What to vary.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path | None = option(Path("odc-bench"), "folder for JSON and Markdown", letter="DIR")
    sweeps: tuple[str, ...] = option(tuple(VALUES), "what to vary", letter="S", choices=tuple(VALUES))
    minibatches: int = option(5, "timed minibatches per setting", least=1)
    most_ranks: int = option(32, "leave out settings with more ranks", least=2)
    seconds_per_minibatch: float | None = option(
        None, "emulated time of a minibatch; by default so long that sleeping dominates", letter="X", least=0
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class Cell:
    """One setting of a sweep.

    Attributes:
        speed_up: `BEST` over `BASELINE`, measured.
        doubt: Why that means nothing; empty if it means something.
        over_own: `BEST` over `OWN_BASELINE`, measured.
        bound: The same ratio as `speed_up` for the very same minibatches, if communication took no time.
        long_bound: The same over 100 minibatches.
        efficiency: Time without communication over measured time, for every combination.
        idle: Measured idle fraction of every combination.
    """

    sweep: str
    value: Any
    speed_up: Interval
    doubt: str
    over_own: Interval
    bound: float
    long_bound: float
    efficiency: dict[str, float]
    idle: dict[str, float]
    overhead_seconds: float
    seconds_per_minibatch: float
    processor: float
    loss_difference: float
    load: float


def run_sweep(options: SweepOptions) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C.

    Raises:
        OptionError: the output folder cannot be written to.
    """
    if options.output is not None:
        prepare_output(options.output)
    code = 0
    cells: list[Cell] = []
    measured: dict[EmulatedOptions, Cell] = {}
    load = os.getloadavg()[0]
    for sweep, value, setting in settings(options):
        if setting not in measured:  # the golden one is in every sweep
            check(EmulatedWorkload(setting))
            outcome = measure(setting)
            code = outcome.cut.code
            if code:
                break
            measured[setting] = cell(sweep, value, outcome)
        cells.append(replace(measured[setting], sweep=sweep, value=value))
        last = cells[-1]
        ratio = show_ratio(last.speed_up, last.doubt)
        print(f"{sweep} {value}: {ratio}, bound {last.bound:.3f}", flush=True)
        if options.output is not None:
            record = {"cells": [asdict(one) for one in cells], "machine": machine(load)}
            write_json(options.output / "sweep.json", record)
            write_whole(options.output / "sweep.md", f"{tables(cells)}\n".encode())
    print(f"\n{tables(cells)}")
    return code


def settings(options: SweepOptions) -> list[tuple[str, Any, EmulatedOptions]]:
    """Sweep, value and options of every cell."""
    golden = replace(
        GOLDEN, minibatches=options.minibatches, seconds_per_minibatch=options.seconds_per_minibatch
    )
    found = []
    for sweep in options.sweeps:
        name, values = VALUES[sweep]
        base = golden
        if sweep == "balanced":
            base = replace(golden, lengths="equal", max_length=2048)
        for value in values:
            if name == "ranks" and value > options.most_ranks:
                continue
            setting = replace(base, **{name: value})
            found.append((sweep, value, setting))
    return found


def cell(sweep: str, value: Any, outcome: EmulatedOutcome) -> Cell:
    """What one setting measured."""
    rows = {row.combination: row for row in outcome.rows}
    best = rows[BEST]
    slow = rows[BASELINE]
    assert best.speed_up is not None
    workload = outcome.workload
    own = outcome.efficiency
    long = [sum(workload.bounds(one, ARITHMETIC)) for one in (BASELINE, BEST)]
    slow_bound = (own(slow) or 0.0) * slow.total
    best_bound = (own(best) or 1.0) * best.total
    bound = slow_bound / best_bound
    long_bound = long[0] / long[1]
    efficiency = {str(one): own(row) or 0.0 for one, row in rows.items()}
    idle = {str(one): row.idle or 0.0 for one, row in rows.items()}
    processor = max(row.processor for row in rows.values())
    return Cell(
        sweep=sweep,
        value=value,
        speed_up=best.speed_up,
        doubt=best.doubt,
        over_own=_over(outcome, OWN_BASELINE),
        bound=bound,
        long_bound=long_bound,
        efficiency=efficiency,
        idle=idle,
        overhead_seconds=outcome.overhead,
        seconds_per_minibatch=best.seconds[1],
        processor=processor,
        loss_difference=loss_difference(outcome.runs),
        load=outcome.load,
    )


def _over(outcome: EmulatedOutcome, slow: Combination) -> Interval:
    ratio = ratio_interval(times(outcome.runs, slow), times(outcome.runs, BEST))
    assert ratio is not None
    return ratio


def tables(cells: Sequence[Cell]) -> str:
    """One Markdown table per sweep."""
    parts = []
    for sweep in dict.fromkeys(one.sweep for one in cells):
        of_sweep = [one for one in cells if one.sweep == sweep]
        parts += [f"### {sweep}", "", table(of_sweep), ""]
    return "\n".join(parts)


def table(cells: Sequence[Cell]) -> str:
    """The settings of one sweep as Markdown."""
    head = [
        cells[0].sweep,
        "speed-up [95 %]",
        "same plans, no communication",
        "100 minibatches, no communication",
    ]
    head += ["paper", "bound / measured: on demand", "lockstep", "over our lb_micro"]
    rows = []
    for one in cells:
        row = (
            f"{one.value:g}",
            show_ratio(one.speed_up, one.doubt),
            f"x{one.bound:.3f}",
            f"x{one.long_bound:.3f}",
            PUBLISHED.get((one.sweep, one.value), "-"),
            show_percent(one.efficiency[str(BEST)]),
            show_percent(one.efficiency[str(BASELINE)]),
            show_ratio(one.over_own),
        )
        rows.append(row)
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.sweep``."""
    return command.run("sweep", __doc__, SweepOptions, run_sweep, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
