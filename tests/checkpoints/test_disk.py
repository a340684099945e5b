"""A disk that is full or a process that dies while it writes: what was whole before is whole afterwards."""

from __future__ import annotations

import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_odc import Minibatch, files
from lightning_odc.callbacks import TimelineRecorder
from tests.support.fits import doing
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks, try_ranks
from tests.support.tiers import fast

BATCHES = [Minibatch(token_batches([5, 9])) for _ in range(3)]


def limit_files(size: int) -> None:
    """Files cannot grow beyond ``size`` bytes: what a full disk does, for one process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _trained(kind: str, lr: float) -> Any:
    module = TokenModule("items", lr=lr)
    fit = trainer(2, state_dict_type=kind, deterministic=True)
    fit.fit(module, loader(BATCHES))
    return module, fit


def _loads(kind: str, path: str, expected: dict[str, torch.Tensor]) -> bool:
    module = TokenModule("items")
    trainer(2, state_dict_type=kind).validate(
        module, loader(token_batches([4])), ckpt_path=path, verbose=False
    )
    found = full_parameters(module)
    return all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
def test_a_full_disk_leaves_the_sharded_checkpoint_that_was_there(rank, tmp_path):
    module, fit = _trained("sharded", 0.1)
    fit.save_checkpoint(path := f"{tmp_path}/last.ckpt")
    before = full_parameters(module)
    _, fit = _trained("sharded", 0.2)
    limit_files(256)
    try:
        with pytest.raises(OSError, match="File too large") as error:
            fit.save_checkpoint(path)
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert error.value.__notes__ == [files.not_written(Path(path))]
    of_all_ranks(None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"], "it takes no room"
    assert _loads("sharded", path, before)
    # As if the job had been killed between the two renames of the next save.
    if rank == 0:
        Path(path).rename(tmp_path / ".last.ckpt.before")
    of_all_ranks(None)
    assert _loads("sharded", path, before)


def _dies(rank: int, kind: str, folder: str) -> None:
    path = f"{folder}/last.ckpt"
    _, fit = _trained(kind, 0.1)
    fit.save_checkpoint(path)
    _, fit = _trained(kind, 0.2)
    if rank == 0:
        torch.save = files.os.fsync = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    fit.save_checkpoint(path)


def _goes_on(rank: int, kind: str, folder: str) -> bool:
    path = f"{folder}/last.ckpt"
    module, fit = _trained(kind, 0.1)
    intact = _loads(kind, path, full_parameters(module))
    module, fit = _trained(kind, 0.3)
    fit.save_checkpoint(path)
    return intact and _loads(kind, path, full_parameters(module))


@pytest.mark.parametrize("kind", fast(["full", "sharded"], "sharded"))
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_that_was_there(tmp_path, kind):
    dead, _ = try_ranks(_dies, kind, str(tmp_path), timeout=60)
    assert dead.exitcode == -signal.SIGKILL
    assert run_ranks(_goes_on, kind, str(tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_nothing_is_left_of_a_file_that_was_not_written(tmp_path):
    path = tmp_path / "one"
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path.symlink_to(precious)
    files.write_whole(path, b"whole")  # which replaces a planted link

    def fails() -> None:
        with files.replacing(path) as file:
            file.write(b"half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left") as caught:
        fails()
    assert caught.value.__notes__ == [f"{path} was not written. An earlier file of that name is unchanged."]
    assert path.read_bytes() == b"whole"
    assert not path.is_symlink()
    with files.replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert precious.read_bytes() == b"mine"
    assert sorted(tmp_path.iterdir()) == [path, precious]
    with pytest.raises(OSError, match="Not a directory"), files.replacing(path / "below"):
        pass


# -- what only accompanies a training ----------------------------------------------------------------------------


def fill_the_disk(own: Any) -> None:
    """From the second batch on nothing can be written; rank 1 is late then."""
    if own.global_step == 1:
        limit_files(0)
        time.sleep(own.global_rank)


@on_ranks(2)
def test_traces_and_reports_do_not_end_a_training(rank, tmp_path):
    fit = trainer(
        2,
        callbacks=[TimelineRecorder(tmp_path)],
        default_root_dir=tmp_path,
        hang_report_after=timedelta(seconds=0.2),
    )
    with warned() as caught:
        fit.fit(doing(TokenModule("items"), on_train_batch_end=fill_the_disk), loader(BATCHES))
        limit_files(resource.RLIM_INFINITY)
    assert fit.global_step == 3
    text = "\n".join(caught)
    if rank == 0:
        assert "TimelineRecorder could not write" in text
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not [name for name in names if name.startswith(".")], names
