"""What a step takes, in time and memory, where the model is whole on each rank, beside DDP and beside shards.

``python -m benchmarks.whole`` prints a Markdown table. Rows run one after another, round by round. The peak is that of
a rank's private and shared memory, above what it had before the fit. ``--write`` puts the table into
``docs/data/whole.md``.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from benchmarks import command
from benchmarks.command import QUIET, option
from benchmarks.harness.processes import run_ranks
from benchmarks.memory import MIB, status_bytes
from benchmarks.tables import Column, Table, spread, write_into
from lightning_odc import ODCStrategy
from notebooks.support.models import byte_llama

PAGE = Path(__file__).parents[1] / "docs" / "data" / "whole.md"
TOKENS = 64
STRATEGIES: dict[str, Callable[[], Any]] = {
    "`ddp`": lambda: "ddp",
    '`"odc"`, whole': partial(ODCStrategy, sharding_strategy="NO_SHARD", hang_report_after=None),
    '`"odc"`, `FULL_SHARD`': partial(ODCStrategy, sharding_strategy="FULL_SHARD", hang_report_after=None),
}


class Encoder(pl.LightningModule):
    """Four small layers of an encoder, with nothing to balance."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.embed = nn.Embedding(256, 32)
        self.net = nn.TransformerEncoder(layer, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(self.embed(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])


class Llama(Encoder):
    """A causal language model; with adapters over a frozen base in bf16, or all of it trained in fp32."""

    def __init__(self, width: int, layers: int, adapters: bool) -> None:
        pl.LightningModule.__init__(self)
        model: Any = LlamaForCausalLM(byte_llama(layers, width, TOKENS))
        if adapters:
            import peft

            config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model.to(torch.bfloat16), config)
        self.model = model

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "4 encoder layers, 32 wide": Encoder,
    "Llama of 100 M": partial(Llama, 960, 9, False),
    "LoRA over a frozen bf16 Llama of 300 M": partial(Llama, 1536, 10, True),
}


class Watch(pl.Callback):
    """Times steps, and looks at memory every 10 ms."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.peak = self._before = status_bytes("VmRSS")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, status_bytes("VmRSS"))

    def on_train_batch_end(self, *_: object) -> None:
        self.times.append(time.monotonic())

    def on_train_end(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak -= self._before


class Fit(NamedTuple):
    """What a fit took on a rank."""

    parameters: int
    first: float  # seconds to the end of the first step
    step: float  # the median of the later ones
    peak: int  # bytes


def fit(_: int, world_size: int, model: str, strategy: str, steps: int) -> Fit:
    """Train one row."""
    torch.manual_seed(0)
    module = MODELS[model]()
    count = sum(parameter.numel() for parameter in module.parameters())
    watch = Watch()
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        devices=world_size,
        max_steps=steps,
        callbacks=[watch],
        **QUIET,
    )
    begin = time.monotonic()
    data = torch.randint(256, (2 * world_size * steps, TOKENS))
    samples: Any = list(data)
    trainer.fit(module, DataLoader(samples, 2))
    later = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
    return Fit(count, watch.times[0] - begin, statistics.median(later), watch.peak)


@dataclass(frozen=True)
class WholeOptions:
    """How much is trained."""

    rounds: int = option(3, "trainings of every row", letter="N", least=1)
    steps: int = option(10, "optimizer steps of a training; the small model makes ten times as many", least=3)
    write: bool = option(False, "renew the table of the documentation")


def work(options: WholeOptions) -> int:
    """Train all rows in turns, and print the table."""
    found: dict[tuple[str, str], list[Fit]] = {
        (model, strategy): [] for model in MODELS for strategy in STRATEGIES
    }
    for _ in range(options.rounds):
        for (model, strategy), fits in found.items():
            steps = options.steps * (10 if MODELS[model] is Encoder else 1)
            by_rank = run_ranks(fit, 2, model, strategy, steps)
            fits.append(by_rank[0]._replace(peak=max(one.peak for one in by_rank)))
            print(model, strategy, fits[-1], flush=True)
    columns = [
        Column("model"),
        Column("strategy"),
        Column("ms per step"),
        Column("over DDP"),
        Column("s to the end of the first step", ".1f"),
        Column("MiB of a rank", ",.0f"),
    ]
    rows: list[list[Any]] = []
    for (model, strategy), fits in found.items():
        of_ddp = found[model, "`ddp`"]
        over = [mine.step / theirs.step for mine, theirs in zip(fits, of_ddp, strict=True)]
        milliseconds = spread([1e3 * one.step for one in fits])
        first = statistics.median(one.first for one in fits)
        rows.append([model, strategy, milliseconds, spread(over), first, max(one.peak for one in fits) / MIB])
    table = Table("whole", "A step of a whole model", columns, rows)
    print(f"\n{table.markdown()}\n", flush=True)
    if options.write:
        write_into([PAGE], [table])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.whole``."""
    return command.run("whole", __doc__, WholeOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
