"""Ranks on several hosts: forked ones that enter a network namespace each (see ``benchmarks.hosts``)."""

from __future__ import annotations

import os
import socket
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.hosts import Hosts, bytes_sent
from lightning_odc import Minibatch, ODCStrategy
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.nodes import as_nodes

STEPS = 5
#: Microbatches of every rank in every minibatch.
COUNTS = (3, 1, 0, 4)
#: With so many words the gradient is much larger than everything else that ranks tell each other.
MANY = 20_000


def start_on(hosts: Hosts, rank: int) -> None:
    """Move a rank, which has begun nothing yet, to its host: two on each."""
    hosts.enter(rank // 2)
    as_nodes(rank)
    os.environ |= {"MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the tests' own is on a third host


def module() -> TokenModule:
    return TokenModule("items", lr=0.01, vocab=MANY)


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
        self.bytes_sent.append(bytes_sent())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        traffic = trainer.strategy.engine.traffic  # type: ignore[attr-defined]
        self.seen = {"parameters": full_parameters(module), "traffic": traffic, "bytes_sent": self.bytes_sent}


def run(rank: int, sharding: str = "FULL_SHARD", counts: tuple[int, ...] = COUNTS) -> dict[str, Any]:
    counter = Counter()
    strategy = ODCStrategy(balance=None, sharding_strategy=sharding, hang_report_after=None)
    trainer(2, num_nodes=2, strategy=strategy, callbacks=[counter]).fit(
        module(), loader(shares(rank, counts))
    )
    return {"host": socket.gethostname(), **counter.seen}
