"""What a training benchmark says: text, Markdown, JSON and a picture."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import lightning
import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike

from lightning_odc._version import __version__
from lightning_odc.bench.devices import Placement, place
from lightning_odc.bench.options import TrainOptions, available_cores
from lightning_odc.bench.results import (
    Interval,
    Row,
    Run,
    Split,
    baseline_of,
    loss_difference,
    quartiles,
    splits,
    summarize,
)
from lightning_odc.bench.tables import markdown
from lightning_odc.bench.training import cached_samples
from lightning_odc.files import write_json, write_whole

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


def introduction(options: TrainOptions) -> str:
    """What is about to be measured."""
    samples = cached_samples(options)
    facts = ", ".join(f"{name} {value:,.0f}" for name, value in length_facts(samples.lengths).items())
    devices = f"{options.ranks} {'emulated devices' if options.emulate else 'ranks'}"
    if options.device == "cuda":
        devices += " on GPUs"
    return (
        f"model {options.model} on {devices}, {options.samples_per_rank} samples per rank and minibatch; "
        f"{samples.source} (tokens: {facts}); {options.repetitions} repetitions of {options.minibatches} "
        f"minibatches, the combinations in turns"
    )


class Outcome:
    """Everything that a benchmark of trainings has to say, also when it was cut short.

    Args:
        options: The options of the benchmark, filled in.

    Attributes:
        runs: The runs, as far as they came.
        code: The exit code: 0, 1 after a failed rank, 130 after Ctrl-C.
        failure: One line, if it was cut short.
        details: The traceback of the rank that failed.
        overhead: Seconds of a minibatch in which no rank sleeps; emulated devices only.
        seconds_per_cost: The unit of time of emulated devices.
    """

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.runs: list[Run] = []
        self.code = 0
        self.failure = self.details = ""
        self.overhead = 0.0
        self.seconds_per_cost = 1.0
        self.load = os.getloadavg()[0]

    @cached_property
    def placement(self) -> Placement:
        """Where the ranks run."""
        assert self.options.ranks is not None
        return place(self.options.device, self.options.ranks)

    @property
    def rows(self) -> list[Row]:
        """One per combination."""
        return summarize(self.runs, available_cores())

    @property
    def text(self) -> str:
        """Table and sentences, as Markdown."""
        rows = self.rows
        if not rows:
            return "Nothing was measured."
        caption = [f"**{self.placement.caption}**", ""] if self.placement.caption else []
        parts = [*caption, table(rows, self.options), "", *(sentence(split) for split in splits(self.runs))]
        difference = loss_difference(self.runs)
        verdict = "losses agree" if self.losses_agree else "LOSSES DIFFER"
        reason = "" if math.isfinite(difference) else " (a loss is NaN or infinite)"
        parts.append(f"{verdict}: largest relative difference {difference:.1e}{reason}")
        if self.options.emulate:
            parts.append(self._emulation(rows))
        if self.load > BUSY_LOAD * available_cores():
            parts.append(f"The machine was busy before (load {self.load:.1f}): expect uneven times.")
        if self.failure:
            parts.append(f"Cut short: {self.failure}")
        return "\n".join(parts)

    @property
    def losses_agree(self) -> bool:
        """Whether all combinations and repetitions computed the same losses, up to rounding."""
        return loss_difference(self.runs) <= LOSS_TOLERANCE[self.options.precision]

    def _emulation(self, rows: Sequence[Row]) -> str:
        slowest = max(row.seconds[1] for row in rows)
        return (
            f"Without any sleep a minibatch takes up to {self.overhead:.3f} s, {100 * self.overhead / slowest:.1f} % "
            f"of one with it; cores were busy for at most {100 * max(row.processor for row in rows):.0f} % of the time."
        )

    def as_dict(self) -> dict[str, Any]:
        """The content of ``bench.json``."""
        given, samples = asdict(self.options), cached_samples(self.options)
        given |= {"runs": [str(run) for run in self.options.runs or ()], "output": None}
        return {
            "options": given,
            "caption": self.placement.caption or None,
            "lengths": {"source": samples.source, "tokens": length_facts(samples.lengths)},
            "baseline": str(baseline_of([row.combination for row in self.rows])),
            "rows": [row.record() for row in self.rows],
            "splits": [split.record() for split in splits(self.runs)],
            "loss_difference": loss_difference(self.runs),
            "overhead_seconds": self.overhead,
            "seconds_per_cost": self.seconds_per_cost,
            "cut_short": self.failure or None,
            "error": self.details or None,
            "runs": [_run_record(run) for run in self.runs if run.count],
            "machine": machine(self.load, self.placement.gpus),
        }

    def write_files(self) -> None:
        """Write ``bench.json``, ``bench.md`` and ``bench.png`` into the output folder, if there is one.

        Nothing measured replaces no earlier results: then there is only ``bench-error.txt``, if a rank said why it
        failed.
        """
        folder = self.options.output
        if folder is None:
            return
        if not self.rows:
            if self.details:
                write_whole(folder / "bench-error.txt", self.details.encode())
                print(f"files in {folder}/: bench-error.txt")
            return
        (folder / "bench-error.txt").unlink(missing_ok=True)
        write_json(folder / "bench.json", self.as_dict())
        write_whole(folder / "bench.md", f"{introduction(self.options)}\n\n{self.text}\n".encode())
        from lightning_odc.bench.pictures import rows_picture, write_picture

        write_picture(folder / "bench.png", rows_picture(self.rows, self.placement.caption))
        print(f"files in {folder}/: bench.json, bench.md, bench.png")


def length_facts(lengths: ArrayLike) -> dict[str, float]:
    """The figures that describe the tail: median, mean, 90th percentile, longest."""
    ordered = np.sort(lengths).tolist()
    return {
        "median": quartiles(ordered)[1],
        "mean": sum(ordered) / len(ordered),
        "90%": ordered[int(0.9 * (len(ordered) - 1))],
        "longest": ordered[-1],
    }


def machine(load: float, gpus: int = 0) -> dict[str, Any]:
    """What JSON files say about where they come from.

    Args:
        load: The load average before the run.
        gpus: The number of GPUs that were used, the first ones that torch sees.
    """
    return {
        "system": platform.platform(),
        "cores": available_cores(),
        "load_before": load,
        "lightning-odc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
        **({"gpus": [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]} if gpus else {}),
    }


def _run_record(run: Run) -> dict[str, Any]:
    return {
        "combination": str(run.combination),
        "repetition": run.repetition,
        "seconds": [run.seconds(index) for index in range(run.count)],
        "idle": [[one.idle for one in run.of(index)] for index in range(run.count)],
        "losses": [run.loss(index) for index in range(run.count)],
        "bounds": run.bounds,
        "estimated_idle": run.estimates,
        "totals": [asdict(one) for one in run.totals],
    }


def table(rows: Sequence[Row], options: TrainOptions) -> str:
    """The rows as Markdown."""
    found = [_cells(row, options) for row in rows]
    return markdown(list(found[0]), [list(cells.values()) for cells in found])


def _cells(row: Row, options: TrainOptions) -> dict[str, str]:
    """Cells of a row, by head. Emulated runs have no memory, but may have bounds."""
    low, middle, high = row.seconds
    communication, policy, _ = row.combination
    cells = {"communication": communication, "policy": policy, "cost": options.cost_of(row.combination)}
    if len({options.cost_of(run) for run in options.runs or ()}) < 2:
        del cells["cost"]  # the same in all rows
    cells |= {
        "s/minibatch [95 %]": f"{middle:.3f} [{low:.3f}, {high:.3f}]",
        "speed-up [95 %]": "-" if row.speed_up is None else show_ratio(row.speed_up, row.doubt),
        "idle": show_percent(row.idle),
        "idle, estimated": show_percent(row.estimated_idle),
        "over bound": show_percent(row.over_bound),
    }
    if options.emulate:
        return cells | {"bound / measured": show_percent(row.efficiency)}
    return cells | {
        "settle + publish": show_percent(row.settling, 2),
        "peak memory": _show_mib(row.peak_bytes),
        "window": _show_mib(row.window_bytes),
        "read / minibatch": _show_mib(row.bytes_read),
    }


def show_percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction in percent, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:z.{digits}f} %"


def _show_mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size else "-"


def show_ratio(ratio: Interval, doubt: str = "") -> str:
    """A ratio with its interval; the interval alone where there is a reason to doubt the ratio."""
    low, middle, high = ratio
    return f"{'not measurable' if doubt else f'x{middle:.3f}'} [{low:.3f}, {high:.3f}]"


def sentence(split: Split) -> str:
    """A split for people."""
    start = f"- {split.fast} over {split.slow}: "
    if split.doubt:
        return f"{start}not measurable on this machine: {split.doubt}"
    start += show_ratio(split.total)
    if len(split.factors) < 2:
        return start
    return f"{start} = " + ", times ".join(
        f"{name} x{factor[1]:.3f} [{factor[0]:.3f}, {factor[2]:.3f}]" for name, factor in split.factors
    )
