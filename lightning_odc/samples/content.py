"""What a batch of any kind holds, which samples those seem to be, and how to take some of them."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

Path = tuple[Any, ...]
"""The keys, indices and names that lead to a tensor in a batch."""

_BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_DEPTH = 6  # to which the content of a sample is looked at


# -- tensors ----------------------------------------------------------------------------------------------


def named(batch: Any, name: str) -> Tensor | None:
    """The tensor of that name in a mapping or an object, also if that stands in a list or tuple."""
    if isinstance(batch, Mapping):
        value = batch.get(name)
    else:
        value = getattr(batch, name, None)
    if isinstance(value, Tensor):
        return value
    if not isinstance(batch, list | tuple) or isinstance(next(iter(batch), 0), int | float | str):
        return None  # nor a long row of plain values, each of which would be looked at
    for part in batch:
        found = named(part, name)
        if found is not None:
            return found
    return None


def tensors_of(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors in nested containers and data classes, with their paths."""
    if isinstance(batch, Tensor):
        yield path, batch
        return
    for key, part in parts_in(batch):
        yield from tensors_of(part, (*path, key))


def parts_in(batch: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, with keys, indices or names; nothing of a row of plain values, which may be long."""
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, list | tuple):
        if all(isinstance(value, int | float | str) for value in batch):
            return ()
        return enumerate(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return ()


# -- samples ----------------------------------------------------------------------------------------------


def sizes_of(batch: Any) -> list[int]:
    """Sizes of the samples that a batch seems to hold: tokens in a packed row, else 1 each; empty for one sample."""
    # Nothing in a batch says which axis holds samples. So what was cut must be tested: Note [The loss is tested].
    bounds = _bounds(batch)
    if bounds:
        return [end - begin for begin, end in pairwise(bounds)]
    # Tensors that all have one entry per sample, `[samples, ...]`; those of one axis alone are tokens of one sample.
    shapes = [tuple(tensor.shape) for _, tensor in tensors_of(batch) if tensor.dim()]
    counts = {shape[0] for shape in shapes}
    is_table = len(counts) == 1 and max(map(len, shapes)) > 1
    if not is_table or counts == {1}:
        return []
    return [1] * counts.pop()


def some_of(batch: Any, samples: Sequence[int]) -> Any:
    """A batch of some of the samples that `sizes_of` has found."""
    bounds = _bounds(batch)
    if bounds:
        return _some_packed(batch, bounds, samples)
    return some_rows(batch, len(sizes_of(batch)), samples)


def some_rows(batch: Any, count: int, part: Sequence[int]) -> Any:
    """A batch with some of its ``count`` rows. A list of text is cut, too, if it has one entry per row."""
    rows: Any = list(part)
    if isinstance(part, range):
        rows = slice(part.start, part.stop)  # is not copied

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows] if value.dim() else value
        if len(value) == count and not any(tensors_of(value)):  # text
            return [value[index] for index in part]
        return [some_rows(inner, count, part) for inner in value]

    return apply_to_collection(batch, (Tensor, list), take)


def _bounds(batch: Any) -> list[int]:
    """Where samples begin in a packed row, ``[1, tokens]`` or ``[tokens]``, and, last, where it ends; else empty."""
    # ``[0, 3, 5]`` of two samples with 3 and 2 tokens.
    if not isinstance(batch, Mapping):
        return []
    bounds = given_bounds(batch)
    if len(bounds) < 3:
        return []
    others = {name: value for name, value in batch.items() if name not in _BOUNDS}
    for path, tensor in tensors_of(others):
        # Of images in a list, say, nothing tells whose they are.
        if len(path) > 1 or (tensor.dim() and _token_axis(tensor, bounds[-1]) is None):
            return []
    return bounds


def given_bounds(batch: Mapping[str, Any]) -> list[int]:
    """The bounds that a batch of a mapping seems to have, by the names that models take."""
    for name in _BOUNDS:
        bounds = batch.get(name)
        if isinstance(bounds, Tensor):
            return [int(bound) for bound in bounds.tolist()]
    row = batch.get("position_ids")
    if not isinstance(row, Tensor) or row.shape[:-1] != (1,):
        return []
    starts = (row[0] == 0).nonzero().flatten().tolist()
    if starts[:1] != [0]:
        return []
    return [*starts, row.size(1)]


def _token_axis(tensor: Tensor, tokens: int) -> int | None:
    """The dimension with one entry per token."""
    if tensor.dim() > 1 and tensor.size(0) == 1 and tensor.size(1) == tokens:
        return 1
    if tensor.size(0) == tokens:
        return 0
    return None


def _some_packed(batch: Any, bounds: list[int], samples: Sequence[int]) -> Any:
    """Some samples of a packed row as a packed row. A list of text is cut, too, if it has one entry per sample."""
    taken = [range(bounds[index], bounds[index + 1]) for index in samples]
    sizes = list(map(len, taken))
    tokens = list(chain.from_iterable(taken))
    part = copy.copy(batch)
    for name, value in batch.items():
        if name in _LONGEST:
            part[name] = max(sizes)
            if isinstance(value, Tensor):
                part[name] = value.new_tensor(max(sizes))
        elif isinstance(value, Tensor) and name in _BOUNDS:
            part[name] = value.new_tensor([0, *accumulate(sizes)])
        elif isinstance(value, Tensor) and value.dim():
            axis = _token_axis(value, bounds[-1])
            part[name] = value[:, tokens] if axis == 1 else value[tokens]
        elif isinstance(value, list) and len(value) == len(bounds) - 1:
            part[name] = [value[index] for index in samples]
    return part


def short_to_long(sizes: Sequence[int], most: float, room: float = math.inf) -> list[int]:
    """Positions of two to eight samples, from the shortest to the longest of up to ``most`` tokens, if two have so few.

    As many are chosen as have ``2 * most`` tokens, and have ``room`` in a batch, if all are as long as the longest.
    """
    by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
    short = by_size[: max(sum(size <= most for size in sizes), 2)]
    count = int(min(2 * most, room) // max(sizes[short[-1]], 1))
    return [short[place] for place in spread(len(short), min(max(count, 2), 8))]


def spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``count`` places, from the first to the last."""
    return np.linspace(0, count - 1, min(count, most)).astype(int).tolist()


# -- equal or not -----------------------------------------------------------------------------------------


def digest_of(content: Any) -> str:
    """Text that differs where the content of samples does, as far as that can be seen."""
    digest = hashlib.sha256()
    for piece in _pieces(content, _DEPTH):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """The content of a sample as bytes, with the types that hold it."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, int | float | complex | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, Tensor | np.ndarray | np.generic) and not getattr(value.dtype, "hasobject", False):
        yield f"{value.dtype} {list(value.shape)}".encode()
        if isinstance(value, Tensor):
            value = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        yield value.tobytes()
    elif depth:
        parts = value
        if isinstance(value, Sequence | np.ndarray):
            parts = dict(enumerate(value))
        elif not isinstance(value, Mapping):
            parts = getattr(value, "__dict__", {})
        for name in sorted(parts, key=str):
            yield from _pieces(str(name), depth - 1)
            yield from _pieces(parts[name], depth - 1)
