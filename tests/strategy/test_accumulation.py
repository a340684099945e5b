"""Accumulation folded into minibatches: fewer, larger batches, and every count of optimizer steps as before."""

from __future__ import annotations

import csv
import math
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader
from lightning_odc.strategy.accumulation import folded_limit
from tests.strategy.test_balance import SAMPLES, Padded, pad, reference
from tests.support import fits
from tests.support.fits import assert_same
from tests.support.models import full_parameters
from tests.support.ranks import on_ranks


class Counted(Padded):
    """Counts what a user counts: steps, learning rates, validations; and asks for the number of steps beforehand."""

    def __init__(self, asks: bool = True, fails: bool = False) -> None:
        super().__init__(counted=True)
        self.asks = asks
        self.fails = fails
        self.estimated: float = 0
        self.factors: list[int] = []
        self.validated: list[int] = []
        self.rates: dict[int, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.factors.append(self.trainer.accumulate_grad_batches)
        if self.fails and batch_idx:
            raise RuntimeError("a failure of the user's")
        self.log("at", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates[self.trainer.global_step] = optimizer.param_groups[0]["lr"]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_start(self) -> None:
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        if self.asks:
            self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma), **options}
            for gamma, options in ((0.9, {"interval": "step", "frequency": 8}), (0.5, {"interval": "epoch"}))
        ]
        return [optimizer], schedulers


def loader(samples: list[Tensor] = SAMPLES[:22], **options: Any) -> DataLoader[Tensor]:
    return DataLoader(samples, **{"batch_size": 1, "collate_fn": pad, **options})


def fit(balance: str | None, module: pl.LightningModule, data: Any, **options: Any) -> pl.Trainer:
    given = {"accumulate_grad_batches": 4, "num_sanity_val_steps": 0, "max_epochs": 2}
    given |= {"balance": balance, "deterministic": True, "use_distributed_sampler": True, **options}
    validation = None
    if isinstance(module, Counted):
        validation = loader()
    return fits.fit(module, data, 2, validation, **given)


def as_made(t: pl.Trainer) -> tuple[Any, ...]:
    return t.accumulate_grad_batches, t.limit_train_batches, t.val_check_interval


@on_ranks(2)
def test_whatever_counts_optimizer_steps_counts_as_before(rank, tmp_path):
    """Of 22 samples on 2 ranks, in 11 batches: 3 steps per epoch, the last of them of 3 batches."""
    seen = []
    for balance, factor, batches in ((None, 4, 11), ("lb_mini", 1, 3)):
        place = tmp_path / str(balance)
        save = ModelCheckpoint(place, "{step}", save_top_k=-1, every_n_train_steps=4)
        options = {"callbacks": [save], "enable_checkpointing": True, "val_check_interval": 8}
        options |= {"log_every_n_steps": 2, "reload_dataloaders_every_n_epochs": 1}
        module = Counted()
        t = fit(balance, module, loader(), logger=CSVLogger(str(place), name="", version=""), **options)
        assert set(module.factors) == {factor}
        assert t.num_training_batches == batches
        assert t.global_step == module.estimated == 6
        assert module.validated == [2, 5]
        assert as_made(t) == (4, 1.0, 8)
        assert len(set(module.rates.values())) > 2, "both schedulers step"
        assert [path.name for path in place.glob("*.ckpt")] == ["step=4.ckpt"]
        rows = csv.DictReader((place / "metrics.csv").open())
        seen.append((module.rates, [row["step"] for row in rows if row.get("at")]))
    assert seen[0] == seen[1]


@on_ranks(2)
def test_folded_steps_are_those_of_one_process(rank):
    for balance, communication in (("lb_mini", "on_demand"), ("auto", "collective")):
        module = Padded(counted=True)
        options = {"balance": balance, "communication": communication, "accumulate_grad_batches": 4}
        t = fits.fit(module, loader(SAMPLES), **options)
        assert_same(full_parameters(module), reference(2))
        assert t.global_step == 3
        expected = "lb_micro"
        if communication == "on_demand":
            expected = "lb_mini"
        assert t.train_dataloader.recipe.policy == expected


@on_ranks(2)
def test_a_run_that_fails_puts_numbers_back(rank):
    module = Counted(fails=True)
    with pytest.raises(RuntimeError, match="a failure of the user's"):
        fit("lb_mini", module, loader(), limit_train_batches=8)
    assert as_made(module.trainer) == (4, 8, 1.0)
    assert module.factors[-1] == 1, "it was folded while it ran"


@on_ranks(2)
def test_steps_of_runs_that_limits_and_schedules_change(rank):
    own = fit("lb_mini", Padded(), BalancedDataLoader(SAMPLES, minibatch_size=2, collate_fn=pad))
    assert own.global_step == 2 * 2
    assert own.num_training_batches == 6, "the user's own accumulates as before"
    scheduled = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})], "accumulate_grad_batches": 1}
    warned = pytest.warns(UserWarning, match="so each of them is balanced alone")
    with warned if rank == 0 else nullcontext():
        assert fit("lb_mini", Counted(asks=False), loader(), **scheduled).global_step == 11 + 3
    limited = fit("lb_mini", Counted(), loader(), limit_train_batches=0.4, max_epochs=1)
    assert limited.global_step == 1
    assert limited.num_training_batches == 1
    assert fit("lb_mini", Counted(), loader(), max_steps=4, max_epochs=-1).global_step == 4
    assert fit("lb_mini", Counted(), loader(drop_last=True), max_epochs=1).global_step == 3


@on_ranks(2)
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_bit_by_bit_or_says_what_to_write(rank, tmp_path):
    """Saved after step 2 of 3, in the middle of the first epoch."""
    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    whole = Counted()
    again = Counted()
    path = tmp_path / "step=2.ckpt"
    t = fit("lb_mini", whole, loader(shuffle=True), callbacks=[save], enable_checkpointing=True)
    u = fit("lb_mini", again, loader(shuffle=True), ckpt_path=path)
    assert t.global_step == u.global_step == 6
    assert {step: whole.rates[step] for step in again.rates} == again.rates
    with pytest.raises(ValueError, match=r"Write Trainer\(accumulate_grad_batches=4\)"):
        fit("lb_mini", Counted(), loader(shuffle=True), accumulate_grad_batches=2, ckpt_path=path)
    assert fits.are_equal(full_parameters(whole), full_parameters(again))


def test_limits():
    for limit, expected in ((10, 3), (1, 1), (0, 0), (1.0, 1.0), (0.5, 3), (0.01, 0.01)):
        found = folded_limit(limit, 25, 4)
        assert found == expected
        assert type(found) is type(expected)
    assert folded_limit(1.0, math.inf, 4) == 1.0
