"""Lengths remembered on disk, in files that only their owner can read or plant.

Note [A cache that cannot be planted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cache directory may lie where others can write. So files lie in a subdirectory of mode 0700 that must belong to
the current user; it and the files in it are opened relative to directory descriptors and never through a symbolic
link; a file must be regular, ours and not writable by others. Content is one line of JSON and raw integers with a
checksum, never pickle. Whatever does not fit is a cache miss with a warning, never an error.

A new file is written as ``<key>.part`` under an exclusive lock on that very file, and renamed when it is complete.
Processes that start together queue for the lock; when they get it, the file they hold has been renamed to the one
they want. The kernel frees the lock of a process that dies, and the next one writes the same file again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_odc.data.rng import isolated_rng, seed_rng

_VERSION = 1
_SAMPLED = 64
_DEPTH = 6


def dataset_key(dataset: Any, length_of: Callable[[Any], int]) -> str:
    """Hexadecimal text that differs for data sets whose lengths should not be mistaken for each other's.

    It covers the class, the number of samples, a Hugging Face fingerprint if there is one, the function that
    measures samples, and content and length of the first, the last and up to 64 samples between them. A change
    elsewhere, in a data set of the same class and size, is not noticed here; the loader compares every sample that it
    reads with its remembered length.

    Args:
        dataset: a map-style data set with at least one sample.
        length_of: the length of a sample.
    """
    facts = {
        "version": _VERSION,
        "class": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "samples": len(dataset),
        "fingerprint": str(getattr(dataset, "_fingerprint", "")),
        "measured by": _function(length_of),
        "seen": [_look(dataset, index, length_of) for index in _spread(len(dataset))],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _spread(count: int) -> list[int]:
    """Sorted indices: the first, the last, and some between that follow no period."""
    some = np.random.default_rng(count).integers(0, count, _SAMPLED)
    return sorted({0, count - 1, *some.tolist()})


def _look(dataset: Any, index: int, length_of: Callable[[Any], int]) -> list[Any]:
    with isolated_rng():
        seed_rng(index)
        sample = dataset[index]
    digest = hashlib.sha256()
    for piece in _pieces(sample, _DEPTH):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return [index, repr(length_of(sample)), digest.hexdigest()]


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """The content of a sample as bytes, with the types that hold it."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {list(value.shape)}".encode()
        yield value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield f"{value.dtype} {list(value.shape)}".encode()
        yield value.tobytes()
    elif depth:
        for part in _parts(value):
            yield from _pieces(part, depth - 1)


def _parts(value: Any) -> list[Any]:
    """What an object consists of; nothing if that cannot be seen."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, np.ndarray):
        return list(value.flat)
    return [part for name in sorted(getattr(value, "__dict__", {})) for part in (name, vars(value)[name])]


def _function(function: Callable[..., Any]) -> list[str]:
    """Name and code of a function, as far as they can be seen."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return [name, *(_code(code) if isinstance(code, CodeType) else ())]


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(constant)


ENVIRONMENT_VARIABLE = "LIGHTNING_ODC_CACHE"
#: Lengths that took less time are not worth a file.
WORTH_SECONDS = 0.5

_FORMAT = "lightning-odc lengths 1"
_HEADER_BYTES = 4096
_PATIENCE_S = 1800.0
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC

LengthArray = npt.NDArray[np.int64]


class _UnusableError(Exception):
    """Why a directory or file of the cache is not used."""


class LengthCache:
    """Arrays of lengths by key, in one file each.

    Args:
        directory: where; by default the environment variable ``LIGHTNING_ODC_CACHE`` says it, else
            ``lightning-odc`` in the user's cache directory (``XDG_CACHE_HOME``, else ``~/.cache``). ``False``, or
            ``off`` in the environment variable, remembers nothing.
    """

    def __init__(self, directory: str | Path | Literal[False] | None = None) -> None:
        self.directory = _chosen(directory)

    def get(self, key: str, count: int, compute: Callable[[], LengthArray]) -> LengthArray:
        """The ``count`` lengths under ``key``, computed by one process where there are none.

        What took at least :data:`WORTH_SECONDS` to compute is remembered.

        Args:
            key: hexadecimal text.
            count: how many lengths there must be.
            compute: finds the lengths. What it raises is passed on.
        """
        with self._folder() as folder:
            if folder is None:
                return compute()
            found = self._read(folder, key, count, warn=False)
            if found is not None:
                return found
            with self._turn(folder, key) as part:
                found = self._read(folder, key, count, warn=True)
                if found is None:
                    begin = time.monotonic()
                    found = compute()
                    if part is not None and time.monotonic() - begin >= WORTH_SECONDS:
                        self._write(folder, part, key, found)
                return found

    @contextmanager
    def _folder(self) -> Iterator[int | None]:
        """A descriptor of the directory, or ``None`` with a warning why there is none."""
        folder = None
        try:
            if self.directory is not None:
                folder = _open_folder(self.directory)
        except (OSError, _UnusableError) as problem:
            self._warn(f"{problem}; nothing is remembered")
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)

    @contextmanager
    def _turn(self, folder: int, key: str) -> Iterator[int | None]:
        """The locked file to write to, or ``None`` where another process has written meanwhile, or none can be had."""
        part = None
        try:
            part = _lock(folder, f"{key}.part")
        except OSError as problem:
            self._warn(f"{problem}; nothing is remembered")
        try:
            yield part
        finally:
            if part is not None:
                if _is_at(part, folder, f"{key}.part"):
                    os.unlink(f"{key}.part", dir_fd=folder)
                os.close(part)

    def _read(self, folder: int, key: str, count: int, warn: bool) -> LengthArray | None:
        try:
            return _decode(_content(folder, f"{key}.lengths", count), key, count)
        except FileNotFoundError:
            return None
        except (OSError, _UnusableError) as problem:
            if warn:
                self._warn(f"{key}.lengths: {problem}; it is made anew")
            return None

    def _write(self, folder: int, part: int, key: str, values: LengthArray) -> None:
        try:
            os.ftruncate(part, 0)
            with open(part, "wb", closefd=False) as file:
                file.write(_encode(key, values))
            os.fsync(part)
            os.replace(f"{key}.part", f"{key}.lengths", src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as problem:
            self._warn(f"{problem}; nothing is remembered")

    def _warn(self, problem: str) -> None:
        warnings.warn(f"Cache of sample lengths in {self.directory}: {problem}.", stacklevel=2)


def _chosen(directory: str | Path | Literal[False] | None) -> Path | None:
    if directory is None:
        directory = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if directory is False or directory == "off":
        return None
    if directory is not None:
        return Path(directory).expanduser().absolute() / "lengths"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path(os.path.expanduser("~/.cache"))
    return caches / "lightning-odc" / "lengths" if caches.is_absolute() else None


def _open_folder(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
    try:
        _refuse_foreign(os.fstat(folder))
    except _UnusableError:
        os.close(folder)
        raise
    return folder


def _refuse_foreign(info: os.stat_result) -> None:
    if info.st_uid != os.geteuid():
        raise _UnusableError("it belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UnusableError("other users may write to it")


def _lock(folder: int, name: str) -> int | None:
    """Open and lock a file; ``None`` if its name has gone when the lock came, or the lock does not come."""
    file = os.open(name, os.O_RDWR | os.O_CREAT | _SAFE, 0o600, dir_fd=folder)
    deadline, pause = time.monotonic() + _PATIENCE_S, 0.01
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                os.close(file)
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    if _is_at(file, folder, name):
        return file
    os.close(file)
    return None


def _is_at(file: int, folder: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _content(folder: int, name: str, count: int) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=folder)
    with open(file, "rb") as stream:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise _UnusableError("it is not a regular file")
        _refuse_foreign(info)
        return stream.read(_HEADER_BYTES + 8 * count + 1)


def _encode(key: str, values: LengthArray) -> bytes:
    body = values.astype("<i8").tobytes()
    return json.dumps(_header(key, len(values), body)).encode() + b"\n" + body


def _decode(content: bytes, key: str, count: int) -> LengthArray:
    line, _, body = content.partition(b"\n")
    try:
        header = json.loads(line[:_HEADER_BYTES])
    except (ValueError, RecursionError):
        raise _UnusableError("it is not a file of lengths") from None
    if len(body) != 8 * count or header != _header(key, count, body):
        raise _UnusableError("its content is damaged or belongs to another data set")
    return np.frombuffer(body, dtype="<i8").astype(np.int64)


def _header(key: str, count: int, body: bytes) -> dict[str, object]:
    return {"format": _FORMAT, "key": key, "count": count, "sha256": hashlib.sha256(body).hexdigest()}
