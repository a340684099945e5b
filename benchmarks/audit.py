"""What an audit of the rule costs: every other minibatch has one, so that a slow minute hits both kinds.

``python -m benchmarks.audit`` trains projects of `benchmarks.one_line` on two ranks, and prints a Markdown table. An
audit is due in the first minibatch, and after 10, 100, 1,000, ... of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import cycle
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import RankProcesses
from benchmarks.one_line import ODC, PROJECTS, loader_of
from lightning_odc import ODCStrategy
from lightning_odc.trial.audit import Audit

RANKS = 2


class Times(pl.Callback):
    """Seconds of every minibatch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.monotonic() - self._begin)


def fit(rank: int, world_size: int, project: str, epochs: int) -> tuple[list[float], list[str]]:
    """Seconds of every minibatch, of which the first, the third and so on have an audit; and what audits found."""
    pl.seed_everything(0, verbose=False)
    chosen = PROJECTS[project]
    times = Times()
    due = cycle([True, False])
    found: list[str] = []
    audit = Audit.of

    def kept(self: Audit, *args: Any) -> str:
        found.append(audit(self, *args))
        return found[-1]

    trainer = pl.Trainer(
        strategy=ODCStrategy(hang_report_after=None),
        accelerator="cpu",
        devices=world_size,
        max_epochs=epochs,
        callbacks=[times],
        plugins=[LightningEnvironment()],
        **QUIET,
    )
    with patch.object(Audit, "is_due", lambda _: next(due)), patch.object(Audit, "of", kept):
        trainer.fit(chosen.module(), loader_of(chosen, ODC, rank, world_size))
    return times.seconds, found


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.audit``."""
    parser = parser_of("audit", __doc__)
    parser.add_argument(
        "--projects", nargs="+", choices=PROJECTS, default=["padding", "regression", "classes"]
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=12, help="of four minibatches each")
    options: argparse.Namespace = parser.parse_args(arguments)
    rows = []
    with RankProcesses(RANKS, preload=["benchmarks.harness.models"]) as ranks:
        for name in options.projects:
            by_rank = ranks.call(fit, name, options.epochs)
            assert all(found and not any(found) for _, found in by_rank), (
                "audits ran, and contradicted nothing"
            )
            seconds = [max(of_ranks) for of_ranks in zip(*(times for times, _ in by_rank), strict=True)]
            audited = statistics.median(seconds[4::2])  # after the first epoch
            plain = statistics.median(seconds[5::2])
            cost = audited / plain - 1
            shares = []
            for share in (4 * cost / 1001, cost / 9000):
                one_share = f"{share:.2%}"
                shares.append(one_share)
            row = [PROJECTS[name].title, f"{1e3 * plain:.0f}", f"{1e3 * audited:.0f}", *shares]
            rows.append(row)
    head = ("project", "ms per minibatch", "with an audit", "of the first 1,001", "of the next 9,000")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
