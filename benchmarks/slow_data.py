"""What slow samples cost: seconds to the first step, and two epochs, under DDP, with known lengths, and without.

``python -m benchmarks.slow_data`` prints the table of ``docs/data/slow-data.md``. Reading a
sample takes 20 ms of sleep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_odc  # noqa: F401 - registers "odc"
from benchmarks import command
from benchmarks.command import QUIET, markdown, option
from benchmarks.harness.processes import RankProcesses
from benchmarks.projects import LanguageModel, Texts, pad
from benchmarks.tables import spread

_READING = 0.02


class SlowTexts(Dataset[Any]):
    """The same texts over and over, each of which takes a while to read."""

    def __init__(self, count: int) -> None:
        self.texts = Texts()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(_READING)
        return self.texts[index % len(self.texts)]


class KnownTexts(SlowTexts):
    """Says how long they are."""

    @property
    def lengths(self) -> list[int]:
        """One for each."""
        return [len(self.texts[index % len(self.texts)]["input_ids"]) for index in range(self.count)]


class Fit(NamedTuple):
    """What was measured, in seconds."""

    first: float  # to the end of the first step
    epochs: list[float]


class Watch(pl.Callback):
    """Notes when the first step and each epoch end."""

    def __init__(self) -> None:
        self.first = 0.0
        self.begin = time.monotonic()
        self.epochs: list[float] = []

    def on_train_epoch_start(self, *_: object) -> None:
        self.epoch = time.monotonic()

    def on_train_batch_end(self, *_: object) -> None:
        self.first = self.first or time.monotonic() - self.begin

    def on_train_epoch_end(self, *_: object) -> None:
        self.epochs.append(time.monotonic() - self.epoch)


def fit(_: int, ranks: int, strategy: str, data: SlowTexts, length: dict[str, Any]) -> Fit:
    """Train on this rank."""
    torch.manual_seed(0)
    loader = DataLoader(data, 4, shuffle=True, collate_fn=pad)
    watch = Watch()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        accumulate_grad_batches=2,
        callbacks=[watch],
        **QUIET,
        **length,
    )
    trainer.fit(LanguageModel(), loader)
    return Fit(watch.first, watch.epochs)


@dataclass(frozen=True)
class SlowDataOptions:
    """How much is read."""

    samples: int = option(100_000, "samples of which one step is trained", letter="N", least=64)
    rounds: int = option(3, "trainings of every row", letter="N", least=1)


def work(options: SlowDataOptions) -> int:
    """Train all rows in turns, and print the table."""
    cases = {
        '`"ddp"`': ("ddp", SlowTexts),
        '`"odc"`': ("odc", SlowTexts),
        '`"odc"`, lengths known': ("odc", KnownTexts),
    }
    first: dict[str, list[float]] = {name: [] for name in cases}
    epochs: dict[str, list[list[float]]] = {name: [[], []] for name in cases}
    with RankProcesses(2, preload=[__name__]) as ranks:
        for _ in range(options.rounds):
            for name, (strategy, kind) in cases.items():
                begun = ranks.call(fit, strategy, kind(options.samples), {"max_steps": 1})[0]
                first[name].append(begun.first)
                trained = ranks.call(fit, strategy, kind(128), {"max_epochs": 2})[0]
                for number, seconds in enumerate(trained.epochs):
                    epochs[name][number].append(seconds)
                print(name, begun.first, trained.epochs, flush=True)
    rows = [[name, *map(spread, [first[name], *epochs[name]])] for name in cases]
    print(markdown(["strategy", "s to the first step", "s of the first epoch", "s of the second"], rows))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.slow_data``."""
    return command.run("slow_data", __doc__, SlowDataOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
