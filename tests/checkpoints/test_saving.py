"""How Lightning saves and loads: `ModelCheckpoint`, weights only, asynchronously, other formats, other models."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

import lightning_odc
from lightning_odc import _compat_lightning
from tests.support.fits import are_equal, doing, failure, fit
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tiers import fast

KINDS = ["full", "sharded"]


def _batches(rank: int) -> Any:
    return loader(token_batches([5, 8, 6], seed=rank))


class Staged(TokenModule):
    def __init__(self) -> None:
        super().__init__("mean", lr=0.01)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)[0, 0, :3]


@on_ranks(2)
@pytest.mark.parametrize("kind", fast(KINDS, "full"))
def test_model_checkpoint_keeps_the_best_and_the_last(rank, kind, tmp_path):
    keeper = ModelCheckpoint(
        tmp_path, "{epoch}", monitor="val_loss", mode="max", save_top_k=2, save_last=True
    )
    options = {"state_dict_type": kind, "deterministic": True}
    module = Staged()
    t = trainer(2, max_epochs=4, enable_checkpointing=True, callbacks=[keeper], **options)
    t.fit(module, _batches(rank), _batches(rank))
    # The loss falls: the first are the highest.
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").is_dir() == (kind == "sharded")
    after = full_parameters(module)
    best = float(keeper.best_model_score)
    again = Staged()
    trainer(2, max_epochs=4, **options).fit(again, _batches(rank), ckpt_path=tmp_path / "last.ckpt")
    assert are_equal(after, full_parameters(again))
    (validated,) = t.validate(Staged(), _batches(rank), ckpt_path="best", verbose=False)
    assert validated["val_loss"] == pytest.approx(best, rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "precision"),
    fast([("full", "32-true"), ("full", "16-mixed"), ("sharded", "bf16-mixed")], ("sharded", "bf16-mixed")),
)
def test_every_stage_saves_and_loads_in_and_out_of_inference_mode(rank, kind, precision, tmp_path):
    """One module goes through every stage, and then its training goes on."""
    options = {"state_dict_type": kind, "precision": precision, "deterministic": True}
    t = trainer(2, **options)
    module = Staged()
    path = tmp_path / "saved"
    weights = tmp_path / "weights"
    t.fit(module, _batches(rank))
    trained = full_parameters(module)
    names = list(t.strategy.lightning_module_state_dict())
    if kind == "full" and rank:
        expected = []
    else:
        expected = list(Staged().state_dict())
    assert names == expected
    t.save_checkpoint(path)
    t.save_checkpoint(weights, weights_only=True)
    for is_on in (True, False, True):
        for run in (t.test, t.validate, t.predict):
            other = Staged()
            with torch.inference_mode(is_on):
                run(module, _batches(rank), ckpt_path=path)
                t.save_checkpoint(path)
                run(other, _batches(rank), ckpt_path=weights)
            assert are_equal(full_parameters(module), trained)
            assert are_equal(full_parameters(other), trained)
    trainer(2, **options).fit(module, _batches(rank))  # no tensor of inference mode is left in it
    assert not are_equal(full_parameters(module), trained)
    if kind != "sharded":
        assert "optimizer_states" not in torch.load(weights, weights_only=True)
    says = "has 0 optimizers, `configure_optimizers` made 1. To load the model alone"
    with pytest.raises(ValueError, match=says):
        trainer(2, max_epochs=2, **options).fit(Staged(), _batches(rank), ckpt_path=weights)


class OwnIO(TorchCheckpointIO):
    """Somebody's own format, which ``torch.load`` does not read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).write_bytes(b"my format")
        super().save_checkpoint(checkpoint, f"{path}.torch")

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return super().load_checkpoint(f"{path}.torch")


class SlowIO(TorchCheckpointIO):
    """Writes long after training went on."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.3)
        super().save_checkpoint(checkpoint, path, storage_options)


class Slowly(AsyncCheckpointIO):
    """With a slow inner one: Lightning replaces what is given to the constructor."""

    @property
    def checkpoint_io(self) -> Any:
        return SlowIO()

    @checkpoint_io.setter
    def checkpoint_io(self, _: Any) -> None:
        pass


@on_ranks(2)
def test_a_format_of_ones_own(rank, tmp_path):
    t = trainer(2, plugins=[OwnIO()])
    module = Staged()
    other = Staged()
    path = tmp_path / "own"
    t.fit(module, _batches(rank))
    t.save_checkpoint(path)
    t.test(other, _batches(rank), ckpt_path=path, verbose=False)
    assert are_equal(full_parameters(other), full_parameters(module))
    assert path.read_bytes() == b"my format"


@on_ranks(2)
def test_asynchronous_saving_keeps_the_values_of_its_time(rank, tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    noted = []
    module = doing(Staged(), on_train_batch_end=lambda own: noted.append(full_parameters(own)))
    t = trainer(2, plugins=[Slowly()], callbacks=[keeper], enable_checkpointing=True)
    t.fit(module, _batches(rank))
    assert len(noted) == 3
    dist.barrier()  # rank 0 has written them
    for step, expected in enumerate(noted, 1):
        ours = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert are_equal(ours, expected)


# -- what is refused ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_paths_and_options_that_are_refused(rank, tmp_path):
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "notes.txt").touch()
    t = trainer(2)
    t.fit(Staged(), _batches(rank))
    with pytest.raises(IsADirectoryError, match="exists and is a directory"):
        t.save_checkpoint(tmp_path / "mine")
    with pytest.raises(
        FileNotFoundError, match="is not a checkpoint: neither a file nor a directory of shards"
    ):
        t.strategy.load_checkpoint(tmp_path / "mine")
    t = trainer(2, state_dict_type="sharded")
    t.fit(Staged(), _batches(rank))
    with pytest.raises(TypeError, match="does not use `storage_options`"):
        t.save_checkpoint(tmp_path / "x", storage_options={})
    with pytest.raises(ValueError, match=r'Use ODCStrategy\(state_dict_type="full"\)'):
        t.save_checkpoint(f"file://{tmp_path}/x")
    assert (tmp_path / "mine" / "notes.txt").exists()
    with pytest.raises(ValueError, match="AsyncCheckpointIO would not be used"):
        trainer(2, state_dict_type="sharded", plugins=[AsyncCheckpointIO()]).fit(Staged(), _batches(rank))
    with pytest.raises(ValueError, match='Write state_dict_type="full"'):
        lightning_odc.ODCStrategy(state_dict_type="half")  # type: ignore[arg-type]


# -- other models and optimizers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both kinds, by their names."""
    folder = tmp_path_factory.mktemp("loading")
    run_ranks(save, folder)
    return folder


def save(rank: int, folder: Path) -> None:
    for kind in KINDS:
        fit(TokenModule("mean", lr=0.01), _batches(rank), state_dict_type=kind).save_checkpoint(folder / kind)


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
    module = Bigger()
    before = Bigger().extra.weight.detach().clone()
    trainer(2).validate(module, _batches(rank), ckpt_path=saved / kind, verbose=False)
    after = full_parameters(module)
    assert torch.equal(after["extra.weight"], before)
    state_dict = torch.load(saved / "full", weights_only=True)["state_dict"]
    torch.testing.assert_close(after["net.head.weight"], state_dict["net.head.weight"], rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        trainer(2).validate(Bigger(strict=True), _batches(rank), ckpt_path=saved / kind)


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


def look_at_state(own: Any) -> None:
    states = own.trainer.optimizers[0].state
    own.have_state = [parameter in states for parameter in own.parameters()]


@on_ranks(2)
def test_parameters_that_are_frozen_now_keep_their_state(rank, saved):
    """The head alone is trained from now on, and the rest stays in the optimizer."""
    module = doing(TokenModule("mean"), on_train_start=look_at_state)
    module.net.blocks.requires_grad_(False)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01)
    fit(module, _batches(rank), max_epochs=2, ckpt_path=saved / "sharded")
    assert all(module.have_state)
    assert [parameter.requires_grad for parameter in module.parameters()].count(False) == 18


# -- on the way ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_kind_of_checkpoint_replaces_the_other(rank, tmp_path):
    """Both kinds are saved in turn to one path; rank 1 is slow to find out what lies there."""
    is_sharded = _compat_lightning.is_sharded_checkpoint
    path = tmp_path / "one.ckpt"

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
            trainer(2).validate(other, _batches(rank), ckpt_path=path, verbose=False)
            assert are_equal(full_parameters(other), full_parameters(module))
            assert path.is_dir() == (kind == "sharded")
