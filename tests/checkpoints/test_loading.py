"""Checkpoints: what is saved can be loaded, here and by plain Lightning, for every optimizer and wrapping."""

from __future__ import annotations

import pathlib
import time
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_odc import _compat_lightning
from tests.support.models import Block
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_cases, run_ranks, try_ranks


class Grouped(TokenModule):
    """Parameter groups in another order than the model's."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": weights}], lr=0.01)


class Plain(TokenModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODULES: dict[str, type[TokenModule]] = {"AdamW": TokenModule, "groups": Grouped, "SGD": Plain}


def _batches(rank: int) -> Any:
    return loader(token_batches([5, 8, 6], seed=rank))


def _options(wrapped: bool, kind: str) -> dict[str, Any]:
    policy = {"activation_checkpointing_policy": {Block}} if wrapped else {}
    return {"state_dict_type": kind, "deterministic": True, **policy}


def _save_and_resume(rank: int, directory: str, name: str, wrapped: bool, kind: str) -> Any:
    options, path = _options(wrapped, kind), f"{directory}/{kind}.ckpt"
    straight, first, second = (MODULES[name]("mean", lr=0.01) for _ in range(3))
    trainer(2, max_epochs=2, **options).fit(straight, _batches(rank))
    t = trainer(2, **options)
    t.fit(first, _batches(rank))
    t.save_checkpoint(path)
    for parameter in second.parameters():
        torch.nn.init.zeros_(parameter)
    trainer(2, max_epochs=2, **options).fit(second, _batches(rank), ckpt_path=path)
    return [full_parameters(straight), full_parameters(second)]


RESUMED = {
    f"{name}, {kind}{', activation checkpointing' * wrapped}": (name, wrapped, kind)
    for name in MODULES
    for kind in ("full", "sharded")
    for wrapped in (False, True)
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    places = {case: tmp_path_factory.mktemp("resumed") for case in RESUMED}
    found = run_cases(_save_and_resume, {case: (str(places[case]), *RESUMED[case]) for case in RESUMED})
    return places, found


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_bit_equal(case, runs):
    places, found = runs
    straight, resumed = found[case][0]
    name, _, kind = RESUMED[case]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    if kind == "full":
        _goes_on_in_one_process(places[case], name, resumed)


def _goes_on_in_one_process(directory: pathlib.Path, name: str, resumed: dict[str, Tensor]) -> None:
    """An ordinary model and optimizer take it: state by state of the right shape."""
    module = MODULES[name]("mean", lr=0.01)
    checkpoint = torch.load(directory / "full.ckpt", weights_only=False)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert key == "step" or value is None or value.shape == parameter.shape


def _validate_and_save(rank: int, directory: str, name: str) -> dict[str, Tensor]:
    """Validation and the default ``ModelCheckpoint`` in every epoch, as ``Trainer.fit`` does by default."""
    module, callbacks = MODULES[name]("mean", lr=0.01), [ModelCheckpoint(directory)]
    options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": 3}
    trainer(2, **options).fit(module, _batches(rank), _batches(rank))
    return full_parameters(module)


def _train_only(rank: int, name: str) -> dict[str, Tensor]:
    module = MODULES[name]("mean", lr=0.01)
    trainer(2, max_epochs=3).fit(module, _batches(rank))
    return full_parameters(module)


@pytest.mark.parametrize("name", MODULES)
def test_saving_in_between_changes_nothing(tmp_path, name):
    found = run_ranks(_validate_and_save, str(tmp_path), name)[0]
    expected = run_ranks(_train_only, name)[0]
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)  # sums in arrival order
    assert list(tmp_path.glob("*.ckpt"))


class Bigger(TokenModule):
    def __init__(self, strict: bool) -> None:
        super().__init__("mean", lr=0.01)
        self.extra = torch.nn.Linear(3, 5)
        self.strict_loading = strict

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _load_other(rank: int, path: str, kind: str, strict: bool) -> Any:
    module, data = Bigger(strict), _batches(rank)
    before = module.extra.weight.detach().clone()
    trainer(2, state_dict_type=kind).validate(module, data, ckpt_path=path)
    after = full_parameters(module)
    return [torch.equal(after["extra.weight"], before), after["net.head.weight"]]


def _save(rank: int, path: str, kind: str) -> Tensor:
    module = TokenModule("mean", lr=0.01)
    t = trainer(2, state_dict_type=kind)
    t.fit(module, _batches(rank))
    t.save_checkpoint(path)
    return full_parameters(module)["net.head.weight"]


def _save_in_turn(rank: int, path: str) -> list[bool]:
    """Save both kinds in turn to one path; rank 1 is slow to find out what lies there."""
    is_sharded = _compat_lightning.is_sharded_checkpoint

    def slowly(at: pathlib.Path) -> bool:
        time.sleep(0.2 * rank)
        return is_sharded(at)

    _compat_lightning.is_sharded_checkpoint = slowly
    t, found = trainer(2), []
    t.fit(TokenModule(), _batches(rank))
    for t.strategy.state_dict_type in ("sharded", "full", "sharded"):  # type: ignore[attr-defined]
        t.save_checkpoint(path)
        found.append(pathlib.Path(path).is_dir())
    return found


def test_one_kind_of_checkpoint_replaces_the_other(tmp_path):
    path = tmp_path / "one.ckpt"
    assert run_ranks(_save_in_turn, str(path)) == [[True, False, True]] * 2
    run_ranks(_load_same, str(path))


def test_a_directory_of_something_else_stays(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for outcome in try_ranks(_save, str(tmp_path), "full", timeout=60):
        assert "IsADirectoryError" in outcome.error
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_full_checkpoint_with_parameters_that_the_model_lacks(tmp_path):
    path = str(tmp_path / "one.ckpt")
    run_ranks(_save, path, "full")
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["state_dict"]["surplus"] = torch.zeros(3)
    torch.save(checkpoint, path)
    for outcome in try_ranks(_load_same, path, timeout=60):
        assert "has ['surplus'] too many" in outcome.error


def _load_same(rank: int, path: str) -> None:
    trainer(2).validate(TokenModule(), _batches(rank), ckpt_path=path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_model_with_more_parameters_than_the_checkpoint(tmp_path, kind):
    path = str(tmp_path / "one.ckpt")
    saved = run_ranks(_save, path, kind)[0]
    for unchanged, head in run_ranks(_load_other, path, kind, False):
        assert unchanged
        assert torch.equal(head, saved)
    for outcome in try_ranks(_load_other, path, kind, True, timeout=60):
        assert outcome.exitcode == 1
        assert "extra.weight" in outcome.error


class Fewer(TokenModule):
    """Steps on its head alone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.head.parameters())


def _other_optimizer(rank: int, make: Any, path: str) -> None:
    trainer(2, max_epochs=2).fit(make(), _batches(rank), ckpt_path=path)


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        ("full", partial(Bigger, False), "parameter group"),
        ("full", Fewer, "parameter group"),
        ("sharded", Fewer, "of a parameter on which this optimizer does not step"),
    ],
)
def test_an_optimizer_with_other_parameters(tmp_path, kind, make, message):
    path = str(tmp_path / "one.ckpt")
    run_ranks(_save, path, kind)
    for outcome in try_ranks(_other_optimizer, make, path, timeout=60):
        assert outcome.exitcode == 1
        assert message in outcome.error


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


def _freeze(rank: int, path: str) -> Any:
    module = FrozenNow("mean")
    trainer(2, max_epochs=2).fit(module, _batches(rank), ckpt_path=path)
    return module.have_state, module.are_trained


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_parameters_that_are_frozen_now_keep_their_state(tmp_path, kind):
    path = str(tmp_path / "one.ckpt")
    run_ranks(_save, path, kind)
    for have_state, are_trained in run_ranks(_freeze, path):
        assert all(have_state)
        assert are_trained.count(False) == 18


def _find_lr(rank: int) -> float:
    from lightning.pytorch.tuner import Tuner

    module = Plain("mean", lr=0.1)
    data = loader(token_batches([5, 8, 6] * 4, seed=rank))
    found = Tuner(trainer(2)).lr_find(module, data, num_training=8, update_attr=False)
    assert found is not None
    return len(found.results["lr"])


def test_the_learning_rate_finder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_find_lr) == [8, 8]
