"""Everything one run of the demo has to say: what it trained on, what came out, which files it wrote."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from rich.console import Console

from lightning_odc._version import __version__
from lightning_odc.callbacks import Timeline, draw_timelines
from lightning_odc.demo.corpus import Corpus
from lightning_odc.demo.options import DemoOptions, available_cores
from lightning_odc.demo.pictures import lengths_picture, minibatches_picture, write_picture
from lightning_odc.demo.report import histogram_text, length_facts, results_table, write_json
from lightning_odc.demo.result import (
    Repetition,
    RunSummary,
    loss_disagreement,
    speedup_undisturbed,
    speedups,
    speedups_by_repetition,
    summarise,
)

LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-3}
"""Relative difference of a minibatch's loss up to which modes and repetitions agree.

They add the same gradients in different orders. In fp32 the sum of a minibatch's 16 gradients is right to
16 x 6e-8, and a step moves the loss by a fraction of that: measured, 5e-8 after a few minibatches. A modest error
is far larger: to lose the gradient of the shortest one of 16 samples changes the next losses by 2e-5 to 4e-4. In
bf16 the two orders differ by 1e-5, because a last bit of a parameter decides about a rounding of 4e-3.
"""
BUSY_LOAD = 0.5
"""Load average per core, before the run, above which its times are not to be trusted."""
SPREAD = 0.15
"""Relative range of the repetitions' speed-ups above which they say that something disturbed the run."""


def timeline_folder(output: Path, mode: str) -> Path:
    """Where the timeline of a mode lies."""
    return output / "timelines" / mode


class Outcome:
    """The outcome of a run.

    Args:
        options: what the run was told.
        corpus: the samples.
        threads: compute threads of each rank.

    Attributes:
        repetitions: in the order in which they were trained; set when training is over.
    """

    def __init__(self, options: DemoOptions, corpus: Corpus, threads: int) -> None:
        self.options = options
        self.corpus = corpus
        self.threads = threads
        self.repetitions: Sequence[Repetition] = ()
        self.load = os.getloadavg()[0]

    @cached_property
    def runs(self) -> dict[str, RunSummary]:
        """Each mode's figures, in the order of the options."""
        samples = self.options.devices * self.options.samples_per_rank
        return {
            mode: summarise([one for one in self.repetitions if one.mode == mode], samples)
            for mode in self.options.communication
        }

    @property
    def losses_agree(self) -> bool:
        """Whether all modes and repetitions computed the same losses, up to rounding."""
        return loss_disagreement(self.repetitions) <= LOSS_TOLERANCE[self.options.precision]

    def show_data(self, console: Console) -> None:
        """Print what is trained on and how it is shared, before the run."""
        options, corpus = self.options, self.corpus
        facts = length_facts(corpus.lengths)
        console.print(
            f"[bold]{len(corpus.samples):,} functions and classes[/] of Python {platform.python_version()}'s "
            f"standard library; {corpus.dropped:,} longer than {corpus.max_length:,} tokens left out"
        )
        console.print("tokens: " + ", ".join(f"{name} {value:,.0f}" for name, value in facts.items()))
        console.print(histogram_text(corpus.lengths, corpus.max_length))
        console.print(
            f"minibatch: {options.devices} rank(s) x {options.samples_per_rank} samples, "
            f"{options.samples_per_microbatch} per microbatch, {options.order}; "
            f"{self.threads} thread(s) per rank"
        )
        load = self.load / available_cores()
        if load > BUSY_LOAD:
            console.print(f"[yellow]this machine is busy (load {load:.1f} per core): expect uneven times")
        if options.devices > available_cores():
            console.print(
                f"[yellow]{options.devices} ranks share {available_cores()} cores: a waiting rank lends its "
                "core to a busy one, so the times say little about the modes"
            )

    def show_results(self, console: Console) -> None:
        """Print the table, whether the losses agree, and where the files are."""
        gains = speedups(self.runs)
        console.print(results_table(self.runs, gains))
        difference = loss_disagreement(self.repetitions)
        tolerance = LOSS_TOLERANCE[self.options.precision]
        verdict = "[green]losses agree[/]" if self.losses_agree else "[bold red]LOSSES DIFFER[/]"
        reason = "" if math.isfinite(difference) else "; a loss is NaN or infinite"
        console.print(
            f"{verdict}: largest relative difference {difference:.1e} (tolerance {tolerance:.0e}{reason})"
        )
        pairs = speedups_by_repetition(self.repetitions)
        if len(pairs) > 1:
            listed = ", ".join(f"x{pair:.2f}" for pair in pairs)
            uneven = max(pairs) / min(pairs) > 1 + SPREAD
            console.print(
                f"speed-up by repetition: {listed}; undisturbed: x{speedup_undisturbed(self.repetitions):.2f}"
                + (" [yellow](they differ: was the machine busy?)" if uneven else "")
            )
        self._show_files(console)

    def write_files(self) -> None:
        """Write ``result.json`` and the pictures into the output folder."""
        folder, corpus = self.options.output, self.corpus
        write_picture(
            folder / "lengths.png", lengths_picture(corpus.lengths, corpus.max_length, corpus.dropped)
        )
        write_picture(folder / "minibatches.png", minibatches_picture(self.runs, self.options.minibatches))
        if self.timelines:
            draw_timelines(self.timelines, folder / "timelines.png")
        write_json(folder / "result.json", self.as_dict())

    def _show_files(self, console: Console) -> None:
        console.print(f"files in {self.options.output}/:")
        console.print(
            f"  timelines.png       every rank in minibatch {self.options.minibatches}, all modes; grey is waiting"
        )
        console.print(
            "  timelines/<mode>/   the same as traces: open timeline.json in https://ui.perfetto.dev"
        )
        console.print("  minibatches.png, lengths.png, result.json")

    @property
    def timelines(self) -> dict[str, Timeline]:
        """What was recorded, by mode."""
        return {one.mode: one.timeline for one in self.repetitions if one.timeline is not None}

    def as_dict(self) -> dict[str, Any]:
        """The content of ``result.json``."""
        gains = speedups(self.runs)
        return {
            "runs": {mode: asdict(run) for mode, run in self.runs.items()},
            "speedup": gains.get("on_demand"),
            "speedups": gains,
            "speedup_by_repetition": speedups_by_repetition(self.repetitions),
            "speedup_undisturbed": speedup_undisturbed(self.repetitions),
            "loss_disagreement": loss_disagreement(self.repetitions),
            "loss_tolerance": LOSS_TOLERANCE[self.options.precision],
            "timelines": {
                mode: {
                    "trace": str(timeline_folder(Path(), mode) / "timeline.json"),
                    "minibatch": self.options.minibatches,
                    "seconds": timeline.seconds,
                    "idle_share": timeline.idle_fraction,
                }
                for mode, timeline in self.timelines.items()
            },
            "config": asdict(self.options) | {"output": str(self.options.output)},
            "corpus": {
                "samples": len(self.corpus.samples),
                "dropped": self.corpus.dropped,
                "files": self.corpus.files,
                "digest": self.corpus.digest,
                "tokens": length_facts(self.corpus.lengths),
            },
            "machine": {
                "system": platform.platform(),
                "processor": platform.processor() or platform.machine(),
                "cores": available_cores(),
                "threads_per_rank": self.threads,
                "load_before": self.load,
            },
            "versions": {
                "lightning-odc": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "transformers": transformers.__version__,
            },
        }
