"""Real training under every combination of communication, policy and cost, side by side.

``python -m lightning_odc.bench.policies`` trains the demo's model on the demo's text (functions and classes of the
Python standard library) with a `BalancedDataLoader`, the combinations in turns, and prints a Markdown table.
``--slow-rank`` makes the last rank sleep half as long as it computes, so that it is 1.5 times slower.

Costs: ``quadratic`` is the default one, ``dense`` that of the model's configuration with attention as it is on CPUs,
``transformer(config, dense=True)``, and ``fitted`` is learnt during the run, its warm-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.balance import transformer
from lightning_odc.bench.policies_report import (
    COMBINATIONS,
    Combination,
    Run,
    summarize,
    table,
    worst_loss_difference,
)
from lightning_odc.bench.processes import run_ranks
from lightning_odc.data.packing import pack_samples
from lightning_odc.demo.corpus import encode, read_corpus
from lightning_odc.demo.measure import Recorder
from lightning_odc.demo.model import SHARDED_LAYERS, ByteModel
from lightning_odc.demo.result import WARM_UP

SLOWNESS = 1.5


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


def train(rank: int, world_size: int, options: dict[str, Any]) -> dict[Combination, list[Run]]:
    """All combinations and repetitions on one rank: its runs by combination."""
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    warnings.filterwarnings("ignore")
    corpus = read_corpus(options["max_length"])
    samples = [encode(sample) for sample in corpus.samples]
    runs: dict[Combination, list[Run]] = {key: [] for key in COMBINATIONS}
    for _ in range(options["repetitions"]):
        for key in COMBINATIONS:
            model = SlowedModel(layers=4, hidden_size=256, max_length=options["max_length"])
            model.slowness = speeds(world_size, options["slow_rank"])[rank] ** -1
            loader = BalancedDataLoader(
                samples,
                lengths=corpus.lengths,
                minibatch_size=options["samples_per_rank"],
                policy=key.policy,
                cost=transformer(model.model.config, dense=True) if key.cost == "dense" else key.cost,
                weighting="next_token",
                collate_fn=pack_samples,
                shuffle=True,
                num_replicas=world_size,
                rank=rank,
            )
            runs[key].append(_run(key, model, loader, world_size, WARM_UP + options["minibatches"]))
    return runs


def speeds(world_size: int, slow_rank: bool) -> list[float]:
    """Of every rank."""
    return [1.0] * (world_size - 1) + [1 / SLOWNESS if slow_rank else 1.0]


def _run(key: Combination, model: ByteModel, loader: BalancedDataLoader, world_size: int, steps: int) -> Run:
    recorder = Recorder(lambda _: None)
    _trainer(world_size, key.communication, recorder, steps).fit(model, loader)
    mine = recorder.ranks[int(os.environ["LOCAL_RANK"])]
    return {
        "seconds": mine.seconds[WARM_UP:],
        "idle": [sum(waits.values()) for waits in mine.waits[WARM_UP:]],
        "losses": mine.loss_sums,
        "tokens": mine.tokens,
    }


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


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m lightning_odc.bench.policies``."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_odc.bench.policies", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="processes, one rank each")
    parser.add_argument("--minibatches", type=int, metavar="N", default=6, help="timed ones per run")
    parser.add_argument(
        "--samples-per-rank",
        type=int,
        metavar="N",
        default=8,
        help="samples of each rank in a minibatch, on average",
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", default=3, help="how often each combination trains"
    )
    parser.add_argument("--max-length", type=int, metavar="N", default=2048, help="longest sample in tokens")
    parser.add_argument("--slow-rank", action="store_true", help="make the last rank 1.5 times slower")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given = {k: v for k, v in vars(options).items() if k not in ("ranks", "json")}
    by_rank = run_ranks(train, options.ranks, given)
    rows = summarize(by_rank, speeds(options.ranks, options.slow_rank))
    print(table(rows))
    print(
        f"\nlargest relative difference of any loss from those of the first row: {worst_loss_difference(rows):.1e}"
    )
    if options.json:
        record = {"options": given, "rows": [row.record() for row in rows]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
