"""Checkpoints: what is saved can be loaded, here and by plain Lightning, for every optimizer and wrapping."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_odc import _compat_lightning
from tests.support.fits import are_equal, failure, fit
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import on_ranks, run_ranks

KINDS = ("full", "sharded")


def _batches(rank: int) -> Any:
    return token_batches([5, 8, 6], seed=rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both kinds, by their names."""
    folder = tmp_path_factory.mktemp("loading")
    run_ranks(save, folder)
    return folder


def save(rank: int, folder: Path) -> None:
    for kind in KINDS:
        fit(TokenModule("mean", lr=0.01), _batches(rank), state_dict_type=kind).save_checkpoint(folder / kind)


# -- other models and optimizers -----------------------------------------------------------------------------------


class Bigger(TokenModule):
    def __init__(self, strict: bool = False) -> None:
        super().__init__("mean", lr=0.01)
        self.extra = torch.nn.Linear(3, 5)
        self.strict_loading = strict

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_more_parameters_than_the_checkpoint(rank, kind, saved):
    module, before = Bigger(), Bigger().extra.weight.detach().clone()
    trainer(2).validate(module, loader(_batches(rank)), ckpt_path=saved / kind, verbose=False)
    after = full_parameters(module)
    assert torch.equal(after["extra.weight"], before)
    expected = torch.load(saved / "full", weights_only=True)["state_dict"]["net.head.weight"]
    torch.testing.assert_close(after["net.head.weight"], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        trainer(2).validate(Bigger(strict=True), loader(_batches(rank)), ckpt_path=saved / kind)


class Fewer(TokenModule):
    """Steps on its head alone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.head.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        ("full", Bigger, "parameter group"),
        ("full", Fewer, "parameter group"),
        ("sharded", Fewer, "of a parameter on which this optimizer does not step"),
    ],
)
def test_an_optimizer_with_other_parameters(rank, kind, make, message, saved):
    assert message in failure(make(), _batches(rank), max_epochs=2, ckpt_path=saved / kind)


class FrozenNow(TokenModule):
    """Trains its head alone from now on, and keeps the rest in its optimizer."""

    def setup(self, stage: str) -> None:
        self.net.blocks.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        states = self.trainer.optimizers[0].state
        self.have_state = [parameter in states for parameter in self.parameters()]
        self.are_trained = [parameter.requires_grad for parameter in self.parameters()]


@on_ranks(2)
def test_parameters_that_are_frozen_now_keep_their_state(rank, saved):
    module = FrozenNow("mean")
    fit(module, _batches(rank), max_epochs=2, ckpt_path=saved / "sharded")
    assert all(module.have_state)
    assert module.are_trained.count(False) == 18


# -- on the way ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_kind_of_checkpoint_replaces_the_other(rank, tmp_path):
    """Both kinds are saved in turn to one path; rank 1 is slow to find out what lies there."""
    is_sharded, path = _compat_lightning.is_sharded_checkpoint, tmp_path / "one.ckpt"

    def slowly(at: Path) -> bool:
        time.sleep(0.2 * rank)
        return is_sharded(at)

    with patch.object(_compat_lightning, "is_sharded_checkpoint", slowly):
        module = TokenModule()
        t = fit(module, _batches(rank))
        for kind in ("sharded", "full", "sharded"):
            t.strategy.state_dict_type = kind  # type: ignore[attr-defined]
            t.save_checkpoint(path)
            other = TokenModule()
            trainer(2).validate(other, loader(_batches(rank)), ckpt_path=path, verbose=False)
            assert are_equal(full_parameters(other), full_parameters(module))
            assert path.is_dir() == (kind == "sharded")
