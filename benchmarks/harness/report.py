"""What a training benchmark says: text, Markdown and JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict
from functools import cached_property
from typing import Any

import lightning
import torch
import transformers

from benchmarks.command import markdown
from benchmarks.harness.lengths import describe_tail, tail_of
from benchmarks.harness.options import Combination, TrainOptions, available_cores
from benchmarks.harness.processes import CutShort, Placement, place
from benchmarks.harness.results import (
    Interval,
    Row,
    Run,
    Split,
    baseline_of,
    loss_difference,
    splits,
    summarize,
)
from benchmarks.harness.workload import Workload
from lightning_odc._version import __version__
from lightning_odc.files import write_whole

MIB = 2**20
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-3}
"""Relative difference of a minibatch's loss up to which combinations and repetitions agree.

They add the same gradients in different orders. In fp32 the sum of a minibatch's 16 gradients is right to
16 x 6e-8, and a step moves the loss by a fraction of that: measured, 5e-8 after a few minibatches. A modest error
is far larger: to lose the gradient of the shortest one of 16 samples changes the next losses by 2e-5 to 4e-4. In
bf16 the two orders differ by 1e-5, because a last bit of a parameter decides about a rounding of 4e-3.
"""
BUSY_LOAD = 0.5
"""Load average per core, before the run, above which its times are not to be trusted."""


class Outcome:
    """What a benchmark of trainings measures and says, also if it is cut short."""

    document = "bench"
    """The name of its files."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.options: TrainOptions = workload.options
        self.runs: list[Run] = []  # the runs, as far as they came
        self.cut = CutShort()  # whether, and by what, it was cut short
        self.load = os.getloadavg()[0]  # before the run

    @cached_property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return place(self.options.device, self.options.ranks)

    @property
    def rows(self) -> list[Row]:
        """One per combination."""
        return summarize(self.runs, available_cores())

    @property
    def losses_agree(self) -> bool:
        """Whether all combinations and repetitions computed the same losses, up to rounding."""
        return loss_difference(self.runs) <= LOSS_TOLERANCE[self.options.precision]

    def name_of(self, combination: Combination) -> str:
        """What people read of a combination."""
        return str(combination)

    # -- for people ----------------------------------------------------------------------------------------------

    @property
    def devices(self) -> str:
        """How many devices of which kind."""
        ranks = f"{self.options.ranks} ranks"
        if self.options.device == "cuda":
            ranks += " on GPUs"
        return ranks

    @property
    def introduction(self) -> str:
        """What is about to be measured."""
        options = self.options
        samples = self.workload.samples
        return (
            f"model {options.model} on {self.devices}, {options.samples_per_rank} samples per rank and minibatch; "
            f"{samples.source} (tokens: {describe_tail(samples.lengths)}); {options.repetitions} repetitions of "
            f"{options.minibatches} minibatches, the combinations in turns. This takes some minutes; Ctrl-C ends it"
        )

    def cells(self, row: Row) -> dict[str, str]:
        """All that is known of a row, by head."""
        low, middle, high = row.seconds
        cells = {"communication": row.combination.communication, "policy": row.combination.policy}
        costs = {self.options.cost_of(run) for run in self.options.runs}
        if len(costs) > 1:
            cells["cost"] = self.options.cost_of(row.combination)
        cells["s/minibatch [95 %]"] = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
        cells["speed-up [95 %]"] = show_ratio(row.speed_up, row.doubt)
        cells["idle"] = show_percent(row.idle)
        cells["over bound"] = show_percent(row.over_bound)
        cells["settle + publish"] = show_percent(row.settling, 2)
        cells["peak memory"] = _show_mib(row.peak_bytes)
        cells["window"] = _show_mib(row.window_bytes)
        cells["read / minibatch"] = _show_mib(row.bytes_read)
        return cells

    @property
    def lines(self) -> list[str]:
        """What follows from the table."""
        lines = [f"- {self.sentence(split)}" for split in splits(self.runs)]
        verdict = "LOSSES DIFFER"
        if self.losses_agree:
            verdict = "losses agree"
        difference = loss_difference(self.runs)
        line = f"{verdict}: largest relative difference {difference:.1e}"
        if not math.isfinite(difference):
            line += " (a loss is NaN or infinite)"
        lines.append(line)
        if self.load > BUSY_LOAD * available_cores():
            lines.append(f"The machine was busy before (load {self.load:.1f}): expect uneven times.")
        if self.cut.failure:
            lines.append(f"Cut short: {self.cut.failure}")
        return lines

    def sentence(self, split: Split) -> str:
        """A split for people."""
        start = f"{self.name_of(split.fast)} over {self.name_of(split.slow)}: "
        if split.doubt:
            return f"{start}not measurable on this machine: {split.doubt}"
        start += show_ratio(split.total)
        if len(split.factors) < 2:
            return start
        factors = [f"{name} {show_ratio(factor)}" for name, factor in split.factors]
        return f"{start} = {', times '.join(factors)}"

    @property
    def text(self) -> str:
        """Table and sentences, as Markdown."""
        if not self.rows:
            return "Nothing was measured."
        parts = []
        if self.placement.caption:
            parts += [f"**{self.placement.caption}**", ""]
        cells = [self.cells(row) for row in self.rows]
        rows = [list(row.values()) for row in cells]
        parts += [markdown(list(cells[0]), rows), ""]
        return "\n".join(parts + self.lines)

    def show(self) -> None:
        """Print table and sentences."""
        print(self.text)

    # -- for programs --------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file, of which `json` is the text."""
        samples = self.workload.samples
        options = asdict(self.options)
        options["runs"] = [str(run) for run in self.options.runs]
        options["output"] = None
        rows = self.rows
        baseline = baseline_of([row.combination for row in rows])
        lengths = {"source": samples.source, "tokens": tail_of(samples.lengths)}
        runs = [run.record() for run in self.runs if run.count]
        return {
            "options": options,
            "caption": self.placement.caption or None,
            "lengths": lengths,
            "baseline": str(baseline),
            "rows": [row.record() for row in rows],
            "splits": [split.record() for split in splits(self.runs)],
            "loss_difference": loss_difference(self.runs),
            "cut_short": self.cut.failure or None,
            "runs": runs,
            "machine": machine(self.load, self.placement.gpus),
        }

    @property
    def json(self) -> str:
        """The JSON file; empty if nothing was measured."""
        if not self.rows:
            return ""
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def write_files(self) -> None:
        """Write JSON and Markdown into the output folder, if there is one."""
        folder = self.options.output
        name = self.document
        if folder is None or not self.rows:  # nothing measured replaces no earlier results
            return
        write_whole(folder / f"{name}.json", self.json.encode())
        page = f"{self.introduction}\n\n{self.text}\n"
        write_whole(folder / f"{name}.md", page.encode())
        print(f"files in {folder}/: {name}.json, {name}.md (the whole table)")


def machine(load: float, gpus: int = 0) -> dict[str, Any]:
    """What JSON files say about where they come from."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "cores": available_cores(),
        "load_before": load,
        "lightning-odc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
    }
    if gpus:
        facts["gpus"] = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
    return facts


def show_percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction in percent, or a dash."""
    if fraction is None:
        return "-"
    return f"{100 * fraction:z.{digits}f} %"


def _show_mib(size: int) -> str:
    if not size:
        return "-"
    return f"{size / MIB:.0f} MiB"


def show_ratio(
    ratio: Interval | None, doubt: str = "", instead: str = "not measurable", digits: int = 3
) -> str:
    """A ratio with its interval; the interval alone where there is a reason to doubt the ratio; or a dash."""
    if ratio is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in ratio)
    shown = f"x{middle}"
    if doubt:
        shown = instead
    return f"{shown} [{low}, {high}]"
