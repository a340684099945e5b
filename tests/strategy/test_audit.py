"""The proof of the loss goes on while it trains: microbatches are tried in the first step, and in steps 10, 100, ...

One step of SGD with lr 1 in float64 shows its gradient; the steps before it have lr 0. The reference is one process,
with the mean over whole batches, as under DDP.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc.trial.audit import Audit
from tests.strategy.test_loss_trial import Traces, state_of
from tests.support import losses
from tests.support.fits import are_equal, fit, largest_difference
from tests.support.losses import COUNTS, KINDS, LENGTHS, Losses, collate, samples
from tests.support.models import full_parameters
from tests.support.modules import said, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

BATCH = 4
OF_STEP = 2 * BATCH  # samples, on two ranks
LIMIT = 10  # of the samples of step 10, one is longer, and its rank has shorter ones, too


class Changing(Losses):
    """A loss that is another one from some epoch on.

    Args:
        kind: As in `Losses`.
        then: The kind of the term that is added, or ``"cut"`` or ``"left out"`` for long samples.
        epoch: The first epoch of it; a hook says that it has come.
    """

    def __init__(self, kind: str, then: str, epoch: int) -> None:
        super().__init__(kind)
        self.then = then
        self.epoch = epoch
        self.has_changed = False

    def on_train_epoch_start(self) -> None:
        self.has_changed = self.current_epoch >= self.epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.has_changed and self.then == "cut":
            batch = {name: value[:, :LIMIT] if value.dim() > 1 else value for name, value in batch.items()}
        if self.has_changed and self.then == "left out":
            rows = (batch["input_ids"] != 0).sum(1) <= LIMIT
            if not rows.any():
                return 0.0 * self.mix.weight.sum()
            batch = {name: value[rows] for name, value in batch.items()}
        loss = super().training_step(batch, batch_idx)
        if self.has_changed and self.then in KINDS:
            loss = loss + 0.1 * KINDS[self.then](self, batch)
        return loss


def tidy(batch: list[Any]) -> dict[str, Tensor]:
    return {name: value for name, value in collate(batch).items() if name not in ("rare", "some", "target")}


class LastStep(Callback):
    """Parameters stay as they are until the last step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = float(trainer.global_step == trainer.max_steps - 1)


def meant(module: Changing, data: list[Any]) -> dict[str, Tensor]:
    """Parameters after a step on whole batches."""
    module.has_changed = True
    object.__setattr__(module, "log", lambda *_: None)
    optimizer = module.configure_optimizers()
    batches = losses.dealt(data, 2, BATCH)
    for batch in batches:
        (module.training_step(tidy(batch), 0) / len(batches)).backward()
    optimizer.step()
    return full_parameters(module)


def error_of_last_step(
    make: Any, loader: Any, steps: int, of_last: list[Any]
) -> tuple[float, list[str], Any]:
    """How far the last step is from what is meant, as a part of what it moves; the warnings, and the trainer."""
    before = full_parameters(make())
    expected = meant(make(), of_last)
    moved = largest_difference(before, expected)
    module = make()
    with warned() as caught:
        t = fit(module, loader, max_steps=steps, max_epochs=-1, balance="auto", callbacks=[LastStep()])
    found = [text for text in caught if "weighed by what your loss" in text]
    return largest_difference(full_parameters(module), expected) / moved, found, t


#: What a loss is a mean over, what changes, and the workers of the loader.
CHANGES = [
    ("classes", "contrastive", 0),
    ("classes", "auxiliary loss", 0),
    ("labels", "ranked pairs", 0),
    ("labels", "cut", 0),
    ("labels", "left out", 0),
    ("classes", "left out", 0),
    ("labels", "cut", 2),
]


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "then", "workers"),
    fast(CHANGES, ("classes", "contrastive", 0), ("labels", "cut", 0), ("classes", "left out", 0)),
)
def test_a_loss_that_changes_later_is_found_and_batches_stay_whole_from_the_next_step(
    rank, kind, then, workers
):
    """Two steps per epoch; from the second epoch on the loss is another one, which is noticed in step 10.

    Workers have read the last minibatch by then, as it was planned before. It is planned and read again.
    """

    def make() -> Changing:
        return Changing(kind, then, epoch=1).double()

    keeps = workers > 0  # a worker imports for seconds, and there are six epochs
    loader = DataLoader(samples(), BATCH, collate_fn=tidy, num_workers=workers, persistent_workers=keeps)
    error, found, t = error_of_last_step(make, loader, 12, samples()[OF_STEP:])
    assert error < 1e-6
    assert len(found) == (rank == 0), found
    if rank == 0:
        assert "In step 10, " in found[0]
    assert t.train_dataloader.recipe.is_whole
    assert not t.train_dataloader.recipe.is_fixed
    assert t.strategy._rule is None, "evaluations count as training does"


@on_ranks(2)
@pytest.mark.parametrize("then", ["cut", "left out"])
def test_a_long_sample_alone_on_its_rank_is_compared_with_another_one(rank, then):
    data = samples((40, 3, 5, 4, 5, 3, 4, 5) * 2)  # a long one in each step

    def make() -> Changing:
        return Changing("labels", then, epoch=1).double()

    error, found, _ = error_of_last_step(make, DataLoader(data, BATCH, collate_fn=tidy), 12, data[OF_STEP:])
    assert error < 1e-6
    if rank == 0:
        assert "In step 10, " in found[0]


class Stream(IterableDataset[Any]):
    """Short samples first; long ones come with the eleventh minibatch."""

    def __iter__(self) -> Any:
        short = [sample for sample in samples() if len(sample["input_ids"]) <= LIMIT][:OF_STEP]
        return iter(short * 10 + samples()[:OF_STEP] * 3)


@on_ranks(2)
def test_inputs_that_are_cut_in_a_stream_are_found_when_they_come(rank):
    def make() -> Changing:
        return Changing("labels", "cut", epoch=0).double()

    def fit_stream() -> Any:
        module = make()
        loader = DataLoader(Stream(), BATCH, collate_fn=tidy)
        options: dict[str, Any] = {"length_fn": lambda sample: len(sample["input_ids"])}
        with warned() as caught:
            t = fit(module, loader, max_steps=13, balance="auto", callbacks=[LastStep()], **options)
        return t, module, [text for text in caught if "weighed by what your loss" in text]

    before = full_parameters(make())
    expected = meant(make(), samples()[:OF_STEP])
    t, module, found = fit_stream()
    assert len(found) == (rank == 0)
    if rank == 0:
        assert "In step 10, " in found[0]
    assert t.global_step == 13
    assert largest_difference(full_parameters(module), expected) / largest_difference(before, expected) < 1e-6


class Kept(Callback):
    """What a user sees of every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        numbers = torch.get_rng_state().sum(), torch.rand(1).item()
        self.seen.append((float(outputs["loss"]), logged, numbers, state_of(module), vars(module).keys()))


class Noisy(Traces):
    """Draws random numbers, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + KINDS["dropout"](self, batch)


@on_ranks(2)
def test_an_audit_leaves_no_trace(rank, monkeypatch):
    """Two of them, in the first step and in step 10: everything is as without them, bit for bit."""
    audits: list[str] = []
    of = Audit.of

    def counted(self: Audit, *args: Any) -> str:
        audits.append(of(self, *args))
        return audits[-1]

    monkeypatch.setattr(Audit, "of", counted)
    ends = []
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr(Audit, "is_due", lambda self: False)
        torch.manual_seed(3)
        module = Noisy()
        kept = Kept()
        options: dict[str, Any] = {"balance": "lb_mini", "deterministic": True, "cost": "quadratic"}
        loader = DataLoader(samples(), BATCH, collate_fn=collate)
        with said():
            fit(module, loader, max_steps=12, max_epochs=-1, callbacks=[kept], logger=True, **options)
        ends.append((full_parameters(module), kept.seen))
    assert audits == ["", ""], "both found the loss as it should be"
    assert are_equal(ends[0][0], ends[1][0])
    assert len(ends[0][1]) == 12
    for first, second in zip(ends[0][1], ends[1][1], strict=True):
        assert str(first) == str(second)


class Failing(Losses):
    """Without a gradient, nothing fits into memory, once training has begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no room")
        return loss


@on_ranks(2)
def test_an_audit_that_fails_changes_nothing(rank):
    trained = []
    for kind in (Losses, Failing):
        module = kind("labels").double()
        with warned() as caught:
            options: dict[str, Any] = {"balance": "lb_mini", "deterministic": True, "cost": "quadratic"}
            data_loader = DataLoader(samples(), BATCH, collate_fn=collate)
            t = fit(module, data_loader, max_steps=12, max_epochs=-1, **options)
        assert not t.train_dataloader.recipe.is_whole
        assert "weighed by what" not in "".join(caught)
        trained.append(full_parameters(module))
    assert are_equal(*trained)


COUNTED = [kind for kind in KINDS if COUNTS[kind] != "whole" and "hugging" not in kind]


@on_ranks(2)
@pytest.mark.parametrize("kind", fast(COUNTED, "labels", "classes", "means of sequences", "dropout"))
def test_a_loss_that_stays_as_it_was_is_confirmed(rank, kind):
    assert len(LENGTHS) == 2 * OF_STEP
    module = Losses(kind).double()
    with warned() as caught:
        data_loader = DataLoader(samples(), BATCH, collate_fn=collate)
        t = fit(module, data_loader, max_steps=11, max_epochs=-1, balance="auto")
    assert not t.train_dataloader.recipe.is_whole
    assert "weighed by what" not in "".join(caught)
