"""Turn the outcome of the training into the demo's figures and files: one entry per mode, and the speed-ups."""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lightning_odc.bench.corpus import Corpus
from lightning_odc.bench.options import AUTO, Combination
from lightning_odc.bench.pictures import write_picture
from lightning_odc.bench.processes import threads_per_rank
from lightning_odc.bench.report import LOSS_TOLERANCE, Outcome, length_facts, machine
from lightning_odc.bench.results import (
    Row,
    Run,
    Split,
    by_repetition,
    doubt,
    loss_difference,
    quartiles,
    splits,
    times,
)
from lightning_odc.callbacks import draw_timelines, load_timeline
from lightning_odc.demo.options import DemoOptions, Mode
from lightning_odc.demo.pictures import TITLES, lengths_picture, minibatches_picture
from lightning_odc.files import write_json

CAUSES = {
    "communication": "cheaper bytes and fewer waits",
    "communication and balancing": "cheaper bytes, fewer waits and balancing",
}
"""What is said of a factor that is not split, since lockstep was not run."""


def mode_of(combination: Combination) -> Mode:
    """What the demo calls a combination."""
    return cast(Mode, "balanced" if combination.policy == AUTO else combination.communication)


def timeline_folder(output: Path, mode: str) -> Path:
    """Where the timeline of a mode lies."""
    return output / "timelines" / mode


class Result:
    """What the demo has found out.

    Args:
        options: The options of the demo.
        corpus: The samples.
        outcome: The outcome of the training, which was not cut short.
    """

    def __init__(self, options: DemoOptions, corpus: Corpus, outcome: Outcome) -> None:
        self.options = options
        self.corpus = corpus
        self.outcome = outcome

    @cached_property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """Times of the timed minibatches by mode, ``[repetition, minibatch]``."""
        return {
            mode: np.array([[run.seconds(index) for index in run.timed] for run in self._runs_of(mode)])
            for mode in self.options.communication
        }

    @cached_property
    def runs(self) -> dict[str, dict[str, Any]]:
        """The figures of each mode over all its repetitions, in the order of the options; see `_figures`."""
        return {mode_of(row.combination): self._figures(row) for row in self.outcome.rows}

    def _runs_of(self, mode: str) -> list[Run]:
        return [run for run in self.outcome.runs if mode_of(run.combination) == mode]

    def _figures(self, row: Row) -> dict[str, Any]:
        """An entry of ``runs`` in ``result.json``.

        Rates are over all timed minibatches of all ranks. ``loss`` has every minibatch of the last repetition, the
        untimed one included; ``idle_seconds`` the waits by cause, of all ranks and timed minibatches.
        """
        mode = mode_of(row.combination)
        runs, seconds = self._runs_of(mode), self.seconds[mode].ravel().tolist()
        timed = [one for run in runs for index in run.timed for one in run.of(index)]
        waits = sorted({cause for one in timed for cause in one.waits})
        totals = [one.traffic for run in runs for one in run.totals]
        minibatches = sum(run.count for run in runs)
        samples = self.options.devices * self.options.samples_per_rank * len(seconds)
        return {
            "samples_per_second": samples / row.total,
            "tokens_per_second": sum(one.tokens for one in timed) / row.total,
            "seconds_per_minibatch": seconds,
            "seconds_quartiles": quartiles(seconds),
            "loss": [runs[-1].loss(index) for index in range(runs[-1].count)],
            "traffic_per_minibatch": {
                kind: sum(one[kind] for one in totals) / minibatches for kind in totals[0]
            },
            "idle_seconds": {cause: sum(one.waits.get(cause, 0.0) for one in timed) for cause in waits},
            "idle_share": row.idle,
            "over_bound": row.over_bound,
            "policy": runs[-1].totals[0].policy,
        }

    @property
    def speedups(self) -> dict[str, float]:
        """Samples per second of each mode over those of collectives; empty if they were not run."""
        if "collective" not in self.seconds:
            return {}
        slow = self.seconds["collective"].sum()
        return {mode: float(slow / own.sum()) for mode, own in self.seconds.items()}

    def doubt(self, mode: str) -> str:
        """Why the speed-up of a mode means nothing; empty if it means something, or collectives were not run."""
        slow, own = (self._runs_of(one) for one in ("collective", mode))
        return doubt(times(slow, slow[0].combination), times(own, own[0].combination)) if slow and own else ""

    def speedup_by_repetition(self, mode: str = "on_demand") -> list[float]:
        """The time of collectives over that of a mode, for each repetition; empty if one of them was not run."""
        slow, own = (self._runs_of(one) for one in ("collective", mode))
        if not (slow and own):
            return []
        return by_repetition(times(slow, slow[0].combination), times(own, own[0].combination))

    def speedup_undisturbed(self, mode: str = "on_demand") -> float | None:
        """The speed-up if every minibatch had taken what it took in its fastest repetition, or None.

        Whatever else runs on the machine only adds time, so the fastest repetition is the least disturbed one.
        """
        if not {"collective", mode} <= self.seconds.keys():
            return None
        slow, fast = (self.seconds[one].min(axis=0).sum() for one in ("collective", mode))
        return float(slow / fast)

    @cached_property
    def gain(self) -> Split | None:
        """The speed-up of the balanced mode over collectives, as a product of causes; without it that on demand.

        None if the modes to compare were not run.
        """
        best = "balanced" if "balanced" in self.seconds else "on_demand"
        if not {"collective", best} <= self.seconds.keys():
            return None
        # Speed-ups are over the first run, whatever order the user named the modes in.
        runs = self._runs_of("collective") + [
            run for run in self.outcome.runs if mode_of(run.combination) != "collective"
        ]
        (found,) = (split for split in splits(runs) if mode_of(split.fast) == best)
        return replace(found, factors=[(CAUSES.get(name, name), factor) for name, factor in found.factors])

    def write_files(self) -> None:
        """Write ``result.json`` and the pictures into the output folder."""
        folder, corpus = self.options.output, self.corpus
        write_json(folder / "result.json", self.as_dict() | {"timelines": {}})  # also if a picture fails
        lengths = lengths_picture(corpus.lengths, corpus.max_length, corpus.dropped)
        write_picture(folder / "lengths.png", lengths)
        caption = self.outcome.placement.caption
        write_picture(folder / "minibatches.png", minibatches_picture(self.seconds, caption))
        timelines = {
            mode: load_timeline(timeline_folder(folder, mode) / "timeline.json") for mode in self.runs
        }
        of_ranks = f" ({caption})" if caption else ""
        titled = {f"{TITLES[mode]}{of_ranks}": one for mode, one in timelines.items()}
        draw_timelines(titled, folder / "timelines.png")
        shown = {
            mode: {
                "trace": str(timeline_folder(Path(), mode) / "timeline.json"),
                "minibatch": self.options.minibatches,
                "seconds": timeline.seconds,
                "idle_share": timeline.idle_fraction,
            }
            for mode, timeline in timelines.items()
        }
        write_json(folder / "result.json", self.as_dict() | {"timelines": shown})

    def _gain_record(self) -> dict[str, Any] | None:
        """The whole gain for JSON: low end, value and high end of the speed-up and of its factors."""
        if self.gain is None:
            return None
        mode = mode_of(self.gain.fast)
        return {
            "mode": mode,
            "speedup": self.gain.total,
            "doubt": self.gain.doubt,
            "factors": dict(self.gain.factors),
            "by_repetition": self.speedup_by_repetition(mode),
            "undisturbed": self.speedup_undisturbed(mode),
        }

    def as_dict(self) -> dict[str, Any]:
        """The content of ``result.json`` but for the timelines."""
        placement = self.outcome.placement
        here = machine(self.outcome.load, placement.gpus)
        names = ("system", "cores", "load_before", "gpus")
        of_machine = {name: here.pop(name) for name in names if name in here}
        return {
            "caption": placement.caption or None,
            "runs": self.runs,
            "speedup": self.speedups.get("on_demand"),
            "speedups": self.speedups,
            "speedup_by_repetition": self.speedup_by_repetition(),
            "speedup_undisturbed": self.speedup_undisturbed(),
            "gain": self._gain_record(),
            "loss_disagreement": loss_difference(self.outcome.runs),
            "loss_tolerance": LOSS_TOLERANCE[self.options.precision],
            "config": asdict(self.options) | {"output": str(self.options.output)},
            "corpus": {
                "samples": len(self.corpus.samples),
                "dropped": self.corpus.dropped,
                "files": self.corpus.files,
                "digest": self.corpus.digest,
                "tokens": length_facts(self.corpus.lengths),
            },
            "machine": of_machine
            | {
                "processor": platform.processor() or platform.machine(),
                "threads_per_rank": threads_per_rank(self.options.devices),
            },
            "versions": here,
        }
