"""The demo: the same text and model, with collectives, on demand, and balanced. A preset of ``lightning-odc bench``.

It adds what a first look needs: the lengths before the run, a timeline of every mode, and the names of the modes.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from lightning_odc.bench.corpus import read_samples
from lightning_odc.bench.lengths import describe_tail
from lightning_odc.bench.options import AUTO, MODES, Combination, DemoOptions, available_cores
from lightning_odc.bench.report import Outcome
from lightning_odc.bench.results import WARM_UP, Split, splits
from lightning_odc.bench.training import run_train
from lightning_odc.bench.workload import Workload
from lightning_odc.callbacks import Timeline, TimelineRecorder, draw_timelines, load_timeline

NAMES = {combination: mode for mode, combination in MODES.items()}
TITLES = {"on_demand": "on demand", "balanced": "on demand, balanced"}
"""What pictures call modes whose names are not words."""


def run_demo(outcome: DemoOutcome) -> int:
    """Train, print, write; returns the exit code, 1 if losses differ by more than rounding explains."""
    code = run_train(outcome, outcome.recorders)
    if code == 0 and not outcome.losses_agree:
        return 1
    return code


class DemoOutcome(Outcome):
    """What the demo has found out."""

    document = "result"

    def __init__(self, options: DemoOptions) -> None:
        super().__init__(Workload(options.training))
        self.demo = options

    def name_of(self, combination: Combination) -> str:
        return NAMES.get(combination, str(combination))

    def recorders(self, combination: Combination, repetition: int) -> list[TimelineRecorder]:
        """What records the last minibatch of the last repetition, the same one under every mode."""
        if repetition < self.options.repetitions - 1:
            return []
        last = WARM_UP + self.options.minibatches - 1
        folder = self.demo.output / "timelines" / self.name_of(combination)
        return [TimelineRecorder(folder, (last, last))]

    @property
    def introduction(self) -> str:
        """What is trained on, and how ranks share it."""
        options = self.options
        corpus = read_samples(self.demo.max_length, equal=self.demo.equal_lengths)
        lines = [
            f"{len(corpus.samples):,} functions and classes of Python {platform.python_version()}'s standard library; "
            f"{corpus.dropped:,} longer than {corpus.max_length:,} tokens left out",
            f"tokens: {describe_tail(corpus.lengths)}",
            f"minibatch: {self.devices} x {options.samples_per_rank} samples, one per microbatch, the longest first "
            "(balanced: as it chooses)",
        ]
        cores = available_cores()
        if options.ranks > cores and not self.placement.gpus:
            lines.append(
                f"{options.ranks} ranks share {cores} cores: a waiting rank lends its core to a busy one, so the times "
                "say little about the modes"
            )
        return "\n".join(lines)

    @property
    def lines(self) -> list[str]:
        lines = super().lines
        ended = [run for run in self.runs if run.combination.policy == AUTO and run.totals]
        if ended:
            policy = ended[-1].totals[0].policy
            lines.append(f'balanced is Trainer(strategy="odc"); it chose policy "{policy}"')
        return lines

    @property
    def gain(self) -> Split | None:
        """The speed-up of the last mode on demand over collectives; None if one of them was not run."""
        found = [split for split in splits(self.runs) if split.slow == MODES["collective"]]
        for split in found:
            if split.fast == MODES["balanced"]:
                return split
        if found:
            return found[0]
        return None

    def as_dict(self) -> dict[str, Any]:
        """The content of ``result.json``: that of a benchmark, with what the modes are called, and the gain."""
        content = super().as_dict()
        content["config"] = asdict(self.demo) | {"output": str(self.demo.output)}
        content["modes"] = {mode: str(MODES[mode]) for mode in self.demo.communication}
        gain = self.gain
        content["gain"] = None
        if gain is not None:
            content["gain"] = gain.record()
        timelines = {}
        for mode, timeline in self._timelines().items():
            trace = f"timelines/{mode}/timeline.json"
            timelines[mode] = {"trace": trace, "idle_share": timeline.idle_fraction}
        content["timelines"] = timelines
        return content

    def _timelines(self) -> dict[str, Timeline]:
        """Of the modes that came so far."""
        found = {}
        for mode in self.demo.communication:
            trace = self.demo.output / "timelines" / mode / "timeline.json"
            if trace.exists():
                found[mode] = load_timeline(trace)
        return found

    def write_files(self) -> None:
        """Write those of a benchmark, and the timelines in one picture."""
        super().write_files()
        timelines = self._timelines()
        if not (self.rows and timelines):
            return
        of_ranks = ""
        if self.placement.caption:
            of_ranks = f" ({self.placement.caption})"
        titled = {}
        for mode, timeline in timelines.items():
            title = TITLES.get(mode, mode)
            titled[f"{title}{of_ranks}"] = timeline
        draw_timelines(titled, self.demo.output / "timelines.png")
        print(
            f"  timelines.png       every rank in minibatch {self.options.minibatches}, all modes; grey is waiting\n"
            "  timelines/<mode>/   the same as traces: open timeline.json in https://ui.perfetto.dev\n"
            'Next, in your own project: import lightning_odc, then Trainer(strategy="odc"). To plan its gain before: '
            "lightning-odc advise"
        )
