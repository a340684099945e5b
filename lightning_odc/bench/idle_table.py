"""Measured idle time of communication and balancing, beside what the packer alone would estimate."""

from __future__ import annotations

import os
import statistics
import warnings
from typing import Any

from lightning.pytorch import Trainer

from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.balance.evaluate import microbatch_costs
from lightning_odc.bench.processes import run_ranks
from lightning_odc.data.packing import pack_samples
from lightning_odc.demo.corpus import encode, read_corpus
from lightning_odc.demo.measure import Recorder
from lightning_odc.demo.model import SHARDED_LAYERS, ByteModel
from lightning_odc.demo.result import WARM_UP

COMBINATIONS = (
    ("collective", "local_sort"),
    ("collective", "lb_micro"),
    ("on_demand", "lb_micro"),
    ("on_demand", "lb_mini"),
)


def estimated_idle(costs: list[list[float]], meets_in_every_microbatch: bool) -> float:
    """The part of all ranks' time that a plan leaves idle, if costs were times and nothing else took any.

    Args:
        costs: of each microbatch of each rank.
        meets_in_every_microbatch: as collectives do; on demand, ranks meet at the end of the minibatch.
    """
    if meets_in_every_microbatch:
        longest = sum(max(column) for column in zip(*costs, strict=True))
    else:
        longest = max(sum(own) for own in costs)
    return 1 - sum(map(sum, costs)) / (len(costs) * longest) if longest else 0.0


def measure(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per run on this rank."""
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    warnings.filterwarnings("ignore")
    corpus = read_corpus(options["max_length"])
    samples = [encode(sample) for sample in corpus.samples]
    steps = WARM_UP + options["minibatches"]
    records = []
    for _ in range(options["repetitions"]):
        for communication, policy in COMBINATIONS:
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
            recorder = Recorder(lambda _: None)
            model = ByteModel(layers=4, hidden_size=256, max_length=options["max_length"])
            _trainer(world_size, communication, recorder, steps).fit(model, loader)
            plans = [loader.plan(step, epoch=0) for step in range(WARM_UP, steps)]
            costs = [microbatch_costs(plan.microbatches, corpus.lengths) for plan in plans]
            record: dict[str, Any] = {"communication": communication, "policy": policy, "costs": costs}
            record["seconds"] = recorder.ranks[0].seconds[WARM_UP:]
            record["waits"] = [of_rank.waits[WARM_UP:] for of_rank in recorder.ranks]
            records.append(record)
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


def summarize(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per combination from rank 0's records, which hold all ranks' waits."""
    rows = []
    for communication, policy in COMBINATIONS:
        runs = [one for one in records if (one["communication"], one["policy"]) == (communication, policy)]
        measured = [_idle_share(run) for run in runs]
        guesses = [estimated_idle(costs, communication == "collective") for costs in runs[0]["costs"]]
        rows.append(
            {
                "communication": communication,
                "policy": policy,
                "seconds": statistics.median(statistics.fmean(run["seconds"]) for run in runs),
                "measured": statistics.median(measured),
                "measured_runs": measured,
                "estimated": statistics.fmean(guesses),
            }
        )
    return rows


def _idle_share(run: dict[str, Any]) -> float:
    idle = sum(sum(waits.values()) for of_rank in run["waits"] for waits in of_rank)
    return float(idle / (len(run["waits"]) * sum(run["seconds"])))


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    """All rows."""
    return summarize(run_ranks(measure, world_size, options)[0])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| communication | policy | s/minibatch | idle, measured (runs) | idle, estimated by the packer |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        runs = ", ".join(f"{100 * share:.1f}" for share in row["measured_runs"])
        lines.append(
            f"| {row['communication']} | {row['policy']} | {row['seconds']:.2f} "
            f"| {100 * row['measured']:.1f} % ({runs}) | {100 * row['estimated']:.1f} % |"
        )
    return "\n".join(lines)
