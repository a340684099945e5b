"""A name for a data set that changes when the data set does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
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
