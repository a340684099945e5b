"""Ranks share out the passes of the trial of the loss, and come to the rule that one rank alone comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc.run import session
from lightning_odc.trial.together import try_together
from tests.support.fits import fit
from tests.support.losses import Losses, collate, samples
from tests.support.modules import said, warned
from tests.support.ranks import of_all_ranks, on_ranks

#: Samples of 3 to 12 tokens, and of 14: the longest. Eight of the short ones tell rules apart.
LENGTHS = (3, 5, 7, 9, 12, 4, 6, 8, 10, 11, 5, 6, 7, 3, 14, 14)

#: The rows of the batches in passes of this rank.
RAN: list[int] = []


class Watched(Losses):
    """Notes every pass without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if torch.is_grad_enabled():
            return loss
        RAN.append(len(batch["label"]))
        return self.tested(loss, batch)

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        """What the trial gets."""
        return loss


class Fails(Watched):
    """On rank 1 alone, with eight samples, in float64 or not."""

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        if self.global_rank == 1 and len(batch["label"]) == 8:
            raise ValueError("eight are too many")
        return loss


class KnowsNoFloat64(Watched):
    """On rank 1 alone."""

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        if self.global_rank == 1 and loss.dtype is torch.float64:
            raise NotImplementedError("no kernel for float64")
        return loss


class FillsMemory(Watched):
    """On rank 1 alone, with the longest sample, alone or with the first one."""

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        rows, length = batch["input_ids"].shape
        if self.global_rank == 1 and rows < 3 and length == max(LENGTHS):
            raise torch.OutOfMemoryError("too long for float64")
        return loss


class MovesNothing(Watched):
    """On rank 1 alone, batches of the trial do not reach the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.global_rank == 1 and not torch.is_grad_enabled():
            raise OSError("no transfer")
        return batch


class DependsOnRank(Watched):
    """The loss of rank 1 is twice that of rank 0."""

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        return (1 + self.global_rank) * loss


class DependsLater(Watched):
    """On rank 2 alone, and with seven samples alone."""

    def tested(self, loss: Tensor, batch: Any) -> Tensor:
        return loss * (1 + (self.global_rank == 2 and len(batch["label"]) == 7))


def passes(monkeypatch: Any, make: Any, kind: str, world_size: int, **options: Any) -> tuple[Any, Any, str]:
    """The rows of the batches in the passes of the trial by rank, what microbatches count, and what was said."""

    ran: list[int] = []

    def counted(*args: Any) -> Any:
        RAN.clear()
        verdict = try_together(*args)
        ran.extend(RAN)
        return verdict

    monkeypatch.setattr(session, "try_together", counted)
    loader = DataLoader(samples(LENGTHS), batch_size=4, collate_fn=collate)
    with said() as text, warned() as caught:
        t = fit(make(kind), loader, world_size, auto_wrap_policy={torch.nn.Linear}, balance="auto", **options)
    recipe = t.train_dataloader.recipe
    counts = str(recipe.counter or recipe.weighting)
    if recipe.is_whole:
        counts = "fixed" if recipe.is_fixed else "movable"
    return of_all_ranks(ran), of_all_ranks(counts), "\n".join([text.getvalue(), *caught])


@on_ranks(2)
def test_two_ranks_run_three_passes_each_and_together_all_five(rank, monkeypatch):
    ran, counts, _ = passes(monkeypatch, Watched, "labels", 2)
    assert ran == [[1, 7, 1], [1, 8, 2]]
    assert counts == ["labels", "labels"]


@on_ranks(3)
def test_a_third_rank_repeats_a_group_and_notices_that_its_losses_differ(rank, monkeypatch):
    ran, counts, _ = passes(monkeypatch, Watched, "labels", 3)
    assert ran == [[1, 7, 1], [1, 8, 2], [1, 7, 1]]
    assert counts == 3 * ["labels"]
    ran, counts, words = passes(monkeypatch, DependsLater, "labels", 3)
    assert ran == [[1, 7, 7, 8, 1, 2], [1, 8, 7, 8, 1, 2], [1, 7, 7, 8]]
    assert counts == 3 * ["movable"]
    if rank == 0:
        assert "ranks have found different rules" in words


@on_ranks(2)
def test_samples_that_run_one_by_one_are_shared_out_too(rank, monkeypatch):
    ran, counts, _ = passes(monkeypatch, Watched, "classes, one ignored", 2)
    assert ran == [[1, 7, *4 * [1], 6], [1, 8, *3 * [1], 7]]
    assert counts[0] == counts[1]
    assert counts[0] not in ("movable", "fixed")


@on_ranks(2)
@pytest.mark.parametrize("options", [{"communication": "collective"}, {"context_parallel_size": 2}], ids=str)
def test_ranks_that_gather_or_compute_together_run_all_passes(rank, monkeypatch, options):
    ran, counts, _ = passes(monkeypatch, Watched, "labels", 2, **options)
    assert ran == 2 * [[1, 7, 8, 1, 2]]
    assert counts[0] == counts[1]


@on_ranks(2)
def test_ranks_whose_step_communicates_run_all_passes(rank, monkeypatch):
    ran, counts, _ = passes(monkeypatch, Watched, "all_reduce", 2)
    assert ran == 2 * [[1, 1, 7, 8, *7 * [1], 6, 7]]
    assert counts == ["fixed", "fixed"]


FAILURES: dict[Any, tuple[Any, str, str]] = {
    Fails: ([[1, 7, 7, 8, 1, 2], [1, 8, 7, 8, 7, 8]], "movable", "ValueError: eight are too many"),
    MovesNothing: ([[1, 1, 7, 8, 1, 2], []], "movable", "OSError: no transfer"),
    KnowsNoFloat64: ([[1, 1, 7, 8, 1, 2], [1, 1, 1, 7, 8, 1, 2]], "labels", "mean over labels"),
    FillsMemory: ([[1, 7, 1, 1, 2], [1, 8, 2, 1, 1, 2]], "labels", "mean over labels"),
    DependsOnRank: ([[1, 1, 7, 8, 1, 2], [1, 1, 7, 8, 1, 2]], "labels", "mean over labels"),
}


@on_ranks(2)
@pytest.mark.parametrize("make", FAILURES)
def test_what_fails_or_differs_on_one_rank_lets_each_run_all_passes(rank, monkeypatch, make):
    """Two trials where the first one fails: before training, and in the first batch."""
    expected, rule, text = FAILURES[make]
    ran, counts, words = passes(monkeypatch, make, "labels", 2)
    times = 1 + (rule == "movable")
    assert ran == [times * of_rank for of_rank in expected]
    assert counts == [rule, rule]
    if rank == 0:
        assert text in words, words
