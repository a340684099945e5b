"""What training logs, on real ranks with different numbers of microbatches."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.strategy.logbook import LogBook, flush
from tests.support.fits import Watch, before_step, doing, fit, numbers
from tests.support.models import token_batches
from tests.support.modules import TokenModule, warned
from tests.support.ranks import on_ranks

SOON = timedelta(seconds=20)


def shares_of(lengths: list[list[list[int]]], rank: int) -> list[Minibatch]:
    return [Minibatch(token_batches(step[rank], seed=index)) for index, step in enumerate(lengths)]


def log_in_every_way(own: Any, batch: Tensor) -> None:
    length = float(batch.shape[1])
    epoch = {"sync_dist": True, "on_step": True, "on_epoch": True}
    reductions = {"mean": "mean", "sum": torch.sum, "min": "min", "max": max, "tmax": torch.max}
    for name, reduce_fx in reductions.items():
        own.log(name, length, reduce_fx=reduce_fx, batch_size=1, **epoch)
    own.log("positional", length, True, None, True, True, "max", sync_dist=True)
    own.log_dict({"numpy": np.float32(length), "one": 1}, batch_size=1, **epoch)
    own.log("own", length, on_step=True, on_epoch=True, batch_size=1)


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
    with warned() as caught:
        fit(before_step(TokenModule("items"), log_in_every_way), shares_of(lengths, rank), **options)
    every = [n for step in lengths for own in step for n in own]
    expected = {"mean": (sum(every) / len(every)), "sum": sum(every), "min": min(every), "max": max(every)}
    expected |= {"tmax": max(every), "numpy": expected["mean"], "one": 1.0, "positional": max(every)}
    for seen, step in zip(watch.metrics, lengths * 2, strict=True):
        of_step = [n for own in step for n in own]
        reduced = [seen[f"{name}_step"] for name in ("sum", "min", "max")]
        assert reduced == [f(of_step) for f in (sum, min, max)]
        assert seen["mean_step"] == pytest.approx(sum(of_step) / len(of_step))
        if step[rank]:
            assert seen["own_step"] == pytest.approx(sum(step[rank]) / len(step[rank]))
    own = [n for step in lengths for n in step[rank]]
    for seen in watch.epochs:
        assert {name: seen[f"{name}_epoch"] for name in expected} == pytest.approx(expected)
        assert seen["own_epoch"] == pytest.approx(sum(own) / len(own))
    # Lightning's advice is right where a user did not synchronise. It comes once, on rank 0.
    advice = [w for w in caught if "It is recommended to use `self.log(" in w]
    assert len(advice) <= (rank == 0), advice
    for text in advice:
        assert "self.log('own'" in text


class SkipsLast(TokenModule):
    """No optimizer makes the second step of an epoch."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx == 0:
            optimizer.step()


@on_ranks(2)
def test_values_of_a_step_that_no_optimizer_makes_belong_to_their_epoch(rank):
    watch = Watch()
    module = before_step(SkipsLast("items"), log_length)
    lengths = [[[4, 6], [8]], [[5], [7]]]
    fit(module, shares_of(lengths, rank), max_epochs=2, callbacks=[watch], sharding_strategy="NO_SHARD")
    assert [seen["sum_epoch"] for seen in watch.epochs] == [30, 30]


class Groups(TokenModule):
    def setup(self, stage: str) -> None:
        self.group = [dist.new_group([0, 1]), dist.new_group([2])][self.global_rank // 2]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", float(self.global_rank), sync_dist=True, sync_dist_group=self.group, batch_size=1)


@on_ranks(3)
def test_a_group_of_ranks_has_its_own_value_of_plain_batches(rank):
    data = shares_of([[[4], [4], [5]]], rank)
    t = fit(Groups("mean"), data, 3, token_batches([4]), timeout=SOON)
    value = (0.5, 0.5, 2.0)[rank]
    assert t.callback_metrics["v"] == value


def log_in_hook(own: Any) -> None:
    own.log("hook", 1.0 + own.global_rank, on_step=False, on_epoch=True, sync_dist=True)
    own.log("own_hook", 1.0 + own.global_rank, on_step=False, on_epoch=True)


def log_in_validation(own: Any) -> None:
    own.log("val_hook", 1.0 + own.global_rank, sync_dist=True)


@on_ranks(2)
def test_hooks_log_once_per_minibatch_however_empty(rank):
    validation = shares_of([[[], [3]]], rank)
    hooks = {"on_train_batch_end": log_in_hook, "on_validation_batch_end": log_in_validation}
    data = shares_of([[[4, 6], []], [[5], []]], rank)
    t = fit(doing(TokenModule("items"), **hooks), data, 2, validation, timeout=SOON)
    seen = {name: value for name, value in numbers(t.callback_metrics).items() if "hook" in name}
    assert seen == {"hook": 1.5, "own_hook": 1.0 + rank, "val_hook": 1.5}


def log_length(own: Any, batch: Tensor) -> None:
    options = {"sync_dist": True, "on_step": True, "on_epoch": True}
    own.log("mean", float(batch.shape[1]), **options)
    own.log("sum", float(batch.shape[1]), reduce_fx="sum", **options)


@on_ranks(2)
def test_what_weighs_nothing_has_no_part_in_a_mean(rank):
    weights = {4: 0.0, 6 + rank: 2.0}
    shares = [Minibatch(token_batches([size]), weights=[weight]) for size, weight in weights.items()]
    fit(before_step(TokenModule(), log_length), shares, callbacks=[watch := Watch()], timeout=SOON)
    (seen,) = watch.epochs
    assert seen["mean_epoch"] == 6.5
    assert seen["sum_epoch"] == 4 + 4 + 6 + 7


class Counts(TokenModule):
    """Ranks count 3 and 2: rounded down their mean would be 2, and the constant 1.25."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("one", 1.0, sync_dist=True, on_step=False, on_epoch=True, batch_size=3 - self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        global_rank = float(self.global_rank)
        for name, value in (("val_one", 1.0), ("val_rank", global_rank)):
            self.log(name, value, sync_dist=True, batch_size=3 - self.global_rank)


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_the_mean_of_integer_counts_is_not_rounded(rank, communication):
    t = fit(Counts(), token_batches([4]), 2, token_batches([4]), communication=communication)
    found = numbers(t.callback_metrics)
    assert found == {"one": 1.0, "val_one": 1.0, "val_rank": pytest.approx(2 / 5)}


def merged(values: list[tuple[Any, float]], **options: Any) -> list[tuple[Any, Any]]:
    """What Lightning gets, and its weight, when each value was logged in a microbatch of the given weight."""
    book = LogBook()
    module = LightningModule()
    with patch.object(module, "log", autospec=True) as log:
        with book.recording(module):
            for value, weight in values:
                module.log("x", value, **options)
                book.weigh(weight)
        assert not log.called
        by_rank = [json.loads(json.dumps(book.post()))]
        flush(book.merge(by_rank), module)  # as it comes out of a mailbox
    return [(call.args[1], call.kwargs["batch_size"]) for call in log.call_args_list]


INF = math.inf
NAN = math.nan
#: Values and weights of microbatches, options, the value that Lightning gets, and its weight (none over nothing).
MERGED: list[tuple[list[tuple[Any, Any]], dict[str, Any], list[tuple[float, float]]]] = [
    ([(1.0, 3), (5.0, 1)], {}, [(2.0, 4)]),
    ([(1.0, 3), (5.0, 1)], {"batch_size": 2}, [(3.0, 4)]),
    ([(torch.tensor(1.0), torch.tensor(3)), (torch.tensor([5.0]), 1)], {}, [(2.0, 4)]),
    ([(INF, 1), (-INF, 1)], {}, [(NAN, 2)]),
    ([(INF, 1), (1.0, 1)], {}, [(INF, 2)]),
    ([(NAN, 0.0), (3.0, 2.0)], {}, [(3.0, 2)]),
    ([(NAN, 1.0), (3.0, 2.0)], {}, [(NAN, 3)]),
    *(([(two, 1)], {"sync_dist": True}, [(2.0, 1)]) for two in (2, np.float32(2), np.int64(2), Fraction(2))),
    ([(1.0, 3), (5.0, 1)], {"reduce_fx": "AVG"}, [(2.0, 4)]),
    ([(3.0, 0.0)], {"sync_dist": True}, []),
]


def test_a_mean_is_weighted_by_microbatch():
    for values, options, expected in MERGED:
        assert merged(values, **options) == [pytest.approx(one, nan_ok=True) for one in expected], values


def test_what_is_wrong_or_no_number_is_found_out_at_once():
    with pytest.raises(ValueError, match="use 'mean', 'sum', 'min' or 'max'"):
        merged([(1.0, 1)], reduce_fx=torch.prod)
    with pytest.raises(TypeError, match="synk"):
        merged([(1.0, 1)], synk=True)
    with pytest.raises(ValueError, match="sync_dist_group"):
        merged([(1.0, 1)], sync_dist_group=object())
    book = LogBook()
    module = LightningModule()
    with patch.object(module, "log") as log, book.recording(module):
        module.log("x", 1.0, reduce_fx="sum")
        with pytest.raises(ValueError, match=r"called twice.*'sum' and with 'mean'"):
            module.log("x", 1.0)
        book.take()
        module.log("y", "text", on_epoch=True)
        module.log("z", torch.ones(2))
    assert [call.args[0] for call in log.call_args_list] == ["y", "z"], "which Lightning gets as they are"


def test_names_are_sent_only_to_ranks_that_need_them():
    book = LogBook()
    module = LightningModule()
    with book.recording(module):
        module.log("zero", 1.0, sync_dist=True, rank_zero_only=True)
        module.log("own", 1.0)
        assert book.post() == []
        module.log("shared", 1.0, sync_dist=True, on_epoch=True)
        module.log("own", 1.0)
    (entry,) = json.loads(json.dumps(book.post()))
    assert entry[:3] == ["shared", "mean", {"sync_dist": True, "on_epoch": True}]
