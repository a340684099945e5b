"""Hybrid sharding over two hosts against stock ``fully_shard``: bytes over the link and time per minibatch.

``python -m benchmarks.hybrid`` makes two hosts of network namespaces (it needs root and ``ip``), with two
ranks each and a link of limited speed, trains a model on samples of very different lengths, the variants in turns, and
prints a Markdown table. Computing is sleeping, for a time that grows with the square of the length, forward and
backward and layer by layer: four ranks on few cores would measure how they share them. What moves is real.

- ``stock`` is ``communication="collective"``: HSDP as ``fully_shard`` does it, a sum over hosts in every microbatch;
- ``stock, one sum`` is the same with ``set_requires_all_reduce(False)`` in all but the last microbatch;
- ``on demand`` has one sum per minibatch, and with ``lb_mini`` numbers of microbatches that differ by rank.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import run_ranks
from benchmarks.hosts import Hosts, bytes_sent, several_hosts
from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.balance import Policy, PolynomialCost
from notebooks.support.sleeping import Pause

_RANKS = 4
_WARM_UP = 2
LAYERS = 4


class Variant(NamedTuple):
    """What is compared."""

    name: str
    communication: str
    policy: Policy
    one_sum: bool = False


VARIANTS = (
    Variant("stock", "collective", "lb_micro"),
    Variant("stock, one sum", "collective", "lb_micro", one_sum=True),
    Variant("on demand", "on_demand", "lb_micro"),
    Variant("on demand", "on_demand", "lb_mini"),
)


class Layer(nn.Module):
    """A unit that takes ``seconds``, beside what its matrices take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        y: Tensor = Pause.apply(self.down(torch.tanh(self.up(x))), seconds)  # type: ignore[no-untyped-call]
        return x + y


class Sleeper(LightningModule):
    """Its layers take ``seconds`` per squared token, divided among them."""

    def __init__(self, width: int, seconds: float, one_sum: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.width = width
        self.seconds = seconds / LAYERS
        self.one_sum = one_sum
        self.left = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.left = len(batch)

    def training_step(self, lengths: Tensor, batch_idx: int) -> dict[str, Any]:
        self.left -= 1
        if self.one_sum:
            self.set_requires_all_reduce(self.left == 0)  # type: ignore[operator]
        x = torch.ones(1, self.width)
        for layer in self.layers:
            x = layer(x, self.seconds * float(lengths.square().sum()))
        tokens = float(lengths.sum())
        return {"loss": x.mean() * tokens, "num_items": tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Recorder(Callback):
    """Looks at clock and counter after the warm-up and at the end, when nothing is under way on any rank."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.seen: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step in (_WARM_UP, _WARM_UP + self._steps):
            engine = trainer.strategy.engine  # type: ignore[attr-defined]
            engine.exchange("all are here", None)
            self.seen.append((time.monotonic(), bytes_sent()))
            engine.exchange("all have looked", None)


def train(rank: int, world_size: int, options: dict[str, Any], hosts: Hosts) -> list[list[dict[str, Any]]]:
    """All variants and repetitions on one rank: by variant, a record of every run."""
    os.environ |= {"LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2), "MASTER_ADDR": hosts.address(0)}
    runs: list[list[dict[str, Any]]] = [[] for _ in VARIANTS]
    for _ in range(options["repetitions"]):
        for index, variant in enumerate(VARIANTS):
            runs[index].append(_run(variant, rank, world_size, options))
    return runs


def lengths_of(count: int, longest: int) -> list[int]:
    """Lognormal lengths with a median of a fifth of the longest, cut off there."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(count).log_normal_(0, 0.75, generator=generator) * longest / 5
    return [int(length) for length in drawn.clamp(1, longest)]


def _run(variant: Variant, rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    lengths = lengths_of((_WARM_UP + options["minibatches"]) * options["samples"] * world_size, 2048)
    module = Sleeper(options["width"], options["seconds"] / 2048**2, variant.one_sum)
    recorder = _Recorder(options["minibatches"])
    loader = BalancedDataLoader(
        lengths,
        lengths=lengths,
        minibatch_size=options["samples"],
        balance=variant.policy,
        cost=PolynomialCost(quadratic=1.0, linear=0.0),  # what `Sleeper` does
        collate_fn=torch.tensor,
        num_replicas=world_size,
        rank=rank,
    )
    Trainer(
        strategy=ODCStrategy(
            sharding_strategy="HYBRID_SHARD",
            communication=variant.communication,  # type: ignore[arg-type]
            auto_wrap_policy={Layer},
        ),
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        max_epochs=1,
        callbacks=[recorder],
        **QUIET,
    ).fit(module, loader)
    (begin, sent_before), (end, sent) = recorder.seen
    seconds = (end - begin) / options["minibatches"]
    gradient = 4 * sum(parameter.numel() for parameter in module.parameters())
    return {
        "seconds": seconds,
        "bytes": (sent - sent_before) / options["minibatches"],
        "gradient": gradient,
    }


def summarize(by_rank: list[list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One row per variant: seconds of the slowest rank by repetition, bytes that the first host sent."""
    rows = []
    for index, variant in enumerate(VARIANTS):
        repetitions = range(len(by_rank[0][index]))
        seconds = [max(runs[index][r]["seconds"] for runs in by_rank) for r in repetitions]
        sent = statistics.median(by_rank[0][index][r]["bytes"] for r in repetitions)
        gradient = by_rank[0][index][0]["gradient"]
        rows.append({**variant._asdict(), "seconds": seconds, "bytes": sent, "gradient": gradient})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    head = ("sharding", "policy", "seconds per minibatch", "faster than stock", "single repetitions")
    stock = rows[0]["seconds"]
    return markdown(
        [*head, "bytes over the link per minibatch", "in gradients"], [_cells(row, stock) for row in rows]
    )


def _cells(row: dict[str, Any], stock: list[float]) -> list[str]:
    ratios = [theirs / own for theirs, own in zip(stock, row["seconds"], strict=True)]  # side by side
    return [
        *(row["name"], f"`{row['policy']}`", f"{statistics.median(row['seconds']):.3f}"),
        *(f"{statistics.median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)),
        *(f"{row['bytes']:,.0f}", f"{row['bytes'] / row['gradient']:.3f}"),
    ]


def prepare(hosts: Hosts, rank: int) -> None:
    """Put a rank on its host, two on each."""
    hosts.enter(rank // 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.hybrid``."""
    parser = parser_of("hybrid", __doc__)
    parser.add_argument("--minibatches", type=int, metavar="N", default=8, help="timed ones per run")
    parser.add_argument(
        "--samples", type=int, metavar="N", default=6, help="per rank and minibatch, on average"
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", default=3, help="how often each variant trains"
    )
    parser.add_argument("--width", type=int, metavar="N", default=256, help="of the model")
    parser.add_argument(
        "--seconds", type=float, metavar="S", default=0.4, help="that a sample of 2048 tokens takes"
    )
    parser.add_argument(
        "--mbit", type=float, metavar="N", default=1000.0, help="speed of the link per direction"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    given = {k: v for k, v in vars(options).items() if k != "json"}
    with several_hosts(2) as hosts:
        hosts.limit(options.mbit)
        rows = summarize(run_ranks(train, _RANKS, given, hosts, prepare=partial(prepare, hosts)))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"options": given, "rows": rows}, indent=2) + "\n")
