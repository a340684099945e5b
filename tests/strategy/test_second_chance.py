"""A trial of the loss that fails for want of what a hook of the first batch sets is repeated there.

SGD with lr 1 in float64 shows the gradient of every step. The loss is a mean over samples, so whole batches of equally
many samples train what one process does, too, which takes the mean over all samples of a step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc.data.decision import Cut, Decision, Whole
from lightning_odc.data.loader import BalancedDataLoader
from tests.strategy.test_loss_trial import Traces, state_of
from tests.support import losses
from tests.support.fits import fit, largest_difference
from tests.support.losses import Losses, Sample, collate
from tests.support.models import full_parameters
from tests.support.modules import said, warned
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

LENGTHS = (30, 5, 6, 4, 7, 5, 6, 5, 31, 6, 4, 3, 8, 6, 5, 7)  # of every step, one is long
BATCH = 4
OF_STEP = 2 * BATCH  # samples, on two ranks
STEPS = 2 * len(LENGTHS) // OF_STEP  # of two epochs
#: The lengths of the samples in the microbatches of both ranks, where batches stay whole, in every step.
WHOLE = [
    [[list(LENGTHS[first + rank : first + OF_STEP : 2])] for rank in range(2)]
    for first in (0, OF_STEP, 0, OF_STEP)
]


class Scaled(Losses):
    """Needs an attribute that it does not make itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return self.scale * loss


class OfEpoch(Scaled):
    def on_train_epoch_start(self) -> None:
        self.scale = 0.5


class OfBatch(Scaled):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 0.5


class OfRankOne(OfEpoch):
    """Rank 0 lacks it, before training; on rank 1 it is there."""

    def on_fit_start(self) -> None:
        if self.global_rank == 1:
            self.scale = 0.5


class CallbackOfEpoch(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.scale = 0.5


class CallbackOfBatch(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.scale = 0.5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


class Cuts(Callback):
    """The lengths of the samples in the microbatches of every step."""

    def __init__(self) -> None:
        self.lengths: list[list[list[int]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.lengths.append([microbatch["attention_mask"].sum(1).tolist() for microbatch in batch])


def samples() -> list[Sample]:
    return losses.samples(LENGTHS)


def most(step: list[Any]) -> int:
    """The tokens that the rank with most of them computes in a step, padding included."""
    return max(sum(len(lengths) * max(lengths) for lengths in of_rank) for of_rank in step)


def trained(make: Any, *callbacks: Callback, data: Any = None, **options: Any) -> tuple[Any, list[Any], str]:
    """The module after two epochs; the lengths in microbatches by step and rank; and what was said."""
    cuts = Cuts()
    module = make("classes").double()
    source = data
    if data is None:
        source = samples()
    loader = DataLoader(source, BATCH, collate_fn=collate)
    with said() as text, warned() as caught:
        fit(module, loader, balance="auto", max_epochs=2, callbacks=[*callbacks, cuts], **options)
    by_step = list(zip(*of_all_ranks(cuts.lengths), strict=True))
    return module, [list(step) for step in by_step], "\n".join([text.getvalue(), *caught])


def meant() -> dict[str, Tensor]:
    """Parameters after two epochs of one process, on the samples of a step at once."""
    module = OfEpoch("classes").double()
    module.scale = 0.5
    object.__setattr__(module, "log", lambda *_: None)
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        first = step * OF_STEP % len(LENGTHS)
        optimizer.zero_grad()
        module.training_step(collate(samples()[first : first + OF_STEP]), 0).backward()
        optimizer.step()
    return full_parameters(module)


def error_of(module: Any) -> float:
    """How far parameters are from what is meant, as a part of what training moves."""
    expected = meant()
    moved = largest_difference(full_parameters(Losses("classes").double()), expected)
    return largest_difference(full_parameters(module), expected) / moved


#: The module, callbacks, options, and how many minibatches are planned before the first one runs.
LATE: dict[str, tuple[Any, list[Any], dict[str, Any], int]] = {
    "epoch": (OfEpoch, [], {}, 1),
    "batch": (OfBatch, [], {}, 1),
    "callback, epoch": (Scaled, [CallbackOfEpoch], {}, 1),
    "callback, batch": (Scaled, [CallbackOfBatch], {}, 1),
    "one rank": (OfRankOne, [], {}, 1),
    "collective": (OfEpoch, [], {"communication": "collective"}, 1),
    "stream": (
        OfEpoch,
        [],
        {"data": Stream(), "length_fn": lambda sample: len(sample["input_ids"])},
        2,
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", fast(LATE, "epoch", "one rank", "stream"))
def test_what_a_hook_of_the_first_batch_sets_is_there_when_the_loss_is_tried_again(rank, name):
    make, callbacks, options, planned = LATE[name]
    module, cuts, words = trained(make, *(callback() for callback in callbacks), **options)
    assert len(cuts) == STEPS
    assert cuts[:planned] == WHOLE[:planned]
    for step, whole in zip(cuts[planned:], WHOLE[planned:], strict=True):
        assert 1.5 * most(step) < most(whole), (step, whole)
    assert error_of(module) < 1e-6
    if rank == 0:
        assert "Loss: mean over samples (checked)." in words, words
    assert "are left as they are" not in words


class Never(OfEpoch):
    """It is never there while the loss is tried."""

    fails_on = (0, 1)

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        if not torch.is_grad_enabled() and self.global_rank in self.fails_on:
            return self.nowhere
        return super().training_step(batch, batch_idx)


class NeverOnRankOne(Never):
    fails_on = (1,)


@on_ranks(2)
@pytest.mark.parametrize("make", [Never, NeverOnRankOne])
def test_what_never_comes_is_said_once_and_batches_stay_whole_on_all_ranks(rank, make):
    module, cuts, words = trained(make)
    assert cuts == WHOLE
    assert error_of(module) < 1e-6
    assert words.count("a trial of training_step failed (AttributeError: ") == (rank == 0), words
    expected = 2 * (rank == 0)
    assert words.count("our batches are left as they are") == expected, "the warning, and what was chosen"


class Late(Traces):
    """Changes everything that a step can reach, once training has begun."""

    def on_train_epoch_start(self) -> None:
        self.has_begun = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled() and not self.steps_run:
            self.first = state_of(self)
        assert self.has_begun
        return super().training_step(batch, batch_idx)


class Looks(Callback):
    """Looks before the loss is tried again, and draws a random number after it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.before = state_of(pl_module)
            torch.manual_seed(5)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, number: int) -> None:
        if number == 0:
            self.drawn = torch.rand(1).item()
            self.logged = dict(trainer.callback_metrics)


@on_ranks(2)
def test_the_second_trial_leaves_no_trace(rank, tmp_path):
    module = Late()
    looks = Looks()
    with said() as text:
        data_loader = DataLoader(samples(), BATCH, collate_fn=collate)
        fit(module, data_loader, balance="auto", callbacks=[looks], logger=True, default_root_dir=tmp_path)
    if rank == 0:
        assert "(checked)" in text.getvalue()
    # The last entry is whether `log` is replaced, which it is in every step.
    assert module.first.rpartition(",")[0] == looks.before.rpartition(",")[0]
    torch.manual_seed(5)
    assert looks.drawn == torch.rand(1).item(), "random numbers go on where they were"
    assert set(looks.logged) == {"loss", "mean"}


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "kinds"),
    [(Losses, [Cut]), (OfEpoch, [Whole, Cut]), (Never, [Whole, Whole])],
    ids=["at once", "in the first batch", "never"],
)
def test_a_loader_hears_one_decision_and_another_one_after_a_second_chance(rank, make, kinds, monkeypatch):
    heard = []
    follow = BalancedDataLoader.follow

    def noted(loader: BalancedDataLoader, decision: Decision) -> None:
        heard.append(type(decision))
        follow(loader, decision)

    monkeypatch.setattr(BalancedDataLoader, "follow", noted)
    trained(make)
    assert heard == kinds
