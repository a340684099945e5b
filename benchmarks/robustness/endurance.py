"""Ten thousand minibatches of a tiny model: does anything grow, and is the end still that of one process?

``python -m benchmarks.robustness.endurance`` is what ``docs/data/faults.md`` reports. Every rank runs a random
number of microbatches of random lengths, with random delays; memory, file descriptors and threads are read from time
to time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc import Minibatch
from tests.support.modules import TokenModule, full_parameters, trainer
from tests.support.ranks import run_ranks

SEED = 5
MOST = 3  # microbatches of one rank in one minibatch
LOOKS = 20


def share(step: int, rank: int) -> list[Tensor]:
    """A rank's microbatches in one minibatch."""
    rng = random.Random(f"{SEED} {step} {rank}")
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    found = []
    for _ in range(rng.randint(0, MOST)):
        one = torch.randint(11, (1, rng.randint(2, 8)), generator=generator)
        found.append(one)
    return found


class Shares(IterableDataset[Any]):
    """Makes every share on request, sometimes late."""

    def __init__(self, steps: int, rank: int) -> None:
        self.steps = steps
        self.rank = rank

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Minibatch]:
        rng = random.Random(self.rank)
        for step in range(self.steps):
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.01)
            yield Minibatch(share(step, self.rank))


class Module(TokenModule):
    """Trained in fp32 on the ranks, and in fp64 in the process to compare with."""

    def __init__(self) -> None:
        super().__init__("items", depth=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.net(batch)
        targets = batch[0, 1:]
        loss = nn.functional.cross_entropy(logits[0, :-1], targets, reduction="sum")
        return {"loss": loss, "num_items": batch.numel() - 1}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def usage() -> dict[str, int]:
    """What this process holds: anonymous and shared memory in KiB, descriptors, threads, mappings."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    private_kib = int(status["RssAnon"].split()[0])
    shared_kib = int(status["RssShmem"].split()[0])
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return {
        "private_kib": private_kib,
        "shared_kib": shared_kib,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count(),
        "mappings": mappings,
    }


class Looks(Callback):
    """Reads the usage at even distances."""

    def __init__(self, steps: int) -> None:
        self.every = max(steps // LOOKS, 1)
        self.found: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.found.append({"step": trainer.global_step, **usage()})


def train(rank: int, world_size: int, steps: int) -> Any:
    """One rank; returns its parameters, the looks, and its waits and traffic."""
    looks = Looks(steps)
    module = Module()
    fit = trainer(world_size, callbacks=[looks, Reads()])
    fit.fit(module, DataLoader(Shares(steps, rank), batch_size=None))
    assert fit.global_step == steps
    reads = next(c.reads for c in fit.callbacks if isinstance(c, Reads))  # type: ignore[attr-defined]
    return full_parameters(module), looks.found, reads


class Reads(Callback):
    """How many shards this rank has read."""

    reads = 0

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.reads = trainer.strategy.engine.traffic.reads


def reference(world_size: int, steps: int) -> dict[str, Tensor]:
    """One process, plain torch, all ranks' microbatches."""
    torch.set_num_threads(1)
    module = Module().double()
    optimizer = module.configure_optimizers()
    for step in range(steps):
        batches = [batch for rank in range(world_size) for batch in share(step, rank)]
        outputs = [module.training_step(batch, 0) for batch in batches]
        optimizer.zero_grad()
        for output in outputs:
            (output["loss"] / sum(o["num_items"] for o in outputs)).backward()
        if outputs:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def growth(looks: list[dict[str, int]]) -> dict[str, int]:
    """What the last look shows more than the one after a quarter of the steps."""
    early = looks[len(looks) // 4]
    late = looks[-1]
    return {name: late[name] - early[name] for name in late if name != "step"}


def endure(steps: int, world_size: int = 4, timeout: float = 120) -> dict[str, Any]:
    """Train and compare.

    Returns:
        ``growth`` by rank (see `growth`), ``looks`` by rank, the largest ``difference`` of a parameter from one
        process, the shards that were ``read``, ``seconds``.
    """
    begin = time.monotonic()
    results = run_ranks(train, world_size, steps, world_size=world_size, timeout=timeout)
    seconds = time.monotonic() - begin
    expected = reference(world_size, steps)
    differences = []
    for name in expected:
        difference = results[0][0][name] - expected[name]
        differences.append(float(difference.abs().max()))
    read = [reads for _, _, reads in results]
    return {
        "steps": steps,
        "ranks": world_size,
        "seconds": seconds,
        "difference": max(differences),
        "growth": [growth(looks) for _, looks, _ in results],
        "read": read,
        "looks": [looks for _, looks, _ in results],
    }


def main(arguments: list[str] | None = None) -> int:
    """Endure; print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness.endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    found = endure(options.steps, options.ranks, timeout=7200)
    shown = {name: value for name, value in found.items() if name != "looks"}
    print(json.dumps(shown, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
