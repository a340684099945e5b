"""How long a fit takes to begin: import, and every phase up to the first step; and a second step to compare with.

``python -m benchmarks.start_up`` prints a Markdown table. ``--width 1024 --layers 30`` has 315 million parameters, and
``--width 2048 --layers 24`` a billion. In ``--precision bf16-true``, that one takes 16 GB.
"""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import run_ranks
from benchmarks.projects import pad
from lightning_odc import ODCStrategy

RANKS = 2
#: Hooks in the order of Lightning, and what has ended when each is called.
PHASES = {
    "setup": "ranks and process group",
    "on_fit_start": "sharding and values",
    "on_train_start": "windows, proof and lengths",
    "on_train_epoch_start": "trial of the loss",
    "on_before_zero_grad": "plan, reading, audit and forward passes",
    "on_train_batch_end": "rest of the first step",
    "on_train_end": "second step, which has no audit",
}


class Made(Dataset[Any]):
    """Samples of 5 to 94 tokens, made when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": list(range(1, 6 + index % 90))}


class Large(pl.LightningModule):
    """A Llama that begins on the meta device."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **self.sizes)
            self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Phases(pl.Callback):
    """When each hook was called first."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        for name in PHASES:
            setattr(self, name, lambda *_, name=name, **__: self.times.setdefault(name, time.monotonic()))


def fit(
    _: int, world_size: int, width: int, layers: int, texts: int, precision: Any
) -> tuple[int, list[float]]:
    """Parameters, and the seconds of every phase."""
    phases = Phases()
    module = Large(width, layers)
    trainer = pl.Trainer(
        strategy=ODCStrategy(sharding_strategy="FULL_SHARD"),
        accelerator="cpu",
        devices=world_size,
        max_steps=2,
        callbacks=[phases],
        precision=precision,
        **QUIET,
    )
    begin = time.monotonic()
    trainer.fit(module, DataLoader(Made(texts), texts // 8, collate_fn=pad))
    times = [begin, *(phases.times[name] for name in PHASES)]
    count = sum(parameter.numel() for parameter in module.parameters())
    return count, [after - before for before, after in pairwise(times)]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.start_up``."""
    parser = parser_of("start_up", __doc__)
    parser.add_argument("--width", type=int, metavar="N", default=128, help="width of the model")
    parser.add_argument("--layers", type=int, metavar="N", default=6, help="its layers")
    parser.add_argument("--texts", type=int, metavar="N", default=64, help="of the fit; a step has a quarter")
    parser.add_argument("--precision", default="32-true", help="of the fit, such as bf16-true")
    given = parser.parse_args(arguments)
    rows = []
    for package in ("lightning.pytorch", "lightning.pytorch, lightning_odc"):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {package}"], check=True)
        row = [f"`import {package}`", f"{time.monotonic() - begin:.2f}"]
        rows.append(row)
    by_rank = run_ranks(fit, RANKS, given.width, given.layers, given.texts, given.precision)
    count, seconds = by_rank[0]
    for text, taken in zip(PHASES.values(), seconds, strict=True):
        rows.append([text, f"{taken:.2f}"])
    print(f"{count / 1e6:,.1f} million parameters, rank 0 of {RANKS}\n")
    print(markdown(["phase", "s"], rows))


if __name__ == "__main__":
    main()
