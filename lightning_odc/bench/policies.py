"""Real training under every combination of communication and policy, side by side.

``python -m lightning_odc.bench.policies`` trains the demo's model on the demo's text (functions and classes of the
Python standard library) with a `BalancedDataLoader`, the combinations in turns, and prints a Markdown table.
``--slow-rank`` makes the last rank sleep half as long as it computes, so that it is 1.5 times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.bench.processes import run_ranks
from lightning_odc.data.packing import pack_samples
from lightning_odc.demo.corpus import encode, read_corpus
from lightning_odc.demo.measure import Recorder
from lightning_odc.demo.model import SHARDED_LAYERS, ByteModel
from lightning_odc.demo.result import WARM_UP

COMBINATIONS = (
    ("collective", "local_sort"),
    ("collective", "lb_micro"),
    ("on_demand", "local_sort"),
    ("on_demand", "lb_micro"),
    ("on_demand", "lb_mini"),
    ("on_demand", "steal"),
)


class SlowedModel(ByteModel):
    """The demo's model on a device that computes ``slowness`` times slower: it sleeps after each pass."""

    slowness = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        begin = time.thread_time()
        output = super().training_step(batch, batch_idx)
        self._lag(begin)
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        begin = time.thread_time()
        super().backward(loss, *args, **kwargs)
        self._lag(begin)

    def _lag(self, begin: float) -> None:
        time.sleep((self.slowness - 1) * (time.thread_time() - begin))


def train(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All combinations and repetitions on one rank; one record per run."""
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    warnings.filterwarnings("ignore")
    corpus = read_corpus(options["max_length"])
    samples = [encode(sample) for sample in corpus.samples]
    records = []
    for _ in range(options["repetitions"]):
        for communication, policy in COMBINATIONS:
            recorder = Recorder(lambda _: None)
            loader = BalancedDataLoader(
                samples,
                lengths=corpus.lengths,
                minibatch_size=options["samples_per_rank"],
                policy=policy,
                weighting="next_token",
                collate_fn=pack_samples,
                shuffle=True,
                num_replicas=world_size,
                rank=rank,
            )
            model = SlowedModel(layers=4, hidden_size=256, max_length=options["max_length"])
            model.slowness = 1.5 if options["slow_rank"] and rank == world_size - 1 else 1.0
            _trainer(world_size, communication, recorder, WARM_UP + options["minibatches"]).fit(model, loader)
            mine = recorder.ranks[rank]
            records.append(
                {
                    "communication": communication,
                    "policy": policy,
                    "seconds": mine.seconds[WARM_UP:],
                    "idle": [sum(waits.values()) for waits in mine.waits[WARM_UP:]],
                    "losses": mine.loss_sums,
                    "tokens": mine.tokens,
                }
            )
    return records


def _trainer(world_size: int, communication: Any, recorder: Recorder, steps: int) -> Trainer:
    return Trainer(
        strategy=ODCStrategy(communication=communication, auto_wrap_policy=SHARDED_LAYERS),
        accelerator="cpu",
        devices=world_size,
        max_steps=steps,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def summarize(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per combination: seconds per minibatch, speed-up over collective + lb_micro, idle, balance bound."""
    rows = []
    for communication, policy in COMBINATIONS:
        runs = [
            [
                record
                for record in records
                if (record["communication"], record["policy"]) == (communication, policy)
            ]
            for records in by_rank
        ]
        per_run = [statistics.fmean(record["seconds"]) for record in runs[0]]
        row: dict[str, Any] = {"communication": communication, "policy": policy, "seconds_by_run": per_run}
        row["seconds"] = statistics.median(per_run)
        if communication == "on_demand":
            spans = [sum(run["seconds"]) for run in runs[0]]
            busy = [[s - sum(run["idle"]) for s, run in zip(spans, rank, strict=True)] for rank in runs]
            level = [statistics.fmean(column) for column in zip(*busy, strict=True)]
            row["idle"] = statistics.median(1 - b / s for b, s in zip(level, spans, strict=True))
            row["over_level"] = statistics.median(s / b - 1 for b, s in zip(level, spans, strict=True))
        sums = [sum(values) for values in zip(*(rank[0]["losses"] for rank in runs), strict=True)]
        counts = [sum(values) for values in zip(*(rank[0]["tokens"] for rank in runs), strict=True)]
        row["loss"] = [s / c for s, c in zip(sums, counts, strict=True)]
        rows.append(row)
    for row in rows:
        for name, base in (("local_sort", rows[0]), ("lb_micro", rows[1])):
            pairs = zip(base["seconds_by_run"], row["seconds_by_run"], strict=True)
            row[f"over_collective_{name}"] = statistics.median(a / b for a, b in pairs)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| communication | policy | s/minibatch (runs) | over collective + local_sort "
        "| over collective + lb_micro | idle | over level |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        runs = ", ".join(f"{seconds:.2f}" for seconds in row["seconds_by_run"])
        idle = f"{100 * row['idle']:.1f} %" if "idle" in row else "-"
        level = f"{100 * row['over_level']:.1f} %" if "over_level" in row else "-"
        lines.append(
            f"| {row['communication']} | {row['policy']} | {row['seconds']:.2f} ({runs}) "
            f"| x{row['over_collective_local_sort']:.2f} | x{row['over_collective_lb_micro']:.2f} | {idle} | {level} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m lightning_odc.bench.policies``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=6, help="timed ones per run")
    parser.add_argument("--samples-per-rank", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--slow-rank", action="store_true", help="make the last rank 1.5 times slower")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given = {k: v for k, v in vars(options).items() if k not in ("ranks", "json")}
    rows = summarize(run_ranks(train, options.ranks, given))
    print(table(rows))
    worst = max(
        abs(a - b) / abs(b) for row in rows for a, b in zip(row["loss"], rows[0]["loss"], strict=True)
    )
    print(f"\nlargest relative difference of any loss from those of {COMBINATIONS[0]}: {worst:.1e}")
    if options.json:
        options.json.write_text(json.dumps({"options": given, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
