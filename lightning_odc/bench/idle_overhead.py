"""What the monitor and the recorder cost: the demo's training with and without them, in turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
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


def measure(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of every timed minibatch on this rank, one record per run."""
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
                    recorder = Recorder(lambda _: None)
                    trainer = _trainer(demo, communication, recorder, _extra(variant, Path(scratch)))
                    model = ByteModel(layers=4, hidden_size=256, max_length=demo.max_length)
                    trainer.fit(model, DemoData(corpus, plan))
                    seconds = recorder.record.seconds[WARM_UP:]
                    records.append({"communication": communication, "variant": variant, "seconds": seconds})
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
    records = by_rank[0]
    rows = []
    for communication in dict.fromkeys(record["communication"] for record in records):
        seconds = {
            variant: [
                span
                for record in records
                if (record["communication"], record["variant"]) == (communication, variant)
                for span in record["seconds"]
            ]
            for variant in VARIANTS
        }
        for variant in VARIANTS:
            pairs = zip(seconds[variant], seconds["nothing"], strict=True)
            costs = [own / bare - 1 for own, bare in pairs]
            middle = statistics.median(seconds[variant])
            row = {"communication": communication, "variant": variant, "seconds": middle, "costs": costs}
            rows.append(row | {"quartiles": quartiles(costs)})
    return rows


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    """All rows."""
    return summarize(run_ranks(measure, world_size, options))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| communication | with | s/minibatch, median | cost, median [quartiles] | pairs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, middle, high = (f"{100 * cost:+.2f} %" for cost in row["quartiles"])
        cost = "-" if row["variant"] == "nothing" else f"{middle} [{low}, {high}]"
        lines.append(
            f"| {row['communication']} | {row['variant']} | {row['seconds']:.4f} | {cost} | {len(row['costs'])} |"
        )
    return "\n".join(lines)
