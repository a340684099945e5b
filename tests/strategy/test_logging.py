"""What training logs, on real ranks with different numbers of microbatches."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor

from lightning_odc import Minibatch
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
        assert seen.get("own_step") == (
            pytest.approx(sum(step[rank]) / len(step[rank])) if step[rank] else None
        )
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
