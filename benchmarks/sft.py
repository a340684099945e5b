"""Fine-tunes a language model with ``Trainer`` of Hugging Face's: under DDP, grouped by length, FSDP2, and the mix-in.

``python -m benchmarks.sft`` prints a Markdown table. All rows read the same texts of the standard library, and take
equally many optimizer steps of as many samples. They run one after another, round by round, so that a slow minute hits
all of them. ``--write`` puts the table into ``docs/data/sft.md``.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks import command
from benchmarks.command import option
from benchmarks.harness.processes import RankProcesses
from benchmarks.projects import LONGEST, Texts, pad
from benchmarks.tables import Column, Table, spread, write_into
from lightning_odc.huggingface import ODCTrainerMixin
from lightning_odc.huggingface.sharding import shards_on_cpu
from notebooks.support.models import byte_llama

PAGE = Path(__file__).parents[1] / "docs" / "data" / "sft.md"


class Counts(Trainer):  # type: ignore[misc]  # transformers is not type-checked
    """Counts the tokens that it computes, padding included."""

    tokens = 0

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.tokens += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args)


class Sharded(Counts):
    """Shards on CPU ranks, too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = shards_on_cpu(self.accelerator, self.args)


class Balanced(ODCTrainerMixin, Trainer):  # type: ignore[misc]
    """Counts the tokens of its microbatches."""

    tokens = 0

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.tokens += sum(batch["input_ids"].numel() for batch in inputs)
        return super().training_step(model, inputs, *args)


LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
MIXED_IN = "`ODCTrainerMixin`"
#: Balancing of its own, since transformers 5.23.
REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
BATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
#: What the user writes, by row: the class, and the arguments that differ.
ROWS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "`Trainer` (DDP)": (Counts, {}),
    '`Trainer` (DDP), `train_sampling_strategy="group_by_length"`': (
        Counts,
        {"train_sampling_strategy": "group_by_length"},
    ),
    "`Trainer` (DDP), one text at a time": (Counts, ONE_BY_ONE),
    '`Trainer` (DDP), `train_sampling_strategy="batch_rebalance"`': (Counts, REBALANCED),
    "the same, one text at a time": (Counts, {**REBALANCED, **ONE_BY_ONE}),
    "`Trainer`, `fsdp=True` (FSDP2)": (Sharded, {"fsdp": True, "fsdp_config": LAYERS}),
    MIXED_IN: (Balanced, {}),
    "`ODCTrainerMixin`, `fsdp=True`": (Balanced, {"fsdp": True}),
}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times what comes before the first epoch, and the epochs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0
        self.tokens = 0  # of the latest epoch
        self.trainer: Any = None
        self._begin = time.monotonic()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        dist.barrier()
        self.start = self.start or time.monotonic() - self._begin
        self.trainer.tokens = 0
        self._begin = time.monotonic()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        dist.barrier()
        self.seconds.append(time.monotonic() - self._begin)
        self.tokens = self.trainer.tokens


@dataclass(frozen=True)
class SftOptions:
    """How much is trained."""

    ranks: int = option(2, "processes", letter="N", least=1)
    rounds: int = option(4, "trainings of every row", letter="N", least=1)
    epochs: int = option(1, "timed epochs of a training, after one more", letter="N", least=1)
    layers: int = option(4, "layers of the model", letter="N", least=1)
    width: int = option(256, "width of the model", letter="N", least=64)
    write: bool = option(False, "renew the table of the documentation")


class Trained(NamedTuple):
    """What a rank has measured."""

    start: float  # seconds before the first epoch
    seconds: list[float]  # of the epochs after the first
    tokens: int  # computed in an epoch
    idle: float  # the part of the last epoch in which ranks waited, where it is measured


def train(rank: int, _: int, row: str, options: SftOptions) -> Trained:
    """Train one row on this rank."""
    # What torchrun says; the process group is there.
    os.environ.update({"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    kind, given = ROWS[row]
    torch.manual_seed(0)
    data = Texts()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=1 + options.epochs,
            learning_rate=1e-3,
            logging_strategy="no",
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
            dataloader_pin_memory=False,
            **{**BATCHES, **given},
        )
        model = LlamaForCausalLM(byte_llama(options.layers, options.width, LONGEST))
        trainer = kind(model, args, pad, data, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        watch.trainer = trainer
        trainer.train()
    idle = [row["idle/fraction"] for row in trainer.state.log_history if "idle/fraction" in row]
    return Trained(watch.start, watch.seconds[1:], watch.tokens, statistics.mean(idle or [math.nan]))


def work(options: SftOptions) -> int:
    """Train all rows in turns, and print the table."""
    found: dict[str, list[list[Trained]]] = {row: [] for row in ROWS}
    with RankProcesses(options.ranks, preload=[__name__]) as ranks:
        for number in range(options.rounds):
            for row, trained in found.items():
                trained.append(ranks.call(train, row, options))
                last = trained[-1][0]
                print(f"round {number + 1}, {row}: {last.seconds}", flush=True)
    table = table_of(found)
    print(f"\n{table.markdown()}\n", flush=True)
    if options.write:
        write_into([PAGE], [table])
    return 0


def table_of(found: dict[str, list[list[Trained]]]) -> Table:
    """Of every row the epochs, and what they take over those of the mix-in in the same round."""
    seconds: dict[str, list[float]] = {}
    for row, rounds in found.items():
        seconds[row] = []
        for by_rank in rounds:
            seconds[row] += by_rank[0].seconds
    rows: list[list[Any]] = []
    for row, rounds in found.items():
        over = [mine / theirs for mine, theirs in zip(seconds[row], seconds[MIXED_IN], strict=True)]
        tokens = sum(of_rank.tokens for of_rank in rounds[-1])
        start = statistics.median(by_rank[0].start for by_rank in rounds)
        idle = statistics.median(by_rank[0].idle for by_rank in rounds)
        rows.append([row, spread(seconds[row]), spread(over), tokens, start, idle])
    columns = [
        Column("what the user writes"),
        Column("s per epoch, median [least, most]"),
        Column("over the mix-in"),
        Column("computed tokens", ",d"),
        Column("s before the first epoch", ".1f"),
        Column("ranks wait", ".0%"),
    ]
    return Table("sft", "Fine-tuning with Trainer", columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.sft``."""
    return command.run("sft", __doc__, SftOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
