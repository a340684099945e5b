"""GRPO of TRL on two CPU ranks: under DDP, and with the mix-in by collectives and on demand.

``python -m benchmarks.grpo`` prints a Markdown table, and takes 40 s per round. The model is tiny. Every layer sleeps
for 5 ms per pass, as if it computed. Completions end where the model samples the end, after 64 tokens at most, so
ranks need unequal numbers of passes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks import command
from benchmarks.command import option
from benchmarks.harness.processes import RankProcesses
from benchmarks.tables import Column, Table, spread
from lightning_odc.huggingface import ODCTrainerMixin

RANKS = 2
WORDS = 32  # one of them ends a completion
SLEEP = 0.005  # seconds of a layer


class Balanced(ODCTrainerMixin, GRPOTrainer):  # type: ignore[misc]
    """GRPO with the mix-in."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())


WAYS = {"DDP": "", "the mix-in, by collectives": "collective", "the mix-in, on demand": "on_demand"}


@dataclass(frozen=True)
class GrpoOptions:
    """How much is trained."""

    rounds: int = option(6, "trainings of every row", letter="N", least=1)
    steps: int = option(8, "optimizer steps, the first of which is not timed", letter="N", least=2)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


def train(rank: int, _: int, communication: str, steps: int) -> tuple[float, int]:
    """Seconds of the steps after the first on this rank, and how often a layer ran in all."""
    # What torchrun says; the process group is there.
    os.environ.update({"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    passes = 0

    def compute(*_: Any) -> None:
        nonlocal passes
        passes += 1
        time.sleep(SLEEP)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(compute)
    clock = Clock()
    kind = GRPOTrainer
    named: dict[str, Any] = {}
    if communication:
        kind = Balanced
        named = {"engine": {"communication": communication}}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            use_cpu=True,
            fsdp=bool(communication),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=64,
            max_steps=steps,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
            dataloader_pin_memory=False,
        )
        trainer = kind(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": f"w{3 + index} w20 w21"} for index in range(16)]),
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
            processing_class=tokenizer(),
            callbacks=[clock],
            **named,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.ends[-1] - clock.ends[0], passes


def work(options: GrpoOptions) -> int:
    """Train all rows in turns, and print the table."""
    found: dict[str, list[list[tuple[float, int]]]] = {way: [] for way in WAYS}
    with RankProcesses(RANKS, preload=[__name__]) as ranks:
        for number in range(options.rounds):
            for way, rounds in found.items():
                rounds.append(ranks.call(train, WAYS[way], options.steps))
                print(f"round {number + 1}, {way}: {rounds[-1]}", flush=True)
    seconds = {way: [by_rank[0][0] for by_rank in rounds] for way, rounds in found.items()}
    rows = []
    for way, rounds in found.items():
        over = [mine / theirs for mine, theirs in zip(seconds[way], seconds["DDP"], strict=True)]
        passes = " and ".join(str(count) for _, count in rounds[-1])
        rows.append([way, spread(seconds[way]), spread(over), passes])
    columns = [
        Column("training"),
        Column(f"s for {options.steps - 1} steps, median [least, most]"),
        Column("over DDP"),
        Column("layers run on the ranks"),
    ]
    print(Table("grpo", "GRPO", columns, rows).markdown())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.grpo``."""
    return command.run("grpo", __doc__, GrpoOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
