"""The program that ``torchrun`` starts on every host of ``test_several_hosts``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_odc import Minibatch, ODCStrategy
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer

STEPS = 5
#: Microbatches of every rank in every minibatch.
COUNTS = (3, 1, 0, 4)
#: By way of sharding, what is trained one after the other.
RUNS = {"HYBRID_SHARD": [COUNTS], "FULL_SHARD": [COUNTS, (1, 1, 1, 1), (4, 4, 4, 4)]}
VOCABULARY = 20_000


def module() -> TokenModule:
    """A model whose gradient is much larger than everything else that ranks tell each other."""
    return TokenModule("items", lr=0.01, vocab=VOCABULARY)


def shares(rank: int | None, counts: tuple[int, ...] = COUNTS) -> list[Minibatch]:
    """This rank's, or all microbatches of every minibatch."""
    start = 0 if rank is None else sum(counts[:rank])
    end = sum(counts) if rank is None else start + counts[rank]
    lengths = [5, 9, 4, 7, 12, 3, 8, 6] * 2
    return [Minibatch(token_batches(lengths, seed=step)[start:end]) for step in range(STEPS)]


class Counter(Callback):
    """Reads the counter of this host's interface after every step."""

    def __init__(self) -> None:
        self.bytes_sent: list[int] = []
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        trainer.strategy.engine.exchange("nothing is under way", None)  # type: ignore[attr-defined]
        self.bytes_sent.append(int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        traffic = trainer.strategy.engine.traffic  # type: ignore[attr-defined]
        self.seen = {"parameters": full_parameters(module), "traffic": traffic, "bytes_sent": self.bytes_sent}


def run(rank: int, sharding: str, counts: tuple[int, ...]) -> dict[str, Any]:
    counter = Counter()
    strategy = ODCStrategy(sharding_strategy=sharding, hang_report_after=None)
    trainer(2, num_nodes=2, strategy=strategy, callbacks=[counter]).fit(
        module(), loader(shares(rank, counts))
    )
    return {"host": os.uname().nodename, **counter.seen}


def main(directory: str, sharding: str) -> None:
    rank = int(os.environ["RANK"])
    torch.save([run(rank, sharding, counts) for counts in RUNS[sharding]], Path(directory) / f"rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
