"""What the monitor and the recorder cost: the demo's training with and without them, in turns.

Times of whole minibatches answer for everything, down to the noise of the machine. The time inside the callbacks' own
code, by a profile, is an upper bound for what they do in the training thread, and exact enough to see a thousandth.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from benchmarks.harness.options import Combination, TrainOptions
from benchmarks.harness.processes import run_ranks
from benchmarks.harness.results import WARM_UP, MinibatchRecord
from benchmarks.harness.training import fit
from benchmarks.harness.workload import Workload
from benchmarks.tables import quartiles
from lightning_odc.callbacks import DeviceIdleMonitor, TimelineRecorder

VARIANTS = ("nothing", "monitor", "recorder off", "recorder on")
_NEVER = (10**9, 10**9)


class CpuClock(Callback):
    """Processor seconds of this process, all threads, from minibatch to minibatch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        now = time.process_time()
        if self._began is not None:
            self.seconds.append(now - self._began)
        self._began = now

    def on_train_end(self, *_: Any) -> None:
        self.on_train_batch_start()


class MinibatchProfiler(Callback):
    """Profiles this rank's training thread from the first minibatch to the end of the last."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def on_train_start(self, *_: Any) -> None:
        self.profile.enable()

    def on_train_end(self, *_: Any) -> None:
        self.profile.disable()


def measure(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per run of this rank: seconds of every timed minibatch, by the wall's clock and the processor's.

    One more run of each variant is profiled instead, and has the mean seconds per minibatch in the callbacks' code.
    """
    asked = {name: options[name] for name in ("max_length", "minibatches", "samples_per_rank")}
    trained = TrainOptions(ranks=world_size, **asked)
    run_one = partial(_fit, rank, world_size, trained)
    count = WARM_UP + trained.minibatches
    records: list[dict[str, Any]] = []
    for repetition in range(options["repetitions"] + 1):
        for communication in options["modes"]:
            first = repetition % 4
            for variant in VARIANTS[first:] + VARIANTS[:first]:
                record: dict[str, Any] = {"communication": communication, "variant": variant}
                if repetition < options["repetitions"]:
                    cpu = CpuClock()
                    seconds = run_one(communication, variant, cpu)
                    record["seconds"] = seconds[WARM_UP:]
                    record["cpu"] = cpu.seconds[WARM_UP:]
                    records.append(record)
                else:
                    profiler = MinibatchProfiler()
                    run_one(communication, variant, profiler)
                    own = seconds_in(profiler.profile, _is_observing) / count
                    records.append(record | {"own": own})
    return records


def _fit(
    rank: int, world_size: int, options: TrainOptions, communication: str, variant: str, observer: Callback
) -> list[float]:
    """Train once; seconds of each minibatch."""
    records: list[MinibatchRecord] = []
    combination = Combination(communication, "local_sort")
    with tempfile.TemporaryDirectory() as scratch:
        callbacks = [observer, *_extra(variant, Path(scratch))]
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
            entered = [edge[3] for (caller, _, _), edge in callers.items() if not belongs(caller)]
            total += sum(entered) if callers else inclusive
    return total


def _is_observing(file: str) -> bool:
    return file.endswith("/lightning_odc/engine/tracing.py") or "/lightning_odc/callbacks/" in file


def _extra(variant: str, scratch: Path) -> list[Callback]:
    if variant == "monitor":
        return [DeviceIdleMonitor(every_n_steps=1)]
    if variant.startswith("recorder"):
        return [TimelineRecorder(scratch, _NEVER if variant == "recorder off" else None)]
    return []


def summarize(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per communication and variant: the cost in every minibatch, over the same one without anything."""
    timed = []
    own = {}
    for of_ranks in zip(*by_rank, strict=True):
        first = of_ranks[0]
        if "cpu" in first:
            processor = [rank["cpu"] for rank in of_ranks]
            of_all = [sum(parts) for parts in zip(*processor, strict=True)]
            timed.append(first | {"cpu": of_all})
        if "own" in first:
            key = (first["communication"], first["variant"])
            own[key] = max(rank["own"] for rank in of_ranks)
    rows = []
    for communication in dict.fromkeys(record["communication"] for record in timed):
        runs = [record for record in timed if record["communication"] == communication]
        bare = statistics.median(_spans(runs, "nothing", "seconds"))
        for variant in VARIANTS:
            row = {"communication": communication, "variant": variant}
            row["seconds"] = statistics.median(_spans(runs, variant, "seconds"))
            for clock, name in (("seconds", "costs"), ("cpu", "cpu_costs")):
                pairs = zip(_spans(runs, variant, clock), _spans(runs, "nothing", clock), strict=True)
                row[name] = [mine / without - 1 for mine, without in pairs]
                row[f"{name}_quartiles"] = quartiles(row[name])
            more = own[communication, variant] - own[communication, "nothing"]
            row["own_share"] = more / bare
            rows.append(row)
    return rows


def _spans(runs: list[dict[str, Any]], variant: str, clock: str) -> list[float]:
    return [span for run in runs if run["variant"] == variant for span in run[clock]]


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    """All rows."""
    return summarize(run_ranks(measure, world_size, options))


def cells(row: dict[str, Any]) -> dict[str, object]:
    """A row as it is printed, by the heads of its columns."""
    own_code = f"{100 * row['own_share']:z.3f} %"
    printed = {
        "communication": row["communication"],
        "with": row["variant"],
        "s/minibatch": f"{row['seconds']:.4f}",
        "cost, median [quartiles]": _cost(row["costs_quartiles"]),
        "processor time": _cost(row["cpu_costs_quartiles"]),
        "pairs": len(row["costs"]),
        "own code": own_code,
    }
    if row["variant"] == "nothing":  # with which the others are compared
        printed |= {"cost, median [quartiles]": "-", "processor time": "-", "own code": "-"}
    return printed


def _cost(three: Sequence[float]) -> str:
    low, middle, high = [f"{100 * cost:+.2f} %" for cost in three]
    return f"{middle} [{low}, {high}]"
