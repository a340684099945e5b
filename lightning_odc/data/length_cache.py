"""A cache of lengths on disk: one file for each data set, in a separate folder.

Other users may be able to write to a cache directory. So a file is used only if it belongs to the current user, only
that user may write to it, and its checksum, which covers the key, is right. It holds raw integers, never pickle.
If anything does not fit, lengths are computed again with a warning, never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_odc import files
from lightning_odc.data.rng import isolated_rng, seed_rng

LengthArray = npt.NDArray[np.int64]

ENVIRONMENT_VARIABLE = "LIGHTNING_ODC_CACHE"
#: Lengths that took less time are not worth a file.
WORTH_SECONDS = 0.5

_PATIENCE_S = 1800.0
_VERSION = 1
_SAMPLED = 64
_DEPTH = 6
_DIGEST_BYTES = 32


def remembered(
    key: str,
    count: int,
    compute: Callable[[], LengthArray],
    directory: str | Path | Literal[False] | None = None,
) -> LengthArray:
    """The ``count`` lengths under ``key``. If there are none, one process computes them and others wait for it.

    What took at least :data:`WORTH_SECONDS` to compute is remembered.

    Args:
        key: Hexadecimal text.
        count: The number of lengths there must be.
        compute: Finds the lengths. What it raises is passed on.
        directory: The folder that keeps them. By default it is the environment variable ``LIGHTNING_ODC_CACHE``, else
            ``lightning-odc`` in the user's cache directory (``XDG_CACHE_HOME``, else ``~/.cache``). ``False``, or
            ``off`` in the environment variable, keeps nothing.
    """
    folder = cache_folder(directory)
    if folder is None:
        return compute()
    path = folder / key / f"{key}.lengths"
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _check_own(path.parent)
            stack.callback(_remove_empty, path.parent)
            stack.enter_context(files.one_at_a_time(path.parent, _PATIENCE_S))
        except OSError as problem:
            _warn(path, f"{problem}; nothing is remembered")
            return compute()
        found = _read(path, key, count)
        if found is None:
            begin = time.monotonic()
            found = compute()
            if time.monotonic() - begin >= WORTH_SECONDS:
                _write(path, key, found)
        return found


def _read(path: Path, key: str, count: int) -> LengthArray | None:
    try:
        content = files.read_regular(path, own=True)
    except FileNotFoundError:
        return None
    except OSError as problem:
        _warn(path, f"{problem}; it is written again")
        return None
    body = content[_DIGEST_BYTES:]
    numbers, rest = divmod(len(body), 8 * count) if count else (1, len(body))  # of each sample
    if content[:_DIGEST_BYTES] != _digest(key, body) or rest or not numbers:
        _warn(path, "its content is damaged or belongs to another data set; it is written again")
        return None
    values = np.frombuffer(body, dtype="<i8").astype(np.int64)
    return values if numbers == 1 else values.reshape(count, numbers)


def _write(path: Path, key: str, values: LengthArray) -> None:
    body = values.astype("<i8").tobytes()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)  # a process before this one may have removed it, empty
        files.write_whole(path, _digest(key, body) + body)
    except OSError as problem:
        _warn(path, f"{problem}; nothing is remembered")


def _check_own(folder: Path) -> None:
    """Refuse a folder in which others could hold the lock, and keep this process waiting."""
    info = folder.lstat()
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} belongs to another user, or others may write to it")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it holds the lengths
        folder.rmdir()


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _warn(path: Path, problem: str) -> None:
    warnings.warn(f"Cache of sample lengths, {path}: {problem}.", stacklevel=2)


def cache_folder(directory: str | Path | Literal[False] | None) -> Path | None:
    """Where lengths are remembered; ``None``: nowhere."""
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


def dataset_key(dataset: Any, length_of: Callable[[Any], Any]) -> str:
    """Hexadecimal text that differs for data sets whose lengths should not be mistaken for each other's.

    It covers the class, the number of samples, a Hugging Face fingerprint if there is one, the function that
    measures samples, and content and length of the first, the last and up to 64 samples between them. A change
    elsewhere, in a data set of the same class and size, is not noticed here; the loader compares every sample that it
    reads with its remembered length.

    Args:
        dataset: A map-style data set with at least one sample.
        length_of: The length of a sample.
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


def _look(dataset: Any, index: int, length_of: Callable[[Any], Any]) -> list[Any]:
    with isolated_rng():
        seed_rng(index)
        sample = dataset[index]
    return [index, repr(length_of(sample)), digest_of(sample)]


def digest_of(sample: Any) -> str:
    """Text that differs where the content of samples does, as far as that can be seen."""
    digest = hashlib.sha256()
    for piece in _pieces(sample, _DEPTH):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


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
