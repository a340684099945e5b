"""``BalancedDataLoader`` under a trainer: the same gradient for every policy, and checkpoints that go on exactly.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_odc.balance import POLICIES
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.samples.packing import pack_samples
from tests.support.fits import LR, Parameters, are_equal, assert_same, one_process
from tests.support.models import full_parameters
from tests.support.modules import TokenModule, trainer
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

LENGTHS = np.random.default_rng(0).integers(2, 16, 23).tolist()
STEPS = 6  # of 4 samples each, the last of 3
EPOCHS = 2


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(11, (length,), generator=generator) for length in LENGTHS]


def loader(rank: int, world_size: int, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {
        "minibatch_size": 4 // world_size,
        "lengths": LENGTHS,
        "max_tokens": 24,
        "weighting": "next_token",
        "collate_fn": pack_samples,
        "shuffle": True,
        "seed": 7,
        "num_replicas": world_size,
        "rank": rank,
    }
    return BalancedDataLoader(rows(), **{**defaults, **options})


class RowsModule(TokenModule):
    """Mean next-token loss of packed rows."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        logits = self.net(batch["input_ids"])[0, :-1]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:])


def reference() -> Parameters:
    """One process, plain torch, the planned minibatches: the mean over all tokens of each."""
    samples = rows()
    balanced = loader(0, 1)
    minibatches = []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            (microbatches,) = balanced.plan(step, epoch).microbatches
            indices = [index for microbatch in microbatches for index in microbatch]
            minibatches.append([pack_samples([samples[index] for index in indices])])
    return one_process(RowsModule(), minibatches)


@on_ranks(2)
@pytest.mark.parametrize(
    ("communication", "policy"),
    fast(
        [
            *(("on_demand", policy) for policy in POLICIES),
            ("collective", "lb_micro"),
            ("collective", "local_sort"),
        ],
        ("on_demand", "lb_mini"),
        ("collective", "lb_micro"),
    ),
)
def test_every_policy_ends_in_the_parameters_of_one_process(rank, communication, policy):
    module = RowsModule()
    t = trainer(2, communication=communication, max_epochs=EPOCHS)
    t.fit(module, loader(rank, 2, balance=policy))
    assert t.global_step == STEPS * EPOCHS
    assert_same(full_parameters(module), reference())
    batches = of_all_ranks(module.batches)
    if policy not in ("lb_mini", "steal"):
        assert len(set(batches)) == 1
    if policy == "local_sort":
        assert sum(batches) == 24 * EPOCHS


class Spy(Callback):
    """What every training batch was made of."""

    def __init__(self) -> None:
        self.plans: list[str | None] = []

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Minibatch, _: int
    ) -> None:
        self.plans.append(batch.plan)


class MadeEarly(RowsModule):
    """Has the training loader made before Lightning reads the checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == STEPS * EPOCHS
        return super().configure_optimizers()


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "kind", "workers"),
    [
        pytest.param(
            RowsModule,
            "full",
            {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
            marks=pytest.mark.slow,  # every worker of three fits imports torch anew
            id="workers",
        ),
        pytest.param(RowsModule, "sharded", {}, id="sharded"),
        pytest.param(MadeEarly, "full", {}, id="made early"),
    ],
)
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_bit_by_bit(rank, make, kind, workers, tmp_path):
    """A whole fit, and those that go on from its checkpoints."""
    outcomes = []
    for step in (None, 4, 8):
        spy = Spy()
        module = make()
        save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
        if step:
            callbacks = [spy]
        else:
            callbacks = [spy, save]
        options = {"callbacks": callbacks, "enable_checkpointing": step is None}
        t = trainer(2, deterministic=True, state_dict_type=kind, max_epochs=EPOCHS, **options)
        checkpoint = None
        if step:
            checkpoint = tmp_path / f"step={step}.ckpt"
        t.fit(module, loader(rank, 2, **workers), ckpt_path=checkpoint)
        outcomes.append((full_parameters(module), spy.plans))
    (parameters, plans), *resumed = outcomes
    assert len(plans) == STEPS * EPOCHS
    for step, (again, plans_again) in zip((4, 8), resumed, strict=True):
        assert plans_again == plans[step:]
        assert are_equal(again, parameters)
    first, second = of_all_ranks(plans)
    assert first == second


class Bystander(LightningModule):
    """Takes minibatches whole and trains next to nothing: what matters is which ones it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))

    def transfer_batch_to_device(self, batch: Minibatch, *_: Any) -> Minibatch:
        return batch

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        return self.parameter.sum()

    def validation_step(self, batch: Minibatch, batch_idx: int) -> None:
        assert "epoch" in str(batch.plan)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset[Tensor]):
    """The rows, without saying how many."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows())


def stream() -> BalancedDataLoader:
    return BalancedDataLoader(Endless(), minibatch_size=4, window=2, collate_fn=list, shuffle=True)


def plans_of(
    balanced: BalancedDataLoader, options: dict[str, Any], checkpoint: Path | None = None, **saving: Any
) -> list[str | None]:
    """Plans that a one-process trainer runs, saving or going on."""
    spy = Spy()
    callbacks = []
    if saving:
        callbacks = [ModelCheckpoint(save_top_k=-1, filename="{step}", **saving)]
    options = {"callbacks": [spy, *callbacks], "enable_checkpointing": bool(saving), **options}
    fitter = trainer(1, strategy="auto", **options)
    fitter.fit(Bystander(), balanced, loader(0, 1, shuffle=False), ckpt_path=checkpoint)
    return spy.plans


@pytest.mark.parametrize(
    ("make", "options", "minibatches", "steps"),
    [
        (lambda: loader(0, 1), {"max_epochs": 2, "val_check_interval": 2}, 12, range(1, 12)),
        (lambda: loader(0, 1), {"max_epochs": 3, "limit_train_batches": 4}, 12, range(1, 12)),
        (lambda: loader(0, 1), {"max_epochs": -1, "max_steps": 10}, 10, range(1, 10)),
        # if Lightning need not look ahead
        (stream, {"max_epochs": 2, "limit_train_batches": 5}, 10, (1, 4, 7)),
    ],
    ids=["validation", "limited", "steps", "stream"],
)
def test_every_checkpoint_goes_on_where_it_was_taken(make, options, minibatches, steps, tmp_path):
    whole = plans_of(make(), options, dirpath=tmp_path, every_n_train_steps=1)
    assert len(set(whole)) == minibatches
    assert len(whole) == minibatches
    for step in steps:
        assert plans_of(make(), options, tmp_path / f"step={step}.ckpt") == whole[step:]


class SteppingRows(RowsModule):
    """Steps by hand under DDP, once per minibatch, as the documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights: list[float] = []

    def transfer_batch_to_device(
        self, minibatch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        return minibatch.map(lambda batch: move_data_to_device(batch, device))

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        total = self.all_gather(sum(minibatch.weights)).sum()
        for batch, weight in minibatch.weighted():
            self.weights.append(weight)
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss * weight * self.trainer.world_size / total)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_minibatches_under_ddp_step_by_hand(rank):
    module = SteppingRows()
    t = trainer(2, strategy="ddp", max_epochs=EPOCHS)
    t.fit(module, loader(rank, 2, balance="lb_micro", max_tokens=16))
    assert t.global_step == STEPS * EPOCHS
    first, second = of_all_ranks(module.weights)
    assert len(first) == len(second) > t.global_step
    assert 0.0 in first + second, "a last minibatch of three samples needs one of weight zero"
    assert_same(full_parameters(module), reference())


@on_ranks(1)
def test_a_strategy_that_does_not_know_minibatches_says_so(rank):
    with pytest.raises(TypeError, match="must be unrolled by a strategy that knows it"):
        trainer(1, strategy="ddp", max_steps=1).fit(RowsModule(), loader(0, 1))
