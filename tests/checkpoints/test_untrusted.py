"""No code of a checkpoint runs unless its reader trusts the file: as under ``"ddp"``, for sharded checkpoints, too."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_odc.fabric import ODCFabricStrategy
from lightning_odc.sharding.untrusted import refuse_code
from tests.support.fits import fit
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

#: What ``weights_only=`` is, and whether code of the file runs.
CASES = [(None, False), (True, False), (False, True)]


class Mark(str):
    """The name of a directory, which is made when it is unpickled. Optimizers may have text in their groups."""

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self), 0o777, True)

    @property
    def directory(self) -> Path:
        return Path(self)


class Grouped(TokenModule):
    """Has a value in a group of its optimizer that is no tensor."""

    def __init__(self, value: Any = 0) -> None:
        super().__init__("mean")
        self.value = value

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": list(self.parameters()), "value": self.value}], lr=0.01)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    test_step = predict_step = validation_step


def batches() -> Any:
    return loader(token_batches([5, 8], seed=0))


def save(place: str, path: Path, mark: Mark) -> None:
    """Save a checkpoint with a mark in it. All ranks together."""
    value = 0
    if place == "value":
        value = mark
    module = Grouped(value)
    kind = "sharded"
    if place == "file":
        kind = "full"
    fit(module, batches(), state_dict_type=kind).save_checkpoint(path)
    dist.barrier()
    if place in ("file", "rest") and dist.get_rank() == 0:
        if place == "file":
            file = path
        else:
            file = path / "meta.pt"
        torch.save({**torch.load(file, weights_only=True), "mark": mark}, file)
    if place == "index" and dist.get_rank() == 0:
        index = path / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        metadata.planner_data = {**metadata.planner_data, "mark": mark}
        index.write_bytes(pickle.dumps(metadata))
    dist.barrier()
    assert not mark.directory.exists()


def runs_code(act: Any, mark: Mark) -> bool:
    """Whether the mark was made; otherwise the file was refused."""
    refusal = ""
    try:
        act()
    except pickle.UnpicklingError as error:
        refusal = str(error)
    dist.barrier()
    made = mark.directory.exists()
    dist.barrier()
    if made and dist.get_rank() == 0:
        mark.directory.rmdir()
    assert made != ("Weights only load failed" in refusal), refusal
    return made


@on_ranks(2)
@pytest.mark.parametrize("place", fast(["file", "rest", "index", "value"], "file", "value"))
def test_code_runs_only_where_the_file_is_trusted(rank, place, tmp_path):
    path = tmp_path / "saved.ckpt"
    mark = Mark(tmp_path / "mark")
    save(place, path, mark)
    if place == "value":
        stages = ["fit"]
    else:
        stages = ["fit", "validate", "test", "predict"]
    strategies: list[dict[str, Any]] = [{}]
    if place == "file":
        strategies.append({"strategy": "ddp"})
    for weights_only, expected in CASES:
        for options in strategies:
            for stage in stages:
                run = getattr(trainer(2, max_epochs=2, **options), stage)

                def act(run=run, weights_only=weights_only) -> None:
                    run(Grouped(), batches(), ckpt_path=path, weights_only=weights_only)

                assert runs_code(act, mark) == expected, (options, stage, weights_only)


@on_ranks(2)
@pytest.mark.parametrize("place", ["file", "rest", "index", "value"])
def test_fabric_refuses_code(rank, place, tmp_path):
    path = tmp_path / "saved.ckpt"
    mark = Mark(tmp_path / "mark")
    save(place, path, mark)
    fabric = Fabric(strategy=ODCFabricStrategy(sharding_strategy="FULL_SHARD"), accelerator="cpu", devices=2)
    fabric.launch()
    module = fabric.setup_module(Grouped())
    assert not runs_code(lambda: fabric.load(path, {"model": module}), mark)


@on_ranks(2)
def test_what_training_saves_is_trusted(rank, tmp_path):
    """The index, layouts and dtypes of a real checkpoint are known, in half precision, too."""
    path = tmp_path / "saved.ckpt"
    t = fit(Grouped(), batches(), state_dict_type="sharded", precision="bf16-true")
    t.save_checkpoint(path)
    refuse_code(path)
    trainer(2, max_epochs=2, precision="bf16-true").fit(Grouped(), batches(), ckpt_path=path)
