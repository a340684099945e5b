"""What the monitor and the recorder cost: the time inside their own code, in the demo's training.

A profile of the training thread gives an upper bound, which is exact enough to see a thousandth. Times of whole
minibatches with and without them scatter by more than they cost.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from benchmarks.harness.options import Combination, TrainOptions
from benchmarks.harness.processes import run_ranks
from benchmarks.harness.results import WARM_UP, MinibatchRecord
from benchmarks.harness.training import fit
from benchmarks.harness.workload import Workload
from lightning_odc.callbacks import DeviceIdleMonitor, TimelineRecorder

RANKS = 2
VARIANTS = ("nothing", "monitor", "recorder off", "recorder on")
_NEVER = range(10**9, 10**9 + 1)


class MinibatchProfiler(Callback):
    """Profiles this rank's training thread from the first minibatch to the end of the last.

    What callbacks do once, when a fit begins or ends, is left out: for the monitor that is some 20 ms.
    """

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.profile.enable()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.profile.disable()


def measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """One record per mode and variant: seconds in the callbacks' code, and those of a minibatch without them."""
    trained = TrainOptions(ranks=world_size, minibatches=6, samples_per_rank=8, max_length=2048)
    count = WARM_UP + trained.minibatches
    records: list[dict[str, Any]] = []
    for communication in ("on_demand", "collective"):
        plain = _fit(rank, world_size, trained, communication, [])
        seconds = statistics.median(plain[WARM_UP:])
        for variant in VARIANTS:
            profiler = MinibatchProfiler()
            with tempfile.TemporaryDirectory() as scratch:
                callbacks = [profiler, *_extra(variant, Path(scratch))]
                _fit(rank, world_size, trained, communication, callbacks)
            own = seconds_in(profiler.profile, _is_observing) / count
            record = {"communication": communication, "variant": variant, "seconds": seconds, "own": own}
            records.append(record)
    return records


def _fit(
    rank: int, world_size: int, options: TrainOptions, communication: str, callbacks: list[Callback]
) -> list[float]:
    """Train once; seconds of each minibatch."""
    records: list[MinibatchRecord] = []
    combination = Combination(communication, "local_sort")
    fit(rank, world_size, Workload(options), combination, callbacks, tell=records.append)
    return [one.seconds for one in records]


def seconds_in(profile: cProfile.Profile, belongs: Callable[[str], bool]) -> float:
    """Seconds that a profiled thread spent in functions of the files that ``belongs`` picks.

    What such a function calls counts, wherever it is, waiting included; each second counts once. The profiler itself
    makes Python code slower, so the result is an upper bound.

    Args:
        profile: a finished profile.
        belongs: says of a file name whether its functions count.
    """
    statistics: Any = pstats.Stats(profile)
    total = 0.0
    for (file, _, _), (_, _, _, inclusive, callers) in statistics.stats.items():
        if belongs(file):
            if not callers:
                total += inclusive
            for (caller, _, _), edge in callers.items():
                if not belongs(caller):
                    total += edge[3]
    return total


def _is_observing(file: str) -> bool:
    return file.endswith("/lightning_odc/protocol/tracing.py") or "/lightning_odc/callbacks/" in file


def _extra(variant: str, scratch: Path) -> list[Callback]:
    if variant == "monitor":
        return [DeviceIdleMonitor(every_n_steps=1)]
    if variant.startswith("recorder"):
        steps = None
        if variant == "recorder off":
            steps = _NEVER
        return [TimelineRecorder(scratch, steps)]
    return []


def run() -> list[dict[str, Any]]:
    """All rows: of the rank that spends most."""
    by_rank = run_ranks(measure, RANKS)
    rows = []
    nothing = 0.0
    for of_ranks in zip(*by_rank, strict=True):
        row = max(of_ranks, key=lambda record: record["own"])
        if row["variant"] == "nothing":
            nothing = row["own"]
        row["own_share"] = (row["own"] - nothing) / row["seconds"]
        rows.append(row)
    return rows


def cells(row: dict[str, Any]) -> dict[str, object]:
    """A row as it is printed, by the heads of its columns."""
    share = 100 * row["own_share"]
    return {
        "communication": row["communication"],
        "with": row["variant"],
        "s/minibatch without": f"{row['seconds']:.4f}",
        "own code": f"{share:z.3f} %",
    }
