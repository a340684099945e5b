"""What the monitor and the recorder cost: the demo's training with and without them, in turns.

Wall-clock time answers for the user, processor time for a busy machine, where the former is lost in noise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_odc.bench.processes import run_ranks
from lightning_odc.callbacks import DeviceIdleMonitor, TimelineRecorder
from lightning_odc.demo.corpus import plan_minibatches, read_corpus
from lightning_odc.demo.data import DemoData
from lightning_odc.demo.measure import Recorder
from lightning_odc.demo.model import ByteModel
from lightning_odc.demo.options import DemoOptions
from lightning_odc.demo.result import WARM_UP, quartiles
from lightning_odc.demo.run import make_trainer

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


def measure(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of every timed minibatch on this rank, by the wall's clock and the processor's, one record per run."""
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    warnings.filterwarnings("ignore")
    demo = DemoOptions(
        devices=world_size, max_length=options["max_length"], minibatches=options["minibatches"]
    )
    corpus = read_corpus(demo.max_length)
    plan = plan_minibatches(
        corpus.lengths,
        ranks=world_size,
        samples_per_rank=options["samples_per_rank"],
        minibatches=WARM_UP + options["minibatches"],
        seed=0,
        longest_first=True,
    )
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(options["repetitions"]):
            for communication in options["modes"]:
                for variant in VARIANTS[repetition % 4 :] + VARIANTS[: repetition % 4]:
                    recorder, cpu = Recorder(lambda _: None), CpuClock()
                    extra = [cpu, *_extra(variant, Path(scratch))]
                    trainer = _trainer(demo, communication, recorder, extra)
                    model = ByteModel(layers=4, hidden_size=256, max_length=demo.max_length)
                    trainer.fit(model, DemoData(corpus, plan))
                    spans = {"seconds": recorder.record.seconds[WARM_UP:], "cpu": cpu.seconds[WARM_UP:]}
                    records.append({"communication": communication, "variant": variant, **spans})
    return records


def _trainer(demo: DemoOptions, communication: Any, recorder: Recorder, extra: list[Callback]) -> Trainer:
    trainer: Any = make_trainer(demo, communication, recorder)
    trainer.callbacks.extend(extra)
    return trainer


def _extra(variant: str, scratch: Path) -> list[Callback]:
    if variant == "monitor":
        return [DeviceIdleMonitor(every_n_steps=1)]
    if variant.startswith("recorder"):
        return [TimelineRecorder(scratch, _NEVER if variant == "recorder off" else None)]
    return []


def summarize(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per communication and variant: the cost in every minibatch, over the same one without anything."""
    records = [
        first | {"cpu": [sum(parts) for parts in zip(first["cpu"], *(o["cpu"] for o in others), strict=True)]}
        for first, *others in zip(*by_rank, strict=True)
    ]
    rows = []
    for communication in dict.fromkeys(record["communication"] for record in records):
        runs = [record for record in records if record["communication"] == communication]
        for variant in VARIANTS:
            row = {"communication": communication, "variant": variant}
            row["seconds"] = statistics.median(_spans(runs, variant, "seconds"))
            for clock, name in (("seconds", "costs"), ("cpu", "cpu_costs")):
                pairs = zip(_spans(runs, variant, clock), _spans(runs, "nothing", clock), strict=True)
                row[name] = [own / bare - 1 for own, bare in pairs]
                row[f"{name}_quartiles"] = quartiles(row[name])
            rows.append(row)
    return rows


def _spans(runs: list[dict[str, Any]], variant: str, clock: str) -> list[float]:
    return [span for run in runs if run["variant"] == variant for span in run[clock]]


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    """All rows."""
    return summarize(run_ranks(measure, world_size, options))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| communication | with | s/minibatch, median | cost, median [quartiles] | processor time | pairs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        texts = [_cost(row[f"{name}_quartiles"]) for name in ("costs", "cpu_costs")]
        cells = ["-", "-"] if row["variant"] == "nothing" else texts
        start = f"| {row['communication']} | {row['variant']} | {row['seconds']:.4f} |"
        lines.append(f"{start} {cells[0]} | {cells[1]} | {len(row['costs'])} |")
    return "\n".join(lines)


def _cost(three: Sequence[float]) -> str:
    low, middle, high = (f"{100 * cost:+.2f} %" for cost in three)
    return f"{middle} [{low}, {high}]"
