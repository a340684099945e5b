"""What training logs, on real ranks with different numbers of microbatches."""

from __future__ import annotations

import json
import math
import warnings
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.strategy.logbook import LogBook, Message, flush
from lightning_odc.strategy.ranks import counted_by_microbatch
from tests.support.fits import Watch, fit, numbers
from tests.support.models import token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import on_ranks

SOON = timedelta(seconds=20)


def shares_of(lengths: list[list[list[int]]], rank: int) -> list[Minibatch]:
    return [Minibatch(token_batches(step[rank], seed=index)) for index, step in enumerate(lengths)]


class Reductions(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        length, epoch = float(batch.shape[1]), {"sync_dist": True, "on_step": True, "on_epoch": True}
        for name, reduce_fx in {
            "mean": "mean",
            "sum": torch.sum,
            "min": "min",
            "max": max,
            "tmax": torch.max,
        }.items():
            self.log(name, length, reduce_fx=reduce_fx, batch_size=1, **epoch)
        self.log("positional", length, True, None, True, True, "max", sync_dist=True)
        self.log_dict({"numpy": np.float32(length), "one": 1}, batch_size=1, **epoch)
        self.log("own", length, on_step=True, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


#: Lengths of microbatches by step and rank, and the communication.
REDUCED = [
    ([[[4, 6, 3], [9]], [[5], []]], "on_demand"),
    ([[[4, 6], [9, 5]], [[7], [3]]], "collective"),
    ([[[4, 6, 3], []], [[], [5, 8]]], "on_demand"),
]


@on_ranks(2)
@pytest.mark.parametrize(("lengths", "communication"), REDUCED)
def test_values_of_an_epoch_are_those_of_all_ranks(rank, lengths, communication):
    watch = Watch()
    options = {"communication": communication, "max_epochs": 2, "callbacks": [watch], "timeout": SOON}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Reductions("items"), shares_of(lengths, rank), **options)
    every = [n for step in lengths for own in step for n in own]
    expected = {"mean": sum(every) / len(every), "sum": sum(every), "min": min(every), "max": max(every)}
    expected |= {"tmax": max(every), "numpy": expected["mean"], "one": 1.0, "positional": max(every)}
    for seen, step in zip(watch.metrics, lengths * 2, strict=True):
        of_step = [n for own in step for n in own]
        assert [seen[f"{name}_step"] for name in ("sum", "min", "max")] == [
            f(of_step) for f in (sum, min, max)
        ]
        assert seen["mean_step"] == pytest.approx(sum(of_step) / len(of_step))
        assert not step[rank] or seen["own_step"] == pytest.approx(sum(step[rank]) / len(step[rank]))
    own = [n for step in lengths for n in step[rank]]
    for seen in watch.epochs:
        assert {name: seen[f"{name}_epoch"] for name in expected} == pytest.approx(expected)
        assert seen["own_epoch"] == pytest.approx(sum(own) / len(own))
    # Lightning's advice is right where a user did not synchronise. It comes once, on rank 0.
    advice = [str(w.message) for w in caught if "It is recommended to use `self.log(" in str(w.message)]
    assert len(advice) <= (rank == 0), advice
    assert all("self.log('own'" in text for text in advice)


class Groups(TokenModule):
    def setup(self, stage: str) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        self.group = groups[self.global_rank // 2]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("x", float(self.global_rank), sync_dist=True, sync_dist_group=self.group, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", float(self.global_rank), sync_dist=True, sync_dist_group=self.group, batch_size=1)


@on_ranks(3)
def test_a_group_of_ranks_has_its_own_value(rank):
    data = shares_of([[[4], [4], [5]]], rank)
    t = fit(Groups("mean"), data, 3, token_batches([4]), timeout=SOON)
    value = (0.5, 0.5, 2.0)[rank]
    assert (t.callback_metrics["x_epoch"], t.callback_metrics["v"]) == (value, value)


class Hooks(TokenModule):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("hook", 1.0 + self.global_rank, on_step=False, on_epoch=True, sync_dist=True)
        self.log("own_hook", 1.0 + self.global_rank, on_step=False, on_epoch=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("val_hook", 1.0 + self.global_rank, sync_dist=True)


@on_ranks(2)
def test_hooks_log_once_per_minibatch_however_empty(rank):
    validation = shares_of([[[], [3]]], rank)
    t = fit(Hooks("items"), shares_of([[[4, 6], []], [[5], []]], rank), 2, validation, timeout=SOON)
    seen = {name: value for name, value in numbers(t.callback_metrics).items() if "hook" in name}
    assert seen == {"hook": 1.5, "own_hook": 1.0 + rank, "val_hook": 1.5}


def test_throughput_is_counted_by_microbatch():
    monitor = ThroughputMonitor(batch_size_fn := lambda batch: batch["x"].size(0))
    with counted_by_microbatch([monitor]):
        assert monitor.batch_size_fn(Minibatch([{"x": torch.ones(2, 3)}, {"x": torch.ones(4, 5)}])) == 6
        assert monitor.batch_size_fn({"x": torch.ones(3)}) == 3
        assert monitor.batch_size_fn(Minibatch([])) == 1, "Lightning refuses a batch without samples"
    assert (monitor.batch_size_fn, monitor.length_fn) == (batch_size_fn, None)


class Weightless(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("mean", float(batch.shape[1]), sync_dist=True, on_step=True, on_epoch=True)
        self.log("sum", float(batch.shape[1]), sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_what_weighs_nothing_has_no_part_in_a_mean(rank):
    weights = {4: 0.0, 6 + rank: 2.0}
    shares = [Minibatch(token_batches([size]), weights=[weight]) for size, weight in weights.items()]
    watch = Watch()
    fit(Weightless("mean"), shares, callbacks=[watch], timeout=SOON)
    (seen,) = watch.epochs
    assert (seen["mean_epoch"], seen["sum_epoch"]) == (6.5, 4 + 4 + 6 + 7)


class Counts(TokenModule):
    """Ranks count 3 and 2: rounded down their mean would be 2, and the constant 1.25."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("one", 1.0, sync_dist=True, on_step=False, on_epoch=True, batch_size=3 - self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name, value in (("val_one", 1.0), ("val_rank", float(self.global_rank))):
            self.log(name, value, sync_dist=True, batch_size=3 - self.global_rank)


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_the_mean_of_integer_counts_is_not_rounded(rank, communication):
    t = fit(Counts(), token_batches([4]), 2, token_batches([4]), communication=communication)
    assert numbers(t.callback_metrics) == {"one": 1.0, "val_one": 1.0, "val_rank": pytest.approx(2 / 5)}


class Sink(LightningModule):
    """Takes what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        assert not args
        self.logged.append((name, value, options))


def recorded(*values: tuple[Any, float], **options: Any) -> LogBook:
    """A rank's book after each value was logged in a microbatch of the given weight."""
    book, module = LogBook(), Sink()
    with book.recording(module):
        for value, weight in values:
            module.log("x", value, **options)
            book.weigh(weight)
    assert not module.logged
    module.log("x", 0)
    assert module.logged, "the module's own log is back"
    return book


def sent(message: Message) -> Message:
    """As it comes out of a mailbox."""
    return json.loads(json.dumps(message))


def logged(*ranks: LogBook) -> list[tuple[str, Any, dict[str, Any]]]:
    module = Sink()
    flush(ranks[0].merge([sent(book.post()) for book in ranks], 0), module)
    return module.logged


#: Values and weights of microbatches, options, the value that Lightning gets, and its weight.
MERGED: list[tuple[list[tuple[Any, Any]], dict[str, Any], float, float]] = [
    ([(1.0, 3), (5.0, 1)], {}, 2.0, 4),
    ([(1.0, 3), (5.0, 1)], {"batch_size": 2}, 3.0, 4),
    ([(torch.tensor(1.0), torch.tensor(3)), (torch.tensor([5.0]), 1)], {}, 2.0, 4),
    ([(math.inf, 1), (-math.inf, 1)], {}, math.nan, 2),
    ([(math.inf, 1), (1.0, 1)], {}, math.inf, 2),
    ([(math.nan, 0.0), (3.0, 2.0)], {}, 3.0, 2),
    ([(math.nan, 1.0), (3.0, 2.0)], {}, math.nan, 3),
    *(([(two, 1)], {"sync_dist": True}, 2.0, 1) for two in (2, np.float32(2), np.int64(2), Fraction(2))),
]
REDUCTIONS = [("sum", 6.0), ("min", 1.0), (max, 5.0), (torch.sum, 6.0), (torch.max, 5.0), ("AVG", 2.0)]


@pytest.mark.parametrize(("values", "options", "expected", "weight"), MERGED)
def test_a_mean_is_weighted_by_microbatch(values, options, expected, weight):
    ((_, result, given),) = logged(recorded(*values, **options))
    assert (result, given["batch_size"]) == (pytest.approx(expected, nan_ok=True), weight)


@pytest.mark.parametrize(("reduce_fx", "expected"), REDUCTIONS)
def test_other_reductions(reduce_fx, expected):
    for sync_dist in (False, True):
        ((_, result, _),) = logged(recorded((1.0, 3), (5.0, 1), reduce_fx=reduce_fx, sync_dist=sync_dist))
        assert result == expected


def test_wrong_calls_are_found_out_at_once():
    with pytest.raises(ValueError, match="use 'mean', 'sum', 'min' or 'max'"):
        recorded((1.0, 1), reduce_fx=torch.prod)
    book, module = LogBook(), Sink()
    with book.recording(module):
        module.log("x", 1.0, reduce_fx="sum")
        with pytest.raises(ValueError, match=r"called twice.*'sum' and with 'mean'"):
            module.log("x", 1.0)
    with LogBook().recording(strict := LightningModule()), pytest.raises(TypeError, match="synk"):
        strict.log("x", 1.0, synk=True)


def test_a_mean_over_nothing_is_not_logged():
    nothing = recorded((3.0, 0.0), sync_dist=True)
    assert logged(nothing, recorded((5.0, 0.0), sync_dist=True)) == []
    ((_, mean, _),) = logged(nothing, recorded((5.0, 1.0), sync_dist=True))
    ((_, total, _),) = logged(recorded((3.0, 0.0), reduce_fx="sum"))
    assert (mean, total) == (5.0, 3.0)


def test_what_other_ranks_do_not_need_is_not_sent_and_names_are_sent_compactly():
    assert recorded((1.0, 3), sync_dist=True, rank_zero_only=True).post() == [[], []]
    book, module = LogBook(), Sink()
    with book.recording(module):
        for layer in range(2000):
            module.log(f"layer_{layer}/norm", 1.0, sync_dist=True, on_epoch=True)
            module.log(f"own_{layer}", 1.0)
    assert len(json.dumps(book.post())) < 2000 * 40


def test_what_is_neither_number_nor_metric_goes_to_lightning_at_once():
    book, module = LogBook(), Sink()
    with book.recording(module):
        module.log("x", "text", on_epoch=True)
        module.log("y", torch.ones(2))
    assert [name for name, *_ in module.logged] == ["x", "y"]
    assert book.take() == []
