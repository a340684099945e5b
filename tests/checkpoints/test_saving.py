"""How Lightning saves: `ModelCheckpoint`, weights only, by hand, asynchronously, over what lies there already."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

import lightning_odc
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import Cases, run_calls

KINDS = ["full", "sharded"]
PRECISIONS = {"full": "16-mixed", "sharded": "bf16-mixed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Cases:
    """All that two ranks do, in one launch. The last ones end in an error, the same on both ranks."""
    calls: dict[Any, tuple[Any, ...]] = {}
    for kind in KINDS:
        calls["keep", kind] = (_keep_some, str(folder / f"keep {kind}"), kind)
        calls["stages", kind] = (_all_stages, str(folder), kind)
        calls["inference", kind] = (_in_and_out_of_inference_mode, f"{folder}/again {kind}", kind)
    calls["plugins"] = (_other_io, str(folder))
    calls["asynchronous"] = (_save_while_training_goes_on, str(folder))
    calls["refused"] = (_refused, str(folder))
    calls["weights"] = (_resume_weights, str(folder))
    calls["plugin of shards"] = (_asynchronous_shards,)
    return run_calls(calls)


def _batches(rank: int) -> Any:
    return loader(token_batches([5, 8, 6], seed=rank))


class Staged(TokenModule):
    def __init__(self) -> None:
        super().__init__("mean", lr=0.01)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)[0, 0, :3]


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _keep_some(rank: int, directory: str, kind: str) -> Any:
    keeper = ModelCheckpoint(
        directory, "{epoch}", monitor="val_loss", mode="max", save_top_k=2, save_last=True
    )
    options = {"state_dict_type": kind, "enable_checkpointing": True, "deterministic": True}
    module, t = Staged(), trainer(2, max_epochs=4, callbacks=[keeper], **options)
    t.fit(module, _batches(rank), _batches(rank))
    after, best, files = (
        full_parameters(module),
        float(keeper.best_model_score),
        sorted(os.listdir(directory)),
    )
    again = Staged()
    trainer(2, max_epochs=4, **options).fit(again, _batches(rank), ckpt_path=f"{directory}/last.ckpt")
    (validated,) = t.validate(Staged(), _batches(rank), ckpt_path="best", verbose=False)
    return files, _equal(after, full_parameters(again)), [best, validated["val_loss"]]


@pytest.mark.parametrize("kind", KINDS)
def test_model_checkpoint_keeps_the_best_and_the_last(ranks, folder, kind):
    for files, is_last_equal, values in ranks["keep", kind]:
        # The loss falls: the first are the highest.
        assert files == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
        assert is_last_equal
        assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert (folder / f"keep {kind}" / "last.ckpt").is_dir() == (kind == "sharded")


def _all_stages(rank: int, directory: str, kind: str) -> Any:
    precision = {"full": "32-true", "sharded": "bf16-mixed"}[kind]
    t, module, path = trainer(2, state_dict_type=kind, precision=precision), Staged(), f"{directory}/{kind}"
    t.fit(module, _batches(rank))
    trained = full_parameters(module)
    state = t.strategy.lightning_module_state_dict()
    t.test(module, _batches(rank), verbose=False)
    t.save_checkpoint(f"{path}-after-test")
    t.save_checkpoint(f"{path}-weights", weights_only=True)
    found = []
    with torch.inference_mode():
        for name in ("after-test", "weights"):
            other = Staged()
            t.test(other, _batches(rank), ckpt_path=f"{path}-{name}", verbose=False)
            found.append(_equal(full_parameters(other), trained))
            other = Staged()
            predicted = t.predict(other, _batches(rank), ckpt_path=f"{path}-{name}")
            found.append(_equal(full_parameters(other), trained) and len(predicted) == 3)
    return list(state), list(Staged().state_dict()), found


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_saves_and_loads(ranks, folder, kind):
    for rank, (names, expected, found) in enumerate(ranks["stages", kind]):
        assert names == ([] if kind == "full" and rank else expected)
        assert found == [True] * 4
    if kind == "full":
        weights = torch.load(folder / "full-weights", weights_only=True)
        assert "state_dict" in weights and "optimizer_states" not in weights


def _in_and_out_of_inference_mode(rank: int, path: str, kind: str) -> Any:
    """One module goes through every stage, and then its training goes on."""
    options = {"state_dict_type": kind, "precision": PRECISIONS[kind], "deterministic": True}
    t, module = trainer(2, **options), Staged()
    t.fit(module, _batches(rank))
    trained = full_parameters(module)
    t.save_checkpoint(path)
    found = []
    for is_on in (True, False, True):
        for run in (t.test, t.validate, t.predict):
            with torch.inference_mode(is_on):
                run(module, _batches(rank), ckpt_path=path)
                t.save_checkpoint(path)
            found.append(_equal(full_parameters(module), trained))
    trainer(2, **options).fit(module, _batches(rank))  # no tensor of inference mode is left in it
    return [*found, not _equal(full_parameters(module), trained)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_loaded_again_in_and_out_of_inference_mode(ranks, kind):
    assert ranks["inference", kind] == [[True] * 10] * 2


class NumpyIO(CheckpointIO):
    """Somebody's own format, which ``torch.load`` does not read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).write_bytes(b"my format")
        torch.save(checkpoint, f"{path}.torch")

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        return torch.load(f"{path}.torch", weights_only=False)  # type: ignore[no-any-return]

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError


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


def _other_io(rank: int, directory: str) -> Any:
    found = []
    for plugin, path in ((NumpyIO(), f"{directory}/own"), (None, f"file://{directory}/url")):
        t, module = trainer(2, plugins=[plugin] if plugin else None), Staged()
        t.fit(module, _batches(rank))
        t.save_checkpoint(path)
        other = Staged()
        t.test(other, _batches(rank), ckpt_path=path, verbose=False)
        found.append(_equal(full_parameters(other), full_parameters(module)))
    return found


def test_plugins_and_urls(ranks, folder):
    assert ranks["plugins"] == [[True] * 2] * 2
    assert (folder / "url").is_file() and (folder / "own").read_bytes() == b"my format"


def _save_while_training_goes_on(rank: int, directory: str) -> Any:
    seen: list[dict[str, Tensor]] = []

    class Noting(Staged):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(full_parameters(self))

    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    t = trainer(2, plugins=[Slowly()], callbacks=[keeper], enable_checkpointing=True)
    t.fit(Noting(), _batches(rank))
    return seen


def test_asynchronous_saving_keeps_the_values_of_its_time(ranks, folder):
    seen = ranks["asynchronous"][0]
    assert len(seen) == 3
    for step in (1, 2, 3):
        saved = torch.load(folder / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert _equal(saved, seen[step - 1])


# -- what is refused ---------------------------------------------------------------------------------------------


def _refused(rank: int, directory: str) -> list[str]:
    messages = []

    def expect(kind: type[Exception], act: Any) -> None:
        with pytest.raises(kind) as caught:
            act()
        messages.append(str(caught.value))

    Path(f"{directory}/mine").mkdir(exist_ok=True)
    Path(f"{directory}/mine/notes.txt").touch()
    t = trainer(2)
    t.fit(Staged(), _batches(rank))
    expect(IsADirectoryError, lambda: t.save_checkpoint(f"{directory}/mine"))
    expect(FileNotFoundError, lambda: t.strategy.load_checkpoint(f"{directory}/mine"))
    t = trainer(2, state_dict_type="sharded")
    t.fit(Staged(), _batches(rank))
    expect(TypeError, lambda: t.save_checkpoint(f"{directory}/x", storage_options={}))
    expect(ValueError, lambda: t.save_checkpoint(f"file://{directory}/x"))
    return messages


def test_paths_and_options_that_are_refused(ranks, folder):
    for messages in ranks["refused"]:
        assert "exists and is a directory" in messages[0]
        assert "is no checkpoint: neither a file nor a directory of shards" in messages[1]
        assert "does not use `storage_options`" in messages[2]
        assert 'Use ODCStrategy(state_dict_type="full")' in messages[3]
    assert (folder / "mine" / "notes.txt").exists()


def _resume_weights(rank: int, directory: str) -> list[str]:
    messages = []
    for kind in KINDS:
        t = trainer(2, state_dict_type=kind)
        t.fit(Staged(), _batches(rank))
        t.save_checkpoint(f"{directory}/{kind} alone", weights_only=True)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            trainer(2, max_epochs=2).fit(Staged(), _batches(rank), ckpt_path=f"{directory}/{kind} alone")
        messages.append(str(caught.value))
    return messages


def test_weights_alone_cannot_resume_training(ranks):
    for messages in ranks["weights"]:
        assert len(messages) == 2
        for message in messages:
            assert "has 0 optimizers, `configure_optimizers` made 1. To load the model alone" in message


def _asynchronous_shards(rank: int) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        trainer(2, state_dict_type="sharded", plugins=[AsyncCheckpointIO()]).fit(Staged(), _batches(rank))
    return str(caught.value)


def test_sharded_checkpoints_use_no_plugin(ranks):
    assert all("AsyncCheckpointIO would not be used" in message for message in ranks["plugin of shards"])
    with pytest.raises(ValueError, match="choose one of 'full', 'sharded'"):
        lightning_odc.ODCStrategy(state_dict_type="half")  # type: ignore[arg-type]
