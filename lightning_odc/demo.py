"""``lightning-odc demo``: one small language model, trained on the same minibatches of real text in three modes.

``collective`` is stock sharding. ``on_demand`` has the same plan and one-sided communication: one sample per
microbatch, the longest first, which is the order that is fairest to collectives. ``balanced`` plans and steals, as
``Trainer(strategy="odc")`` does. All three shard the model. Modes take turns. Every optimizer step has the same samples
in all of them, so their losses agree.
"""

from __future__ import annotations

import argparse
import ast
import logging
import statistics
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_odc.callbacks import Timeline, TimelineRecorder, draw_timelines
from lightning_odc.files import write_json
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.strategy.odc import ODCStrategy
from lightning_odc.words import count

MODES: dict[str, dict[str, Any]] = {
    "collective": {"communication": "collective", "balance": "local_sort"},
    "on_demand": {"communication": "on_demand", "balance": "local_sort"},
    "balanced": {},
}
"""Arguments of the strategy in every mode, beside those that all have."""
Runs = dict[str, list[dict[str, float]]]
"""Seconds per minibatch, idle part and loss of every run, by mode."""
LOSS_TOLERANCE = 1e-5
"""Relative difference up to which losses agree. Modes add the same gradients in different orders."""
SAMPLES_PER_RANK = 8
"""In a minibatch, on average."""

BOS = 256
"""Token that begins a sample; a byte is its own token, 0-255."""
EOS = 257
"""Token that ends a sample."""
VOCABULARY = 258
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
#: Tests, bundled applications, and tables in which nearly the same text stands many times.
SKIPPED = {
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


def source_files() -> list[Path]:
    """The modules of the standard library, in a fixed order."""
    return [
        path for path in sorted(LIBRARY.rglob("*.py")) if SKIPPED.isdisjoint(path.relative_to(LIBRARY).parts)
    ]


def read_texts(max_length: int) -> list[bytes]:
    """Functions and classes of the standard library that have at most ``max_length`` tokens, in a fixed order."""
    # Longer ones are left out: if they were cut off, a sixth of all samples would have exactly the greatest length.
    texts = []
    for path in source_files():
        source = path.read_bytes()
        lines = source.splitlines(keepends=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(source)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min(part.lineno for part in [node, *node.decorator_list])
                texts.append(b"".join(lines[first - 1 : node.end_lineno]))
    return [text for text in texts if len(text) + 2 <= max_length]


def encode(text: bytes) -> Tensor:
    """Token ids of a text, int64 ``[len(text) + 2]``: a beginning, its bytes, and an end."""
    return torch.tensor([BOS, *text, EOS])


class CausalModel(LightningModule):
    """A small Llama that reads bytes."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=max_length,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        # The batch says `use_cache=False`: see Note [Packed samples do not see each other].
        loss = self.model(**batch).loss
        count = int((batch["labels"] >= 0).sum())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=count)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(mode: str, options: argparse.Namespace, samples: Any) -> tuple[Timeline | None, float]:
    """Train one mode; returns what its ranks did in the timed minibatches, on rank 0, and the mean loss."""
    steps = range(1, options.minibatches + 1)  # step 0 warms up
    recorder = TimelineRecorder(options.output / mode, steps)
    trainer = Trainer(
        # The weighting is known, so there is no trial of the loss.
        strategy=ODCStrategy(sharding_strategy="FULL_SHARD", weighting="next_token", **MODES[mode]),
        accelerator="cpu",
        devices=options.devices,
        max_steps=steps.stop,
        callbacks=recorder,
        plugins=LightningEnvironment(),  # this machine alone, also inside a cluster's job
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    model = CausalModel(options.max_length)
    loader = DataLoader(
        samples,
        batch_size=SAMPLES_PER_RANK,
        shuffle=True,
        drop_last=True,
        collate_fn=PackingCollator(),
        generator=torch.Generator().manual_seed(0),
    )
    trainer.fit(model, loader)
    return recorder.timeline, float(trainer.callback_metrics["loss"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--devices", type=count, default=2, help="processes, one rank each (2)")
    add("--minibatches", type=count, default=4, help="timed minibatches of a run (4)")
    add("--repetitions", type=count, default=3, help="runs of each mode, in turns (3)")
    add("--max-length", type=count, default=2048, help="longest sample in tokens, which are bytes (2048)")
    add("--output", type=Path, default=Path("odc-demo"), help="folder for results (odc-demo)")


def run(options: argparse.Namespace) -> int:
    """Train, print and write; returns the exit code: 1 if losses differ."""
    # Every rank runs this. Lightning starts the others with the same command line, and if one fails, it ends all.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # hints for the reader of a training script
    samples = [encode(text) for text in read_texts(options.max_length)]
    runs: Runs = {mode: [] for mode in MODES}
    timelines = {}
    for repetition in range(options.repetitions):
        for mode, own in runs.items():
            timeline, loss = train(mode, options, samples)
            if timeline is None:  # on all ranks but the first
                continue
            timelines[mode] = timeline
            minibatches = timeline.ranks[0].of("minibatch")
            seconds = (minibatches[-1].end - minibatches[0].begin) / 1e9 / options.minibatches
            own.append({"seconds": seconds, "idle": timeline.idle_fraction, "loss": loss})
            print(f"{mode} {repetition + 1}: {seconds:.2f} s per minibatch", flush=True)
    if not timelines:
        return 0
    write_json(options.output / "result.json", runs)
    draw_timelines(timelines, options.output / "timelines.png")
    return report(runs, options)


def report(runs: Runs, options: argparse.Namespace) -> int:
    """Print what was measured; returns 1 if losses differ."""
    print(f"{'':12}samples/s   idle  speed-up of each repetition")
    for mode, own in runs.items():
        rate = options.devices * SAMPLES_PER_RANK / statistics.median(run["seconds"] for run in own)
        idle = statistics.median(run["idle"] for run in own)
        pairs = zip(runs["collective"], own, strict=True)
        speed_ups = ", ".join(f"{stock['seconds'] / run['seconds']:.2f}" for stock, run in pairs)
        print(f"{mode:12}{rate:9.2f}{idle:7.1%}  {speed_ups}")
    losses = [run["loss"] for own in runs.values() for run in own]
    difference = max(losses) / min(losses) - 1
    print(f"largest relative difference of a loss: {difference:.1e}")
    print(f"{options.output}/timelines.png shows every rank in the last run of each mode; grey is waiting")
    print('Next, in your own project: import lightning_odc, then Trainer(strategy="odc")')
    return int(not difference <= LOSS_TOLERANCE)
