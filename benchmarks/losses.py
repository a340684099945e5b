"""Which gradient do ordinary losses train with? Every kind of loss, under each strategy, against one process.

``python -m benchmarks.losses`` prints a Markdown table. A step of SGD shows the gradient. An error is the largest
difference of a parameter from what one process computes on the whole minibatch, over the largest change of a parameter.
Where a loss couples samples, that process computes the batches that a distributed sampler deals out. All in float64.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import RankProcesses
from lightning_odc import ODCStrategy
from lightning_odc.files import write_json
from tests.support.losses import KINDS, RANDOM, STATEFUL, Losses, collate, dealt, meant, samples
from tests.support.models import full_parameters

BATCH = 4
ACCUMULATED = 2
WORLD = 2


class Clock(pl.Callback):
    """Times what the strategy does before the first batch: mostly the trial."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.began = time.monotonic()
        self.ran = pl_module.steps_run

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.seconds = time.monotonic() - self.began


def fit(_rank: int, _world_size: int, kind: str, name: str) -> tuple[dict[str, Any], float, str]:
    """Parameters after a step of one strategy, seconds before the first batch, and what microbatches counted."""
    module = Losses(kind).double()
    clock = Clock()
    strategy: Any = ODCStrategy(hang_report_after=None, balance="auto")  # as "odc", in version 0.1, too
    is_ddp = name == "ddp"
    if is_ddp:
        strategy = "ddp_find_unused_parameters_true"
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATED,
        use_distributed_sampler=is_ddp,
        callbacks=[clock],
        plugins=[LightningEnvironment()],
        **QUIET,
    )
    data: Any = samples()
    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
    if name == "ddp":  # in order, as the strategies take them
        order: Any = torch.utils.data.DistributedSampler(data, WORLD, trainer.global_rank, shuffle=False)
        trainer.use_distributed_sampler = False  # type: ignore[attr-defined]
        loader = DataLoader(data, batch_size=BATCH, collate_fn=collate, sampler=order)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    options = getattr(trainer.train_dataloader, "options", None)
    counts = getattr(options, "whole", "") and "whole batches"
    if not counts:
        counter = getattr(options, "counter", None)
        counts = str(counter or getattr(options, "weighting", ""))
    return full_parameters(module), clock.seconds, counts


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors."""
    difference = one.detach() - other.detach()
    return float(difference.abs().max())


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.losses``."""
    parser = parser_of("losses", __doc__)
    parser.add_argument("--strategies", nargs="+", default=["odc", "ddp"], help='"odc" or "ddp"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all errors there, too")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    batches = dealt(samples(), WORLD, BATCH)
    with RankProcesses(WORLD, preload=["transformers"]) as ranks:
        for kind in KINDS:
            before = dict(Losses(kind).double().named_parameters())
            expected = meant(kind, batches, WORLD)
            moved = max(_distance(expected[name], before[name]) for name in expected)
            row: dict[str, Any] = {"moved": moved}
            for strategy in options.strategies:
                parameters, seconds, counts = ranks.call(fit, kind, strategy)[0]
                error = max(_distance(parameters[name], expected[name]) for name in expected)
                row[strategy] = {"error": error / moved, "start": seconds, "counts": counts}
            found[kind] = row
    print(table(found, options.strategies))
    for strategy in options.strategies:
        seconds = statistics.median(row[strategy]["start"] for row in found.values())
        print(f"{strategy}: {seconds:.3f} s before batch 0")
    if options.json:
        write_json(options.json, found)


def table(found: dict[str, Any], strategies: list[str]) -> str:
    """One row per kind; an error only where there is one number to compare with."""
    rows = []
    for kind, row in found.items():
        has_error = kind not in (*RANDOM, *STATEFUL)
        errors = [f"{row[name]['error']:.0e}" if has_error else "random" for name in strategies]
        rows.append((kind, row[strategies[0]]["counts"], *errors))
    return markdown(
        ("`training_step` returns", "counts", *(f'`"{name}"` off by' for name in strategies)), rows
    )


if __name__ == "__main__":
    main()
