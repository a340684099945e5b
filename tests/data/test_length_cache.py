"""Lengths on disk: found again, computed again when anything is amiss, and nothing is unpickled."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_odc.data import lengths as lengths_module
from lightning_odc.data.lengths import cache_folder, dataset_key, find_lengths, measure, remembered
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks

LENGTHS = np.array([3, 1, 4])


@pytest.fixture(autouse=True)
def _everything_is_worth_a_file(monkeypatch):
    monkeypatch.setattr(lengths_module, "WORTH_SECONDS", 0.0)


class Count:
    """Computes `LENGTHS` and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return LENGTHS


def entries(directory: Path) -> list[Path]:
    """All files, unfinished ones too."""
    return [path for path in directory.rglob("*") if not path.is_dir()]


def entry(directory: Path) -> Path:
    (path,) = entries(directory)
    return path


def test_what_was_computed_is_found_again(tmp_path):
    count = Count()
    for _ in range(3):
        assert remembered("ab", 3, count, tmp_path).tolist() == [3, 1, 4]
    assert count.calls == 1
    assert entry(tmp_path).name == "ab.npy"


def test_what_took_no_time_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths_module, "WORTH_SECONDS", 60.0)
    remembered("ab", 3, Count(), tmp_path)
    assert entries(tmp_path) == []


def test_a_damaged_file_is_written_again_with_a_warning(tmp_path):
    for damage in (
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, np.array([print, 1, 4]), allow_pickle=True),
    ):
        count = Count()
        remembered("ab", 3, Count(), tmp_path)
        damage(entry(tmp_path))
        with pytest.warns(UserWarning, match="it is written again"):
            assert remembered("ab", 3, count, tmp_path).tolist() == [3, 1, 4]
        assert remembered("ab", 3, count, tmp_path).tolist() == [3, 1, 4]
        assert count.calls == 1


def test_a_file_of_another_size_or_key_is_not_believed(tmp_path):
    remembered("ab", 3, Count(), tmp_path)
    with pytest.warns(UserWarning, match="another data set"):
        remembered("ab", 2, lambda: LENGTHS[:2], tmp_path)
    np.save(tmp_path / "lengths" / "cd.npy", np.array([1.0, 4.0]))
    with pytest.warns(UserWarning, match="another data set"):
        assert remembered("cd", 2, lambda: LENGTHS[1:], tmp_path).tolist() == [1, 4]


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path):
    (tmp_path / "lengths").write_text("")
    with pytest.warns(UserWarning, match="nothing is remembered"):
        assert remembered("ab", 3, Count(), tmp_path).tolist() == [3, 1, 4]


def test_a_disk_that_takes_nothing_is_no_error(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert remembered("ab", 3, Count(), tmp_path).tolist() == [3, 1, 4]
    assert entries(tmp_path) == []


def test_what_computing_raises_is_passed_on(tmp_path):
    def fail() -> Any:
        raise OSError("the data set's own trouble")

    with pytest.raises(OSError, match="own trouble"):
        remembered("ab", 3, fail, tmp_path)
    assert remembered("ab", 3, Count(), tmp_path).tolist() == [3, 1, 4]


@on_ranks(4)
def test_processes_that_start_together_do_not_disturb_each_other(rank, tmp_path):
    lengths_module.WORTH_SECONDS = 0.0
    init_gloo(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(20):
            assert remembered(f"{number % 5}", 3, Count(), tmp_path).tolist() == [3, 1, 4]
    dist.barrier()
    assert len(entries(tmp_path)) == 5


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LIGHTNING_ODC_CACHE", raising=False)
    assert cache_folder(None) == tmp_path / "xdg" / "lightning-odc" / "lengths"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "lightning-odc" / "lengths"
    monkeypatch.setenv("LIGHTNING_ODC_CACHE", str(tmp_path / "own"))
    assert cache_folder(None) == tmp_path / "own" / "lengths"
    assert cache_folder(tmp_path / "argument") == tmp_path / "argument" / "lengths"
    assert cache_folder(False) is None
    monkeypatch.setenv("LIGHTNING_ODC_CACHE", "off")
    assert cache_folder(None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remembered("ab", 3, Count()).tolist() == [3, 1, 4]


# -- keys ------------------------------------------------------------------------------------------------------


def changed(dataset: list[Any], length_of: Any = measure) -> bool:
    return dataset_key([torch.arange(n) for n in (3, 1, 4)], measure) != dataset_key(dataset, length_of)


def test_a_changed_data_set_has_another_key():
    assert not changed([torch.arange(n) for n in (3, 1, 4)])
    assert changed([torch.arange(n) for n in (3, 1, 5)])
    assert changed([torch.arange(n) for n in (3, 1)])
    assert changed([torch.arange(n) + 1 for n in (3, 1, 4)]), "content counts, not only lengths"
    assert changed([torch.arange(n).float() for n in (3, 1, 4)])
    assert changed([list(range(n)) for n in (3, 1, 4)])
    assert changed([torch.arange(n) for n in (3, 1, 4)], len)


def test_a_fingerprint_counts():
    class Printed(list[Any]):
        _fingerprint = "a"

    first = dataset_key(Printed([[1]]), len)
    Printed._fingerprint = "b"
    assert dataset_key(Printed([[1]]), len) != first


def test_the_code_of_a_length_function_counts():
    functions = [
        lambda s: len(s),
        lambda s: max(len(s), 1),
        lambda s: max(len(s), 2),
        lambda s: sum(1 for _ in s),
    ]
    assert len({dataset_key([[1, 2, 3]], function) for function in functions}) == 4


def test_keys_see_into_samples():
    class Plain:
        def __init__(self, value: int) -> None:
            self.value = value

    def key(sample: Any) -> str:
        return dataset_key([sample], lambda _: 1)

    assert key(Plain(1)) == key(Plain(1)) != key(Plain(2))
    assert key({"a": 1, "b": None}) == key({"b": None, "a": 1}) != key({"a": 1, "b": 0})
    assert key([torch.ones(2, dtype=torch.bfloat16)]) != key([torch.zeros(2, dtype=torch.bfloat16)])
    assert key([np.array(["x"], dtype=object)]) != key([np.array(["y"], dtype=object)])
    assert key(["ab", "c"]) != key(["a", "bc"])


def test_random_samples_have_a_steady_key():
    class Noisy(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(3)

    assert dataset_key(Noisy([0, 0]), measure) == dataset_key(Noisy([0, 0]), measure)


def test_a_changed_data_set_is_scanned_again(tmp_path):
    data = [[0] * n for n in (3, 1, 4)]
    assert find_lengths(data, cache_dir=tmp_path).values.tolist() == [3, 1, 4]
    assert find_lengths(data, cache_dir=tmp_path).values.tolist() == [3, 1, 4]
    assert len(list(tmp_path.rglob("*.npy"))) == 1
    data[1] = [0, 0]
    assert find_lengths(data, cache_dir=tmp_path).values.tolist() == [3, 2, 4]
    assert len(list(tmp_path.rglob("*.npy"))) == 2
