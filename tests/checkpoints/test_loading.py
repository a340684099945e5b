"""Checkpoints: what is saved can be loaded, here and by plain Lightning, for every optimizer and wrapping."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_odc import _compat_lightning
from tests.support.models import Block
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import Cases, run_calls, try_ranks


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
KINDS = ("full", "sharded")
#: Module, kind of checkpoint, and whether activations are checkpointed.
RESUMED = [(name, kind, False) for name in MODULES for kind in KINDS] + [
    ("AdamW", kind, True) for kind in KINDS
]


def _batches(rank: int) -> Any:
    return loader(token_batches([5, 8, 6], seed=rank))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Cases:
    """All that two ranks do and that ends well, in one launch."""
    calls: dict[Any, tuple[Any, ...]] = {
        case: (_save_and_resume, f"{folder}/{index}", *case) for index, case in enumerate(RESUMED)
    }
    for kind in KINDS:
        path = f"{folder}/{kind}"
        calls["save", kind] = (_save, path, kind)
        calls["more", kind] = (_load_other, path, False)
        calls["frozen", kind] = (_freeze, path)
    calls["straight"], calls["saving"] = (_train, None), (_train, f"{folder}/saving")
    calls["lr"] = (_find_lr, f"{folder}/lr")
    calls["in turn"] = (_save_in_turn, f"{folder}/one.ckpt")
    return run_calls(calls)


def _save_and_resume(rank: int, path: str, name: str, kind: str, wrapped: bool) -> Any:
    options: dict[str, Any] = {"state_dict_type": kind, "deterministic": True}
    options |= {"activation_checkpointing_policy": {Block}} if wrapped else {}
    straight, first, second = (MODULES[name]("mean", lr=0.01) for _ in range(3))
    trainer(2, max_epochs=2, **options).fit(straight, _batches(rank))
    t = trainer(2, **options)
    t.fit(first, _batches(rank))
    t.save_checkpoint(path)
    for parameter in second.parameters():
        torch.nn.init.zeros_(parameter)
    trainer(2, max_epochs=2, **options).fit(second, _batches(rank), ckpt_path=path)
    return full_parameters(straight), full_parameters(second)


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_a_resumed_run_is_bit_equal(ranks, folder, case):
    straight, resumed = ranks[case][0]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    name, kind, _ = case
    if kind == "full":
        _goes_on_in_one_process(folder / str(RESUMED.index(case)), name)


def _goes_on_in_one_process(path: Path, name: str) -> None:
    """An ordinary model and optimizer take it: state by state of the right shape."""
    module = MODULES[name]("mean", lr=0.01)
    checkpoint = torch.load(path, weights_only=False)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert key == "step" or value is None or value.shape == parameter.shape


def _train(rank: int, directory: str | None) -> dict[str, Tensor]:
    """Three epochs; into a directory with validation and the default ``ModelCheckpoint`` in each of them."""
    module, options = Grouped("mean", lr=0.01), {}
    if directory is not None:
        options = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(directory)]}
    t = trainer(2, max_epochs=3, **options)
    t.fit(module, _batches(rank), _batches(rank) if directory is not None else None)
    return full_parameters(module)


def test_saving_in_between_changes_nothing(ranks, folder):
    expected, found = ranks["straight"][0], ranks["saving"][0]
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)  # sums in arrival order
    assert list((folder / "saving").glob("*.ckpt"))


# -- other models and optimizers -----------------------------------------------------------------------------------


def _save(rank: int, path: str, kind: str) -> Tensor:
    module = TokenModule("mean", lr=0.01)
    t = trainer(2, state_dict_type=kind)
    t.fit(module, _batches(rank))
    t.save_checkpoint(path)
    return full_parameters(module)["net.head.weight"]


class Bigger(TokenModule):
    def __init__(self, strict: bool = False) -> None:
        super().__init__("mean", lr=0.01)
        self.extra = torch.nn.Linear(3, 5)
        self.strict_loading = strict

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _load_other(rank: int, path: str, strict: bool) -> Any:
    module = Bigger(strict)
    before = module.extra.weight.detach().clone()
    trainer(2).validate(module, _batches(rank), ckpt_path=path, verbose=False)
    after = full_parameters(module)
    return torch.equal(after["extra.weight"], before), after["net.head.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_more_parameters_than_the_checkpoint(ranks, folder, kind):
    saved = ranks["save", kind][0]
    for unchanged, head in ranks["more", kind]:
        assert unchanged
        assert torch.equal(head, saved)
    for outcome in try_ranks(_load_other, f"{folder}/{kind}", True, timeout=60):
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
        ("full", Bigger, "parameter group"),
        ("full", Fewer, "parameter group"),
        ("sharded", Fewer, "of a parameter on which this optimizer does not step"),
    ],
)
def test_an_optimizer_with_other_parameters(ranks, folder, kind, make, message):
    assert ranks["save", kind]
    for outcome in try_ranks(_other_optimizer, make, f"{folder}/{kind}", timeout=60):
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


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_frozen_now_keep_their_state(ranks, kind):
    for have_state, are_trained in ranks["frozen", kind]:
        assert all(have_state)
        assert are_trained.count(False) == 18


# -- on the way ----------------------------------------------------------------------------------------------------


def _save_in_turn(rank: int, path: str) -> list[bool]:
    """Save both kinds in turn to one path; rank 1 is slow to find out what lies there."""
    is_sharded = _compat_lightning.is_sharded_checkpoint

    def slowly(at: Path) -> bool:
        time.sleep(0.2 * rank)
        return is_sharded(at)

    _compat_lightning.is_sharded_checkpoint = slowly
    module, t, found = TokenModule(), trainer(2), []
    t.fit(module, _batches(rank))
    for t.strategy.state_dict_type in ("sharded", "full", "sharded"):  # type: ignore[attr-defined]
        t.save_checkpoint(path)
        other = TokenModule()
        trainer(2).validate(other, _batches(rank), ckpt_path=path, verbose=False)
        assert torch.equal(
            full_parameters(other)["net.head.weight"], full_parameters(module)["net.head.weight"]
        )
        found.append(Path(path).is_dir())
    return found


def test_one_kind_of_checkpoint_replaces_the_other(ranks):
    assert ranks["in turn"] == [[True, False, True]] * 2


def _find_lr(rank: int, folder: str) -> float:
    data = loader(token_batches([5, 8, 6] * 4, seed=rank))
    tuner = Tuner(trainer(2, default_root_dir=folder))
    found = tuner.lr_find(Plain("mean", lr=0.1), data, num_training=8, update_attr=False)
    assert found is not None
    return len(found.results["lr"])


def test_the_learning_rate_finder(ranks):
    assert ranks["lr"] == [8, 8]
