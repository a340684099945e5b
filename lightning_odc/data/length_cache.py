"""A cache of lengths on disk: one file for each data set. What does not fit is computed again, with a warning."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_odc.data.rng import isolated_rng, seed_rng
from lightning_odc.files import write_whole

LengthArray = npt.NDArray[np.int64]

ENVIRONMENT_VARIABLE = "LIGHTNING_ODC_CACHE"
#: Lengths that took less time are not worth a file.
WORTH_SECONDS = 0.5

_VERSION = 2
_SAMPLED = 64
_DEPTH = 6


def remembered(
    key: str,
    count: int,
    compute: Callable[[], LengthArray],
    directory: str | Path | Literal[False] | None = None,
) -> LengthArray:
    """The lengths under a hexadecimal key; computed if there are none, and kept if that took :data:`WORTH_SECONDS`."""
    folder = cache_folder(directory)
    if folder is None:
        return compute()
    path = folder / f"{key}.npy"
    if (known := _read(path, count)) is not None:
        return known
    begin = time.monotonic()
    found = compute()
    if time.monotonic() - begin >= WORTH_SECONDS:
        content = io.BytesIO()
        np.save(content, found)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.getvalue())  # processes that start together write the same
        except OSError as problem:
            _warn(path, f"{problem}; nothing is remembered")
    return found


def _read(path: Path, count: int) -> LengthArray | None:
    """The lengths in a file; ``None`` if there are none. Nothing is unpickled."""
    try:
        with path.open("rb") as file:
            found = np.lib.format.read_array(file, allow_pickle=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as problem:  # numpy raises many kinds, by what is in it
        _warn(path, f"{problem}; it is written again")
        return None
    if found.dtype != np.int64 or found.shape[:1] != (count,):
        _warn(path, "it belongs to another data set; it is written again")
        return None
    return found


def _warn(path: Path, problem: str) -> None:
    warnings.warn(f"Cache of sample lengths, {path}: {problem}.", stacklevel=3)


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
    """Hexadecimal text that differs for data sets whose lengths should not be mistaken for each other's."""
    # The first, the last, and some between that follow no period.
    some = np.random.default_rng(len(dataset)).integers(0, len(dataset), _SAMPLED)
    # A change elsewhere, in a data set of the same class and size, is not noticed here. The loader compares every
    # sample that it reads with its remembered length.
    facts = {
        "version": _VERSION,
        "class": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "samples": len(dataset),
        "fingerprint": str(getattr(dataset, "_fingerprint", "")),
        "measured by": _function(length_of),
        "seen": [_look(dataset, index, length_of) for index in sorted({0, len(dataset) - 1, *some.tolist()})],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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
