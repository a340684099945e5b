"""What training logs, on real ranks with different numbers of microbatches."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.strategy.ranks import counted_by_microbatch
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import run_ranks

SOON = timedelta(seconds=20)


class Epochs(Callback):
    """Keeps the values of every epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def fit(
    module: TokenModule, shares: list[Minibatch], world_size: int = 2, **options: Any
) -> list[dict[str, float]]:
    spy = Epochs()
    t = trainer(world_size, timeout=SOON, callbacks=[spy], **options)
    t.fit(module, loader(shares))
    assert "log" not in vars(module)
    return spy.seen


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
        self.log("own", length, on_step=False, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


def _fit_reductions(rank: int, lengths: Any, communication: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = fit(Reductions("items"), shares_of(lengths, rank), communication=communication, max_epochs=2)
    return seen, [str(w.message) for w in caught if "It is recommended to use `self.log(" in str(w.message)]


@pytest.mark.parametrize(
    ("lengths", "communication"),
    [
        ([[[4, 6, 3], [9]], [[5], []]], "on_demand"),
        ([[[4, 6], [9, 5]], [[7], [3]]], "collective"),
        ([[[4, 6, 3], []], [[], [5, 8]]], "on_demand"),
    ],
    ids=str,
)
def test_values_of_an_epoch_are_those_of_all_ranks(lengths, communication):
    every = [n for step in lengths for own in step for n in own]
    expected = {"mean": sum(every) / len(every), "sum": sum(every), "min": min(every), "max": max(every)}
    expected |= {"tmax": max(every), "numpy": expected["mean"], "one": 1.0, "positional": max(every)}
    for rank, (epochs, complaints) in enumerate(run_ranks(_fit_reductions, lengths, communication)):
        own = [n for step in lengths for n in step[rank]]
        for seen in epochs:
            assert {name: seen[f"{name}_epoch"] for name in expected} == pytest.approx(expected)
            assert seen["own"] == pytest.approx(sum(own) / len(own))
        # Lightning's advice is right where a user did not synchronise, and given on rank 0.
        assert len(complaints) == (rank == 0), complaints
        assert all("self.log('own'" in text for text in complaints)


class Groups(TokenModule):
    def setup(self, stage: str) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        self.group = groups[self.global_rank // 2]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("x", float(self.global_rank), sync_dist=True, sync_dist_group=self.group, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", float(self.global_rank), sync_dist=True, sync_dist_group=self.group, batch_size=1)


def _fit_groups(rank: int) -> tuple[float, float]:
    module, spy = Groups("mean"), Epochs()
    t = trainer(3, timeout=SOON, callbacks=[spy])
    t.fit(module, loader(shares_of([[[4], [4], [5]]], rank)), loader(token_batches([4])))
    return spy.seen[-1]["x_epoch"], t.callback_metrics["v"].item()


def test_a_group_of_ranks_has_its_own_value():
    assert run_ranks(_fit_groups, world_size=3) == [(0.5, 0.5), (0.5, 0.5), (2.0, 2.0)]


class Many(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        names = [f"a_rather_long_name_of_layer_{layer}/gradient_norm" for layer in range(2000)]
        self.log_dict({name: float(batch.shape[1]) for name in names}, sync_dist=True)
        return super().training_step(batch, batch_idx)


def _fit_many(rank: int) -> tuple[int, set[float]]:
    (seen,) = fit(Many("mean"), shares_of([[[4, 6], [8]]], rank))
    return len(seen), set(seen.values())


def test_thousands_of_names_are_no_problem():
    assert run_ranks(_fit_many) == [(2000, {6.0})] * 2


class Hooks(TokenModule):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("hook", 1.0 + self.global_rank, on_step=False, on_epoch=True, sync_dist=True)
        self.log("own_hook", 1.0 + self.global_rank, on_step=False, on_epoch=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("val_hook", 1.0 + self.global_rank, sync_dist=True)


def _fit_hooks(rank: int) -> dict[str, float]:
    module, spy = Hooks("items"), Epochs()
    t = trainer(2, timeout=SOON, callbacks=[spy])
    t.fit(module, loader(shares_of([[[4, 6], []], [[5], []]], rank)), loader(shares_of([[[], [3]]], rank)))
    return {name: value.item() for name, value in t.callback_metrics.items() if "hook" in name}


def test_hooks_log_once_per_minibatch_however_empty():
    for rank, seen in enumerate(run_ranks(_fit_hooks)):
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


def _fit_weightless(rank: int, later: float) -> list[dict[str, float]]:
    shares = [
        Minibatch(token_batches([4]), weights=[0.0]),
        Minibatch(token_batches([6 + rank]), weights=[later]),
    ]
    return fit(Weightless("mean"), shares)


@pytest.mark.parametrize(("later", "mean"), [(0.0, None), (2.0, 6.5)])
def test_a_mean_over_nothing_has_no_value(later, mean):
    for (seen,) in run_ranks(_fit_weightless, later):
        assert seen.get("mean_epoch") == mean
        assert seen["sum_epoch"] == 4 + 4 + 6 + 7


class Plain(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("one", 1.0, sync_dist=True, on_step=False, on_epoch=True, batch_size=3 - self.global_rank)
        return super().training_step(batch, batch_idx)


def _fit_plain(rank: int, communication: str) -> list[dict[str, float]]:
    spy = Epochs()
    trainer(2, communication=communication, callbacks=[spy]).fit(Plain(), loader(token_batches([4])))
    return spy.seen


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_the_mean_of_integer_counts_is_not_rounded(communication):
    # Counts 3 and 2: rounded down their mean would be 2, and the constant 1.25.
    assert run_ranks(_fit_plain, communication) == [[{"one": 1.0}]] * 2


class Fails(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("x", 1000.0, sync_dist=True)
        raise ValueError("on purpose")


def _fit_failing(rank: int) -> bool:
    module = Fails("items")
    with pytest.raises((ValueError, RuntimeError)):
        fit(module, shares_of([[[4], [5]]], rank))
    return "log" in vars(module)


def test_the_modules_log_comes_back_after_an_error():
    assert run_ranks(_fit_failing) == [False, False]
