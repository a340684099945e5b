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
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from lightning_odc.balance import POLICIES
from lightning_odc.data.loader import BalancedDataLoader, Microbatch
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.packing import PackedBatch, pack_samples
from tests.support.fits import LR, Parameters, are_equal, assert_same, one_process
from tests.support.models import Net, full_parameters
from tests.support.modules import trainer
from tests.support.ranks import Cases, run_calls, run_ranks

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


class RowsModule(LightningModule):
    """Mean next-token loss of packed rows; a `Microbatch` is weighted as its documentation says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        if isinstance(batch, Microbatch):
            return self.mean_loss(batch.batch) * batch.weight
        return self.mean_loss(batch)

    def mean_loss(self, batch: PackedBatch) -> Tensor:
        logits, labels = self.net(batch["input_ids"])[0, :-1], batch["labels"][0, 1:]
        return torch.nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


def reference(steps: int = STEPS) -> Parameters:
    """One process, plain torch, the planned minibatches: the mean over all tokens of each."""
    samples, balanced, minibatches = rows(), loader(0, 1), []
    for epoch in range(EPOCHS):
        for step in range(steps):
            (microbatches,) = balanced.plan(step, epoch).microbatches
            indices = [index for microbatch in microbatches for index in microbatch]
            minibatches.append([pack_samples([samples[index] for index in indices])])
    return one_process(RowsModule(), minibatches)


def fit_all(rank: int, world_size: int, communication: str, policies: list[str]) -> dict[str, Any]:
    results = {}
    for policy in policies:
        module = RowsModule()
        fitter = trainer(world_size, communication=communication, max_epochs=EPOCHS)
        fitter.fit(module, loader(rank, world_size, policy=policy))
        results[policy] = full_parameters(module), module.batches, fitter.global_step
    return results


RUNS = [
    (1, "on_demand", ["lb_mini", "local_sort"]),
    (2, "on_demand", list(POLICIES)),
    (2, "collective", ["lb_micro", "local_sort"]),
]
KEPT_WORKER = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """All that two ranks train, in one launch."""
    folder = str(tmp_path_factory.mktemp("fit"))
    return run_calls(
        {
            "on_demand": (fit_all, *RUNS[1]),
            "collective": (fit_all, *RUNS[2]),
            "ddp": (fit_ddp,),
            "unrolled": (fit_unrolled,),
            "sharded": (fit_and_resume, folder, "sharded", {}),
        }
    )


@pytest.mark.parametrize(("world_size", "communication", "policies"), RUNS, ids=["1", "2", "collective"])
def test_every_policy_ends_in_the_parameters_of_one_process(ranks, world_size, communication, policies):
    alone = world_size == 1
    results = run_ranks(fit_all, *RUNS[0], world_size=1) if alone else ranks[communication]
    expected = reference()
    for policy in policies:
        for parameters, _, steps in (result[policy] for result in results):
            assert steps == STEPS * EPOCHS
            assert_same(parameters, expected)
        batches = [result[policy][1] for result in results]
        if policy in ("lb_micro", "local_sort"):
            assert len(set(batches)) == 1
        if policy == "local_sort":
            assert sum(batches) == (23 + 23 % world_size) * EPOCHS


# -- resuming --------------------------------------------------------------------------------------------------


class Spy(Callback):
    """What every training batch was made of."""

    def __init__(self) -> None:
        self.plans: list[str | None] = []

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Minibatch, _: int
    ) -> None:
        self.plans.append(batch.plan)


Outcome = tuple[Parameters, list[str | None]]


def fit_and_resume(rank: int, directory: str, state_dict_type: str, workers: dict[str, int]) -> list[Outcome]:
    """A whole fit, and those that go on from its checkpoints."""
    outcomes = []
    for step in (None, 4, 8):
        spy, module = Spy(), RowsModule()
        save = ModelCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=4)
        fitter = trainer(
            2,
            deterministic=True,
            state_dict_type=state_dict_type,
            callbacks=[spy] if step else [spy, save],
            enable_checkpointing=step is None,
            max_epochs=EPOCHS,
        )
        checkpoint = Path(directory) / f"step={step}.ckpt" if step else None
        fitter.fit(module, loader(rank, 2, **workers), ckpt_path=checkpoint)
        outcomes.append((full_parameters(module), spy.plans))
    return outcomes


@pytest.mark.parametrize("run", ["workers", "sharded"])
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_bit_by_bit(ranks, run, tmp_path):
    # On a machine that is busy, every tensor that a worker sends waits for its turn several times.
    with_workers = (fit_and_resume, str(tmp_path), "full", KEPT_WORKER)
    found = ranks[run] if run == "sharded" else run_ranks(*with_workers, timeout=170)
    for (parameters, plans), *resumed in found:
        assert len(plans) == STEPS * EPOCHS
        for step, (again, plans_again) in zip((4, 8), resumed, strict=True):
            assert plans_again == plans[step:]
            assert are_equal(again, parameters)
    assert found[0][0][1] == found[1][0][1]


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
    callbacks = [ModelCheckpoint(save_top_k=-1, filename="{step}", **saving)] if saving else []
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
    assert len(set(whole)) == len(whole) == minibatches
    for step in steps:
        assert plans_of(make(), options, tmp_path / f"step={step}.ckpt") == whole[step:]


class Counter(Callback):
    """How many minibatches ended in every epoch."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.microbatches: list[int] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.ended.append(0)
        self.microbatches.append(0)

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Microbatch, _: int
    ) -> None:
        self.ended[-1] += batch.last
        self.microbatches[-1] += 1


def test_lightning_sees_unrolled_epochs_of_different_lengths_whole():
    counter = Counter()
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    fitter = trainer(1, strategy="auto", callbacks=[counter], **options)
    fitter.fit(RowsModule(), loader(0, 1, policy="lb_micro", unroll=True))
    assert counter.ended == [STEPS] * 4
    assert len(set(counter.microbatches)) > 1


# -- other strategies ------------------------------------------------------------------------------------------


def fit_ddp(rank: int) -> tuple[Parameters, int]:
    module = RowsModule()
    # local_sort: 5 whole minibatches of 2 samples per rank
    options = {"limit_train_batches": 10, "accumulate_grad_batches": 2}
    fitter = trainer(2, strategy="ddp", max_epochs=EPOCHS, **options)
    fitter.fit(module, loader(rank, 2, policy="local_sort", unroll=True))
    assert isinstance(fitter.strategy, DDPStrategy)
    assert fitter.world_size == 2
    return full_parameters(module), fitter.global_step


def test_unrolled_microbatches_under_ddp_give_the_gradient_of_the_minibatch(ranks):
    for parameters, steps in ranks["ddp"]:
        assert steps == 5 * EPOCHS
        assert_same(parameters, reference(steps=5))


class SteppingRows(RowsModule):
    """Steps at the end of every minibatch, however many microbatches are in it; for its gradient, not in proportion."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights: list[float] = []
        self.since = 0

    def training_step(self, batch: Microbatch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.weights.append(batch.weight)
        self.since += 1
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch.last:
            for parameter in self.parameters():
                parameter.grad /= self.since
            optimizer.step()
            optimizer.zero_grad()
            self.since = 0


class ShardedRows(SteppingRows):
    """A user's own ``fully_shard``."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def fit_unrolled(rank: int) -> list[Any]:
    results = []
    sharding = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    for module, strategy in ((SteppingRows(), "ddp"), (ShardedRows(), sharding)):
        fitter = trainer(2, strategy=strategy, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1)
        fitter.fit(module, loader(rank, 2, policy="lb_micro", max_tokens=16, unroll=True))
        results.append((full_parameters(module), module.weights, fitter.global_step))
    return results


def test_unequal_minibatches_under_collectives_step_where_they_end(ranks):
    expected = reference()
    for (parameters, first, steps), (_, second, _) in zip(*ranks["unrolled"], strict=True):
        assert steps == STEPS * EPOCHS
        assert len(first) == len(second) > steps
        assert 0.0 in first + second, "a last minibatch of three samples needs one of weight zero"
        assert_same(parameters, expected)


def fit_minibatches_under_ddp(rank: int) -> str:
    fitter = trainer(1, strategy="ddp", max_steps=1)
    with pytest.raises(TypeError) as caught:
        fitter.fit(RowsModule(), loader(0, 1))
    return str(caught.value)


def test_a_strategy_that_does_not_know_minibatches_says_so():
    (message,) = run_ranks(fit_minibatches_under_ddp, world_size=1)
    assert "must be unrolled by a strategy that knows it" in message
