"""What a plain project gains when only its strategy's name changes, beside the best settings found by hand.

``python -m benchmarks.one_line`` prints a Markdown table for each project. A project is a data set, a ``collate_fn``, a
``DataLoader`` and a ``LightningModule``, written without this package. All rows of a project train the same samples per
optimizer step. They run one after another, round by round, so that a slow minute hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

from lightning_odc import ODCStrategy
from lightning_odc.balance import transformer
from lightning_odc.bench.corpus import BOS, read_corpus
from lightning_odc.bench.models import byte_llama
from lightning_odc.bench.processes import Ranks
from lightning_odc.console import markdown
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.files import write_json

LONGEST, SAMPLES, PER_STEP = 1024, 64, 16
IGNORED = -100


# -- Three projects, as a user has them ------------------------------------------------------------------------


class Texts(Dataset[dict[str, list[int]]]):
    """Functions of the standard library as tokens; or pieces of equal length of them."""

    def __init__(self, equal: bool = False) -> None:
        samples = read_corpus(LONGEST).samples
        every = len(samples) // SAMPLES
        self.samples = [[BOS, *text] for text in samples[::every][:SAMPLES]]
        if equal:
            stream = [token for sample in self.samples for token in sample]
            size = len(stream) // SAMPLES
            self.samples = [stream[i * size : (i + 1) * size] for i in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.samples[index]}


def pad(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """What the usual collator of a causal model does."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED),
    }


class LanguageModel(pl.LightningModule):
    """A Llama of 3 million parameters that reads bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(byte_llama(4, 256, LONGEST))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Series(Dataset[tuple[Tensor, Tensor]]):
    """Ragged series of eight numbers per step, as long as the texts, each with a number to predict."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [torch.randn(len(text), 8, generator=generator) for text in Texts().samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index], self.samples[index].mean()


def pad_series(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Series, the mask of their padding, and what to predict."""
    rows = pad_sequence([row for row, _ in samples], batch_first=True)
    lengths = torch.tensor([len(row) for row, _ in samples])
    return rows, torch.arange(rows.size(1)) >= lengths[:, None], torch.stack([value for _, value in samples])


class Regression(pl.LightningModule):
    """A transformer encoder over a series, and a mean over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.leave = nn.Linear(128, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, is_padding, target = batch
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=is_padding)
        kept = (~is_padding)[..., None]
        mean = (hidden * kept).sum(1) / kept.sum(1)
        return functional.mse_loss(self.leave(mean)[:, 0], target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Classifier(pl.LightningModule):
    """A BERT of 2 million parameters that says whether a text has more than so many lines."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 768,
        }
        config = BertConfig(vocab_size=257, max_position_embeddings=LONGEST + 1, **sizes)
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        labels = ((batch["input_ids"] == ord("\n")).sum(1) > 10).long()
        return self.model(batch["input_ids"], batch["attention_mask"], labels=labels).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Toy(pl.LightningModule):
    """17 thousand parameters, for which no strategy is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(257, 64), nn.Linear(64, 64), nn.Linear(64, 257))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return functional.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# -- What is compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way to train a project.

    Attributes:
        text: What the user writes.
        strategy: ``"ddp"``, or options of ``ODCStrategy``.
        batch: Samples of a batch on one rank; as many batches are accumulated as make up a step.
        by_hand: Whether it has settings that a user has to know.
    """

    text: str
    strategy: Any
    batch: int = PER_STEP // 2
    by_hand: bool = False


@dataclass(frozen=True)
class Project:
    """A project and the rows of its table.

    Attributes:
        title: What it is.
        data: Makes its data set.
        collate: Its ``collate_fn``.
        module: Makes its module.
        rows: What is compared.
    """

    title: str
    data: Callable[[], Any]
    collate: Any
    module: Callable[[], pl.LightningModule]
    rows: tuple[Row, ...] = field(default=())


COLLECTIVE = Row('`communication="collective"`, batch 8', {"communication": "collective", "balance": None})
USUAL = (
    Row('`"ddp"`, batch 8', "ddp"),
    Row('`"ddp"`, batch 1, accumulate 8', "ddp", 1),
    COLLECTIVE,
    Row('`"odc_plain"`, batch 8', {"balance": None}),
    Row('`"odc"`, batch 8', {}),
    Row('`"odc"`, batch 1, accumulate 8', {}, 1),
)
DENSE = transformer(byte_llama(4, 256, LONGEST), dense=True)


def _by_hand(text: str, **options: Any) -> Row:
    return Row(text, options, by_hand=True)


PROJECTS = {
    "padding": Project(
        "Language model, a collator that pads",
        Texts,
        pad,
        LanguageModel,
        (
            *USUAL,
            Row('`"odc"` with `packing=True`', {"packing": True}),
            _by_hand("by hand: `lb_mini`, dense cost", balance="lb_mini", cost=DENSE),
            _by_hand("by hand: `steal`, dense cost", balance="steal", cost=DENSE),
            _by_hand("by hand: `local_sort`", balance="local_sort"),
            _by_hand("by hand: `steal`, dense cost, packed", balance="steal", cost=DENSE, packing=True),
        ),
    ),
    "regression": Project(
        "Regression on ragged series",
        Series,
        pad_series,
        Regression,
        (
            *USUAL,
            _by_hand("by hand: `lb_mini`, fitted cost", balance="lb_mini", cost="fitted"),
            _by_hand("by hand: `steal`, fitted cost", balance="steal", cost="fitted"),
            _by_hand("by hand: `local_sort`", balance="local_sort"),
        ),
    ),
    "equal": Project(
        "Language model, samples of equal length",
        lambda: Texts(equal=True),
        pad,
        LanguageModel,
        (USUAL[0], COLLECTIVE, USUAL[3], USUAL[4]),
    ),
    "classes": Project("Text classification", Texts, pad, Classifier, (*USUAL[:3], USUAL[4])),
    "toy": Project("A model of 17 thousand parameters", Texts, pad, Toy, (*USUAL[:3], USUAL[4])),
}


def tokens_of(batch: Any) -> int:
    """Tokens of a batch of either model, padding included."""
    table = batch["input_ids"] if isinstance(batch, dict) else batch[1]
    return table.numel()


class Watch(pl.Callback):
    """Counts what was computed, and times the epochs after the first.

    Attributes:
        start: Seconds before the first epoch: mostly the trial of the loss.
        seconds: Seconds of each epoch.
        tokens: Tokens in the microbatches of the last epoch on this rank, padding included.
        largest: The largest microbatch of all epochs.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens = self.largest = 0
        self.start = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tokens = 0
        self.start = self.start or time.monotonic() - self._begin
        trainer.strategy.barrier()
        self._begin = time.monotonic()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for one in batch if isinstance(batch, Minibatch) else [batch]:
            self.tokens += tokens_of(one)
            self.largest = max(self.largest, tokens_of(one))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier()
        self.seconds.append(time.monotonic() - self._begin)


def fit(_rank: int, world_size: int, project: str, number: int, epochs: int) -> tuple[SimpleNamespace, str]:
    """Train one row on this rank; returns what was counted, and the lines that the strategy said."""
    chosen = PROJECTS[project]
    row = chosen.rows[number]
    pl.seed_everything(0, verbose=False)
    strategy: Any = row.strategy
    if strategy != "ddp":
        strategy = ODCStrategy(hang_report_after=None, **strategy)
    watch = Watch()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=1 + epochs,
        accumulate_grad_batches=PER_STEP // world_size // row.batch,
        callbacks=[watch],
        plugins=[LightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(chosen.data(), batch_size=row.batch, collate_fn=chosen.collate, shuffle=True)
    said = io.StringIO()
    handler, log = logging.StreamHandler(said), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    with contextlib.redirect_stderr(said):
        trainer.fit(chosen.module(), loader)
    log.removeHandler(handler)
    begins = ("Chosen", "Expected", "Note", "Measured", "Samples have", "strategy=")
    lines = [line for line in dict.fromkeys(said.getvalue().splitlines()) if line.startswith(begins)]
    counted = SimpleNamespace(
        start=watch.start, seconds=watch.seconds, tokens=watch.tokens, largest=watch.largest
    )
    return counted, "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.one_line``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_line", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--projects", nargs="+", choices=PROJECTS, default=list(PROJECTS), help="which ones")
    parser.add_argument("--rounds", type=int, metavar="N", default=4, help="fits of every row")
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=2, help="timed epochs of a fit, after one more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all seconds there, too")
    parser.add_argument("--usual", action="store_true", help="leave out settings found by hand")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.projects:
        measured = _measure(name, options.rounds, options.epochs, options.usual)
        found[name] = measured
        print(f"\n{PROJECTS[name].title}\n\n{_table(PROJECTS[name], measured)}\n", flush=True)
        print(next(one["said"] for one in measured if one["row"] == USUAL[4].text), flush=True)
    if options.json:
        write_json(options.json, found)


def _measure(name: str, rounds: int, epochs: int, usual: bool) -> list[dict[str, Any]]:
    """All rows of a project, or the usual ones, round by round."""
    rows = [row for row in PROJECTS[name].rows if row in USUAL or not usual]
    measured: list[dict[str, Any]] = [
        {"row": row.text, "seconds": [], "tokens": 0, "largest": 0} for row in rows
    ]
    with Ranks(2, preload=["lightning_odc.bench.models"]) as ranks:
        for _ in range(rounds):
            for number, one in enumerate(measured):
                results = ranks.call(fit, name, PROJECTS[name].rows.index(rows[number]), epochs)
                watched = [watch for watch, _ in results]
                epochs_of = zip(*(watch.seconds for watch in watched), strict=True)
                first, *others = [max(by_rank) for by_rank in epochs_of]
                one["seconds"] += others
                one["start"] = [*one.get("start", []), [watched[0].start, first]]
                one["tokens"] = sum(watch.tokens for watch in watched)
                one["largest"] = max(one["largest"], *(watch.largest for watch in watched))
                one["said"] = results[0][1]
    return measured


def _table(project: Project, measured: Sequence[dict[str, Any]]) -> str:
    medians = {one["row"]: statistics.median(one["seconds"]) for one in measured}
    ddp = min(seconds for text, seconds in medians.items() if "ddp" in text)
    best = min(medians.values())
    longest = max(tokens_of(project.collate([sample])) for sample in project.data())
    rows = [
        (
            one["row"],
            f"{medians[one['row']]:.2f} [{min(one['seconds']):.2f}, {max(one['seconds']):.2f}]",
            f"{one['tokens']:,}",
            f"{one['largest'] / longest:.2f}",
            f"{ddp / medians[one['row']]:.2f}",
            f"{medians[COLLECTIVE.text] / medians[one['row']]:.2f}",
            f"{best / medians[one['row']]:.0%}",
        )
        for one in measured
    ]
    head = ("what the user writes", "s per epoch, median [least, most]", "tokens computed")
    return markdown(
        (*head, "largest microbatch / longest sample", "x best DDP", "x collective", "of the best"), rows
    )


if __name__ == "__main__":
    main()
