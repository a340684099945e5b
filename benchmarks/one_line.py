"""What a plain project gains when only its strategy's name changes, beside everything else that one could write.

``python -m benchmarks.one_line`` prints a Markdown table for each project. A project is a data set, a ``collate_fn``,
a ``DataLoader`` and a ``LightningModule``, written without this package. All rows of a project take equally many
optimizer steps. They run one after another, round by round, so that a slow minute hits all of them. ``--write`` keeps
the seconds in ``docs/data/one-line.json``, and puts the tables of all that is there into README and docs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import RankProcesses
from benchmarks.projects import (
    LONGEST,
    SAMPLES,
    Classifier,
    LanguageModel,
    Regression,
    Series,
    Texts,
    Toy,
    pad,
    pad_series,
)
from benchmarks.step_parts import PARTS, Parts
from benchmarks.tables import Column, Table, spread, write_into
from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.balance import plan_minibatch, transformer
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.files import write_json
from notebooks.support.models import byte_llama

EACH = 8  # samples of a rank in a step
ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "one-line.json"
#: The minibatches of a fit in which an audit falls, from the second epoch on: Note [The proof continues].
AUDITS = (10, 100)


@dataclass(frozen=True)
class Row:
    """One way to train a project.

    Attributes:
        text: What the user writes.
        strategy: ``"ddp"``, ``"alone"`` (`Alone`, epoch by epoch in turns with `ODC`), or options of ``ODCStrategy``.
        batch: Samples of a batch on one rank; as many batches are accumulated as make up a step.
        loader: ``"grouped"``: texts of similar length in a batch, the batches in random order. ``"planned"``: DDP over
            a `BalancedDataLoader`, as the documentation shows it.
    """

    text: str
    strategy: Any
    batch: int = EACH
    loader: str = ""


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


SHARDED = {"communication": "collective", "sharding_strategy": "FULL_SHARD"}
COLLECTIVE = Row('`communication="collective"`, batch 8', {**SHARDED, "balance": None})
LEVEL = Row('`communication="collective"`, balanced', SHARDED)
PLAIN = Row('`"odc_plain"`, batch 8', {"balance": None})
ODC = Row('`"odc"`, batch 8', {})
SHARDS = Row('`"odc"`, `FULL_SHARD`', {"sharding_strategy": "FULL_SHARD"})
DDP = Row('`"ddp"`, batch 8', "ddp")
SINGLE = Row('`"ddp"`, batch 1, accumulate 8', "ddp", 1)
PLANNED = Row('`"ddp"`, batches planned', "ddp", 1, "planned")
SILENT = Row("processes that do not talk", "alone", 1)
USUAL = (DDP, SINGLE, COLLECTIVE, PLAIN, ODC, SHARDS, Row('`"odc"`, batch 1, accumulate 8', {}, 1))
TEXTS = (
    COLLECTIVE,
    Row('`communication="collective"`, grouped by length', COLLECTIVE.strategy, EACH, "grouped"),
    *(LEVEL, PLAIN, ODC, SHARDS, USUAL[-1], DDP),
    Row('`"ddp"`, grouped by length', "ddp", EACH, "grouped"),
    *(SINGLE, PLANNED, SILENT),
)
DENSE = transformer(byte_llama(4, 256, LONGEST), dense=True)


def _by_hand(text: str, **options: Any) -> Row:
    return Row(f"by hand: {text}", options)


PROJECTS = {
    "padding": Project(
        "Language model, a collator that pads",
        Texts,
        pad,
        LanguageModel,
        (
            *TEXTS,
            Row('`"odc"` with `packing=True`', {"packing": True}),
            _by_hand("`lb_mini`, dense cost", balance="lb_mini", cost=DENSE),
            _by_hand("`steal`, dense cost", balance="steal", cost=DENSE),
            _by_hand("`local_sort`", balance="local_sort"),
            _by_hand("`steal`, dense cost, packed", balance="steal", cost=DENSE, packing=True),
        ),
    ),
    "regression": Project(
        "Regression on ragged series",
        Series,
        pad_series,
        Regression,
        (
            *USUAL,
            _by_hand("`lb_mini`, measured speeds", balance="lb_mini", cost="auto"),
            _by_hand("`local_sort`", balance="local_sort"),
        ),
    ),
    "equal": Project(
        "Language model, samples of equal length",
        partial(Texts, equal=True),
        pad,
        LanguageModel,
        TEXTS,
    ),
    "classes": Project("Text classification", Texts, pad, Classifier, (DDP, SINGLE, COLLECTIVE, ODC, SHARDS)),
    "toy": Project(
        "A model of 17 thousand parameters", Texts, pad, Toy, (DDP, SINGLE, COLLECTIVE, ODC, SHARDS)
    ),
}


class Alone:
    """A bare loop over this rank's part of each step, one sample at a time: no rank waits for another one.

    Attributes:
        counted: What `fit` returns of it.
    """

    def __init__(self, project: Project, rank: int, ranks: int) -> None:
        self._project = project
        self._rank = rank
        self._ranks = ranks
        self._data = project.data()
        self._lengths = torch.tensor([len(sample["input_ids"]) for sample in self._data])
        self._module: Any = project.module()
        self._optimizer: Any = self._module.configure_optimizers()
        tokens = int(self._lengths.sum()) // ranks
        largest = int(self._lengths.max())
        self.counted = SimpleNamespace(start=0.0, seconds=[], tokens=tokens, largest=largest, steps=0)

    def train(self, epoch: int) -> None:
        """Train an epoch."""
        dist.barrier()
        begin = time.monotonic()
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(epoch))
        for step in order.split(EACH * self._ranks):
            lengths = self._lengths[step]
            plan = plan_minibatch(lengths, self._ranks, cost=DENSE)
            for microbatch in plan[self._rank]:
                for place in microbatch:
                    sample = self._data[int(step[place])]
                    loss = self._module.training_step(self._project.collate([sample]))
                    (loss * lengths[place] / lengths.sum()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.counted.seconds.append(time.monotonic() - begin)


def stepping_by_hand(module: Any) -> Any:
    """The module over a planned loader under DDP, as the documentation has it: it steps once per minibatch."""
    step = module.training_step

    def training_step(minibatch: Any) -> None:
        scale = module.trainer.world_size / module.all_gather(sum(minibatch.weights)).sum()
        for number, (batch, weight) in enumerate(minibatch.weighted(), 1):
            is_last = number == len(minibatch)
            alone = module.trainer.strategy.block_backward_sync
            with contextlib.nullcontext() if is_last else alone():
                module.manual_backward(step(batch) * weight * scale)
        optimizer = module.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    module.automatic_optimization = False
    module.training_step = training_step
    module.transfer_batch_to_device = lambda minibatch, *_: minibatch  # it is on the CPU
    return module


def loader_of(project: Project, row: Row, rank: int, ranks: int) -> Any:
    """What a rank reads."""
    data = project.data()
    if row.loader == "planned":
        options: Any = {"balance": "lb_micro", "weighting": "next_token", "shuffle": True}
        return BalancedDataLoader(
            data, minibatch_size=EACH, collate_fn=project.collate, num_replicas=ranks, rank=rank, **options
        )
    given: dict[str, Any] = {"shuffle": True}
    if row.loader == "grouped":
        order = sorted(range(len(data)), key=lambda index: len(data[index]["input_ids"]))
        whole = row.batch * ranks  # neighbours by length, on all ranks together
        groups = []
        for first in range(0, len(order), whole):
            of_all_ranks = order[first : first + whole]
            groups.append(of_all_ranks[rank::ranks])
        random.Random(0).shuffle(groups)
        given = {"sampler": [index for group in groups for index in group]}
    return DataLoader(data, batch_size=row.batch, collate_fn=project.collate, **given)


def tokens_of(batch: Any) -> int:
    """Tokens of a batch of either model, padding included."""
    if isinstance(batch, dict):
        table = batch["input_ids"]
    else:
        table = batch[1]
    return table.numel()


class Watch(pl.Callback):
    """Counts what was computed, and times the epochs after the first.

    Attributes:
        start: Seconds before the first epoch: mostly the trial of the loss.
        seconds: Seconds of each epoch.
        tokens: Tokens in the microbatches of the last epoch on this rank, padding included.
        largest: The largest microbatch of all epochs.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self.seconds: list[float] = []
        self.alone: Alone | None = None  # trains an epoch after each of the trainer's
        self.tokens = self.largest = 0
        self.start = 0.0
        self.parts = parts  # of the second epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tokens = 0
        self.start = self.start or time.monotonic() - self._begin
        trainer.strategy.barrier()
        self._begin = time.monotonic()
        if self.parts is not None and trainer.current_epoch == 1:
            self.parts.begin()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batches = [batch]
        if isinstance(batch, Minibatch):
            batches = [*batch]
        for one in batches:
            tokens = tokens_of(one)
            self.tokens += tokens
            self.largest = max(self.largest, tokens)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.parts is not None and trainer.current_epoch == 1:
            self.parts.end()
        trainer.strategy.barrier()
        self.seconds.append(time.monotonic() - self._begin)
        if self.alone is not None:
            self.alone.train(trainer.current_epoch)


def fit(
    rank: int, world_size: int, project: str, number: int, epochs: int, is_split: bool = False
) -> tuple[SimpleNamespace, str]:
    """Train one row on this rank; returns what was counted, and the lines that the strategy said."""
    chosen = PROJECTS[project]
    row = chosen.rows[number]
    pl.seed_everything(0, verbose=False)
    strategy: Any = row.strategy
    if isinstance(strategy, dict):
        strategy = ODCStrategy(hang_report_after=None, **strategy)
    parts = Parts() if is_split else None
    watch = Watch(parts)
    is_planned = row.loader == "planned"
    accumulated = EACH // row.batch
    if is_planned:
        accumulated = 1
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=1 + epochs,
        accumulate_grad_batches=accumulated,
        use_distributed_sampler=not row.loader,
        callbacks=[watch],
        plugins=[LightningEnvironment()],
        **QUIET,
    )
    module = chosen.module()
    if is_planned:
        module = stepping_by_hand(module)
    if row == ODC and SILENT in chosen.rows and not is_split:
        watch.alone = Alone(chosen, rank, world_size)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    with contextlib.redirect_stderr(said):
        loader = loader_of(chosen, row, rank, world_size)
        trainer.fit(module, loader)
    log.removeHandler(handler)
    begins = ("Plan", "Expected", "Note", "Measured", "Samples are", "strategy=")
    unique = dict.fromkeys(said.getvalue().splitlines())
    lines = [line for line in unique if line.startswith(begins)]
    counted = SimpleNamespace(
        start=watch.start,
        seconds=watch.seconds,
        tokens=watch.tokens,
        largest=watch.largest,
        steps=trainer.global_step,
        split=parts and parts.seconds,
        alone=watch.alone and watch.alone.counted,
    )
    return counted, "\n".join(lines)


def print_split(name: str, options: argparse.Namespace) -> None:
    """Where the time of a step of the row `SHARDS` goes, as a table."""
    number = PROJECTS[name].rows.index(SHARDS)
    found: dict[str, list[float]] = {part: [] for part in ("a step", *PARTS)}
    with RankProcesses(options.ranks, preload=["benchmarks.harness.models"]) as ranks:
        for _ in range(options.rounds):
            for watched, _ in ranks.call(fit, name, number, 1, True):
                steps = watched.steps / 2  # of the second epoch
                found["a step"].append(1e3 * sum(watched.split.values()) / steps)
                for part in PARTS:
                    found[part].append(1e3 * watched.split[part] / steps)
    whole = statistics.median(found["a step"])
    rows = []
    for part, values in found.items():
        rows.append([part, spread(values, 1), f"{statistics.median(values) / whole:.2%}"])
    table = markdown(("part of a step", "ms, median [least, most]", "of a step"), rows)
    print(f"\n{table}\n", flush=True)


def print_bound(measured: Sequence[dict[str, Any]], epochs: int) -> None:
    """Times over that of `ODC`, without an audit and with one."""
    ours = _of(ODC, measured)
    per_epoch = ours["steps"] // (1 + epochs)
    audited = {step // per_epoch - 1 for step in AUDITS}  # of the epochs that were timed
    rows = []
    for one in measured:
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for place, seconds in enumerate(one["seconds"]):
            has_audit = place % epochs in audited
            ratios[has_audit].append(seconds / ours["seconds"][place])
        rows.append([one["row"], *map(spread, ratios.values())])
    print(markdown(("what the user writes", "over `odc`", "over `odc` with an audit"), rows))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.one_line``."""
    parser = parser_of("one_line", __doc__)
    parser.add_argument("--projects", nargs="+", choices=PROJECTS, default=list(PROJECTS), help="which ones")
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="processes")
    parser.add_argument("--rounds", type=int, metavar="N", default=4, help="fits of every row")
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=2, help="timed epochs of a fit, after one more"
    )
    parser.add_argument("--usual", action="store_true", help="leave out settings found by hand")
    parser.add_argument(
        "--write", action="store_true", help="renew the numbers and tables of the documentation"
    )
    parser.add_argument("--bound", action="store_true", help="only what is compared with no communication")
    parser.add_argument("--split", action="store_true", help="only the parts of a step on demand")
    options = parser.parse_args(arguments)
    if options.split:
        for name in options.projects:
            print_split(name, options)
        return
    found: dict[str, Any] = {}
    if options.bound:
        options.epochs = max(options.epochs, 3, AUDITS[0] * EACH * options.ranks // SAMPLES)
    for name in options.projects:
        measured = _measure(name, options)
        if options.bound:
            print_bound(measured, options.epochs)
        key = name
        if options.ranks != 2:
            key = f"{name}-{options.ranks}"
        found[key] = measured
        table = _table(name, measured)
        print(f"\n{table.title}\n\n{table.markdown()}\n", flush=True)
        print(_of(ODC, measured)["said"], flush=True)
    if options.write:
        found = json.loads(DATA.read_text()) | found
        write_json(DATA, found)
        made = tables(found)
        for name, measured in found.items():
            made.append(_table(name, measured))
        for file in ("docs/results.md", "docs/data/one-line.md"):
            page = ROOT / file
            text = page.read_text()
            of_page = [table for table in made if f"table: {table.name} " in text]
            write_into([page], of_page)


def _measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of a project, or the usual ones, round by round."""
    rows = [*PROJECTS[name].rows]
    if options.usual:
        rows = [row for row in rows if not row.text.startswith("by hand")]
    if options.bound:
        rows = [row for row in rows if row in (ODC, SHARDS, SINGLE, LEVEL, PLANNED, SILENT)]
    measured: list[dict[str, Any]] = []
    for row in rows:
        one: dict[str, Any] = {"row": row.text, "seconds": [], "start": [], "tokens": 0, "largest": 0}
        measured.append(one)
    alone: Any = ()  # what the row `ODC` has measured of `SILENT`
    with RankProcesses(options.ranks, preload=["benchmarks.harness.models"]) as ranks:
        for _ in range(options.rounds):
            for row, one in zip(rows, measured, strict=True):
                if row == SILENT:
                    watched = alone
                else:
                    number = PROJECTS[name].rows.index(row)
                    watched, said = zip(*ranks.call(fit, name, number, options.epochs), strict=True)
                    one["said"] = said[0]
                if row == ODC:
                    alone = [watch.alone for watch in watched]
                by_rank = [watch.seconds for watch in watched]
                first, *others = map(max, zip(*by_rank, strict=True))
                largest = [watch.largest for watch in watched]
                one["seconds"] += others
                one["start"].append([watched[0].start, first])
                one["tokens"] = sum(watch.tokens for watch in watched)
                one["largest"] = max(one["largest"], *largest)
                one["steps"] = watched[0].steps
    return measured


def over(measured: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By row: its time over that of `ODC` in the same round, as a median with the least and the most."""
    base = _of(ODC, measured)["seconds"]
    found = {}
    for one in measured:
        ratios = [a / b for a, b in zip(one["seconds"], base, strict=True)]
        found[one["row"]] = spread(ratios)
    return found


def _of(row: Row, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was measured of a row."""
    return next(one for one in measured if one["row"] == row.text)


def tables(found: dict[str, Any]) -> list[Table]:
    """That of the results, where the runs stand side by side."""
    ratios = {name: over(found[name]) for name in ("padding", "padding-4", "equal") if name in found}
    titles = {"padding": "2 ranks", "padding-4": "4 ranks", "equal": "2 ranks, equal lengths"}
    rows = []
    for one in found["padding"]:
        text = one["row"]
        if text.startswith("by hand"):
            continue
        row = [text]
        row += [of_project.get(text, "") for of_project in ratios.values()]
        row.append(f"{one['tokens']:,}")
        rows.append(row)
    heads = ["what the user writes"]
    heads += [titles[name] for name in ratios]
    heads.append("computed tokens")
    columns = [Column(head) for head in heads]
    return [Table("one-line", "One line", columns, rows)]


def _table(name: str, measured: Sequence[dict[str, Any]]) -> Table:
    """All that was measured of a project."""
    project = PROJECTS[name.partition("-")[0]]
    ratios = over(measured)
    alone = [project.collate([sample]) for sample in project.data()]
    longest = max(map(tokens_of, alone))
    rows = []
    for one in measured:
        text = one["row"]
        seconds = spread(one["seconds"])
        tokens = f"{one['tokens']:,}"
        largest = f"{one['largest'] / longest:.2f}"
        rows.append([text, seconds, ratios[text], tokens, largest])
    columns = [
        Column("what the user writes"),
        Column("s per epoch, median [least, most]"),
        Column('time over `"odc"`, batch 8'),
        Column("computed tokens"),
        Column("largest microbatch / longest sample"),
    ]
    return Table(f"one-line-{name}", project.title, columns, rows)


if __name__ == "__main__":
    main()
