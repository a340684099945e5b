"""What second derivatives cost: a loss that holds forces, beside one of energies alone, under DDP and ``"odc"``.

``python -m benchmarks.second_derivatives`` prints a Markdown table, and takes a minute per round. The model is a stack
of linear blocks, whose units stay gathered until the outer backward pass ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import command
from benchmarks.command import QUIET, option
from benchmarks.harness.processes import run_ranks
from benchmarks.memory import MIB, Block, Sampler, status_bytes
from benchmarks.tables import Column, Table, spread

RANKS = 2
STEPS = 12
BATCH = 64


@dataclass(frozen=True)
class SecondDerivativeOptions:
    """How much is trained."""

    rounds: int = option(6, "trainings of every row", letter="N", least=1)
    width: int = option(768, "width of the model", letter="N", least=8)
    depth: int = option(8, "blocks of the model", letter="N", least=1)


class Potential(pl.LightningModule):
    """Learns an energy of positions, and with ``forces`` its derivative by them."""

    def __init__(self, width: int, depth: int, forces: bool) -> None:
        super().__init__()
        self.width = width
        self.forces = forces
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])

    def training_step(self, batch: Tensor) -> Tensor:
        """A mean over samples."""
        positions = batch.clone().requires_grad_(self.forces)
        energy = self.blocks(positions).mean(-1)
        loss = energy.square()
        if self.forces:
            (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
            loss = loss + forces.square().sum(-1)
        return loss.mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Positions, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        positions = torch.randn(RANKS * BATCH * STEPS, self.width, generator=generator)
        return DataLoader(positions, BATCH)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Times steps, and samples the private memory from the second on."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.sampler = Sampler()

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self.ends.append(time.monotonic())
        if len(self.ends) == 1:
            self.sampler.start()


def train(
    _: int, world_size: int, strategy: str, forces: bool, options: SecondDerivativeOptions
) -> tuple[float, int]:
    """The median seconds of a step, and the bytes that training adds to this process: model, optimizer and peaks."""
    torch.manual_seed(0)
    before = status_bytes("RssAnon")
    clock = Clock()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        callbacks=[clock],
        plugins=[LightningEnvironment()],
        **QUIET,
    )
    trainer.fit(Potential(options.width, options.depth, forces))
    peak = clock.sampler.stop()
    taken = [end - begin for begin, end in zip(clock.ends[1:], clock.ends[2:], strict=False)]
    return median(taken), peak - before


def work(options: SecondDerivativeOptions) -> int:
    """Train all rows in turns, and print the table."""
    rows: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for _ in range(options.rounds):
        for loss in ("energies", "energies and forces"):
            for strategy in ("ddp", "odc"):
                # New processes: what an older run has freed would lie there.
                trained = run_ranks(train, RANKS, strategy, loss != "energies", options)[0]
                rows.setdefault((loss, strategy), []).append(trained)
    cells = []
    for (loss, strategy), rounds in rows.items():
        milliseconds = [1000 * seconds for seconds, _ in rounds]
        added = median(size for _, size in rounds) / MIB
        cells.append([loss, f'`"{strategy}"`', spread(milliseconds, 0), added])
    columns = [
        Column("loss of"),
        Column("strategy"),
        Column("ms per step, median [least, most]"),
        Column("private MiB per rank", ".0f"),
    ]
    print(Table("second-derivatives", "Second derivatives", columns, cells).markdown())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.second_derivatives``."""
    return command.run("second_derivatives", __doc__, SecondDerivativeOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
