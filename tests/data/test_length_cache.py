"""Lengths on disk: found again, made anew when anything is amiss, and never a way in."""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_odc.data import length_cache
from lightning_odc.data.length_cache import LengthCache, dataset_key
from lightning_odc.data.lengths import find_lengths, measure
from tests.support.ranks import run_ranks

LENGTHS = np.array([3, 1, 4])


@pytest.fixture(autouse=True)
def _everything_is_worth_a_file(monkeypatch):
    monkeypatch.setattr(length_cache, "WORTH_SECONDS", 0.0)


@pytest.fixture
def cache(tmp_path) -> LengthCache:
    return LengthCache(tmp_path / "cache")


class Count:
    """Computes `LENGTHS` and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return LENGTHS


def entry(cache: LengthCache) -> Path:
    assert cache.directory is not None
    (path,) = cache.directory.iterdir()
    return path


def test_what_was_computed_is_found_again(cache):
    count = Count()
    for _ in range(3):
        assert cache.get("ab", 3, count).tolist() == [3, 1, 4]
    assert count.calls == 1
    assert entry(cache).name == "ab.lengths"


def test_only_the_owner_can_read_it(cache):
    mask = os.umask(0)
    try:
        cache.get("ab", 3, Count())
    finally:
        os.umask(mask)
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE(entry(cache).parent.stat().st_mode) == 0o700


def test_what_took_no_time_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(length_cache, "WORTH_SECONDS", 60.0)
    cache.get("ab", 3, Count())
    assert list(cache.directory.iterdir()) == []


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def damage_append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_nest(path: Path) -> None:
    path.write_bytes(b"[" * 4000)


def damage_mode(path: Path) -> None:
    path.chmod(0o666)


def damage_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    path.rmdir()
    os.mkfifo(path)


DAMAGES = [
    damage_truncate,
    damage_append,
    damage_flip,
    damage_empty,
    damage_nest,
    damage_mode,
    damage_directory,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew_with_a_warning(cache, damage):
    count = Count()
    cache.get("ab", 3, count)
    damage(entry(cache))
    with pytest.warns(UserWarning, match="it is made anew"):
        assert cache.get("ab", 3, count).tolist() == [3, 1, 4]
    assert count.calls == 2
    assert cache.get("ab", 3, count).tolist() == [3, 1, 4]
    assert count.calls == 2


def test_a_file_of_another_size_or_key_is_not_believed(cache):
    cache.get("ab", 3, Count())
    with pytest.warns(UserWarning, match="another data set"):
        cache.get("ab", 2, lambda: LENGTHS[:2])
    entry(cache).rename(entry(cache).with_name("cd.lengths"))
    with pytest.warns(UserWarning, match="another data set"):
        assert cache.get("cd", 2, lambda: LENGTHS[1:]).tolist() == [1, 4]


def test_a_planted_link_is_not_followed(cache, tmp_path):
    cache.get("ab", 3, Count())
    treasure = tmp_path / "treasure"
    entry(cache).rename(treasure)
    before = treasure.read_bytes()
    (cache.directory / "ab.lengths").symlink_to(treasure)
    count = Count()
    with pytest.warns(UserWarning, match="it is made anew"):
        cache.get("ab", 3, count)
    assert count.calls == 1
    assert treasure.read_bytes() == before
    assert not entry(cache).is_symlink()


def test_a_planted_link_for_the_unfinished_file_is_not_followed(cache, tmp_path):
    cache.directory.mkdir(parents=True, mode=0o700)
    treasure = tmp_path / "treasure"
    treasure.write_text("precious")
    (cache.directory / "ab.part").symlink_to(treasure)
    with pytest.warns(UserWarning, match="nothing is remembered"):
        assert cache.get("ab", 3, Count()).tolist() == [3, 1, 4]
    assert treasure.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "writable", "file"])
def test_a_directory_that_others_could_have_made_is_not_used(cache, tmp_path, kind):
    cache.directory.parent.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        cache.directory.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable":
        cache.directory.mkdir()
        cache.directory.chmod(0o777)
    else:
        cache.directory.write_text("")
    count = Count()
    with pytest.warns(UserWarning, match="nothing is remembered"):
        assert cache.get("ab", 3, count).tolist() == [3, 1, 4]
    assert count.calls == 1
    assert list(tmp_path.rglob("*.lengths")) == []


def test_a_foreign_directory_is_not_used(cache, monkeypatch):
    cache.get("ab", 3, Count())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        cache.get("ab", 3, Count())


def test_a_disk_that_takes_nothing_is_no_error(cache, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.get("ab", 3, Count()).tolist() == [3, 1, 4]
    assert list(cache.directory.iterdir()) == []


def test_what_computing_raises_is_passed_on_and_leaves_no_lock(cache):
    def fail() -> Any:
        raise OSError("the data set's own trouble")

    with pytest.raises(OSError, match="own trouble"):
        cache.get("ab", 3, fail)
    assert list(cache.directory.iterdir()) == []


def test_processes_that_start_together_compute_once(tmp_path):
    results = run_ranks(_slow_get, str(tmp_path), world_size=3)
    assert [lengths for lengths, _ in results] == [[3, 1, 4]] * 3
    assert sorted(calls for _, calls in results) == [0, 0, 1]


def _slow_get(rank: int, directory: str) -> tuple[list[int], int]:
    length_cache.WORTH_SECONDS = 0.0
    count = Count()

    def slow() -> Any:
        time.sleep(0.5)
        return count()

    start = time.monotonic()
    lengths = LengthCache(directory).get("ab", 3, slow).tolist()
    assert time.monotonic() - start < 20
    return lengths, count.calls


def test_a_process_that_died_while_computing_does_not_block(cache):
    cache.directory.mkdir(parents=True, mode=0o700)
    (cache.directory / "ab.part").write_bytes(b"half of it")
    (cache.directory / "ab.part").chmod(0o600)
    assert cache.get("ab", 3, Count()).tolist() == [3, 1, 4]
    assert entry(cache).name == "ab.lengths"


def test_waiting_for_another_process_ends(cache, monkeypatch):
    monkeypatch.setattr(length_cache, "_PATIENCE_S", 0.2)
    begun, done = threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert done.wait(20)
        return LENGTHS

    thread = threading.Thread(target=lambda: cache.get("ab", 3, slow))
    thread.start()
    assert begun.wait(20)
    with pytest.warns(UserWarning, match="nothing is remembered"):
        assert cache.get("ab", 3, Count()).tolist() == [3, 1, 4]
    done.set()
    thread.join()


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LIGHTNING_ODC_CACHE", raising=False)
    assert LengthCache().directory == tmp_path / "xdg" / "lightning-odc" / "lengths"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LengthCache().directory == tmp_path / ".cache" / "lightning-odc" / "lengths"
    monkeypatch.setenv("LIGHTNING_ODC_CACHE", str(tmp_path / "own"))
    assert LengthCache().directory == tmp_path / "own" / "lengths"
    assert LengthCache(tmp_path / "argument").directory == tmp_path / "argument" / "lengths"
    assert LengthCache(False).directory is None
    monkeypatch.setenv("LIGHTNING_ODC_CACHE", "off")
    assert LengthCache().directory is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LengthCache().get("ab", 3, Count()).tolist() == [3, 1, 4]


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
        lambda s: max(len(s), 2) - 0,
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
    assert len(list(tmp_path.rglob("*.lengths"))) == 1
    data[1] = [0, 0]
    assert find_lengths(data, cache_dir=tmp_path).values.tolist() == [3, 2, 4]
    assert len(list(tmp_path.rglob("*.lengths"))) == 2
