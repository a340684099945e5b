"""How long every sample is: where lengths come from, and what they must be like."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_odc import host_memory
from lightning_odc.balance.arrays import as_caps, as_lengths, check_caps
from lightning_odc.data.rng import isolated_rng

LengthArray = npt.NDArray[np.int64]
"""``[n]``, or ``[n, d]`` where samples have rows of numbers."""
LengthFunction = Callable[[Any], int | Sequence[int]]
"""The length of a sample, or a row of numbers, as many for every sample: ``(text tokens, image patches)``."""
Source = Literal["given", "attribute", "column", "length_fn", "samples"]

_DEPTH = 6  # to which the content of a sample is looked at

_ROWS_AT_ONCE = 1000
_BYTES_OF_A_LENGTH = 64  # a number of Python in a list, and its places in two arrays
_SPARE_BYTES = 64 * 2**20  # for a sample, and for what else runs
_LOOK_EVERY_S = 1.0
_TEACH = (
    "Say how long the samples are:\n"
    "    BalancedDataLoader(dataset, lengths=[12, 7, ...], ...)    # or `dataset.lengths = [12, 7, ...]`\n"
    "    BalancedDataLoader(dataset, length_fn="
)


class LengthsUnknownError(ValueError):
    """The lengths of the samples are unknown, so they cannot be balanced."""

    length_fn = 'lambda sample: len(sample["tokens"])'
    """The function to write, with a key of the sample if there is one that has a length."""

    @property
    def reason(self) -> str:
        """The message without the lines to write, for who knows better ones."""
        return str(self).partition(_TEACH)[0].rstrip()


@dataclass(frozen=True)
class Lengths:
    """One length per sample of a data set."""

    # int64, at least 1 each; or rows of numbers, `[n, d]`, of which the first is at least 1
    values: LengthArray
    # "given", "attribute" (`dataset.lengths`), "column" (of a Hugging Face data set), "length_fn", or "samples"
    # (every sample was looked at)
    source: Source

    def __len__(self) -> int:
        return len(self.values)

    def of(self, indices: list[int]) -> list[Any]:
        """The lengths of some samples: numbers, or lists of them."""
        return self.values[indices].tolist()

    @cached_property
    def digest(self) -> str:
        """Short text that differs when a length does."""
        shape = b"" if self.values.ndim == 1 else repr(self.values.shape).encode()
        return hashlib.sha256(shape + self.values.astype("<i8").tobytes()).hexdigest()[:12]


def find_lengths(dataset: Any, lengths: Any = None, length_fn: LengthFunction | None = None) -> Lengths:
    """The length of every sample: as given, by ``length_fn``, as the data set knows it, or of every sample itself."""
    count = len(dataset)
    if lengths is not None:
        return Lengths(as_lengths(lengths, count=count), "given")
    # A `Subset` or `ConcatDataset` of data sets that know their lengths knows its own.
    known = _known(dataset) if length_fn is None else None
    if known is not None:
        return Lengths(as_lengths(known.values, f"the data set's {known.source}", count), known.source)
    if count == 0:
        return Lengths(np.empty(0, dtype=np.int64), "samples")
    source: Source = "samples" if length_fn is None else "length_fn"
    return Lengths(_scan(dataset, length_fn or measure), source)


def measure(sample: Any) -> int:
    """The length of a sample: of its ``"input_ids"``, of itself, or of the first item if it is a tuple."""
    first = sample[0] if isinstance(sample, tuple) and sample else sample
    length = _length(sample)
    if isinstance(first, Tensor | np.ndarray) and first.ndim == 2:
        is_floating = first.is_floating_point() if isinstance(first, Tensor) else first.dtype.kind == "f"
        length = len(first) if is_floating else length  # steps of a series, each with some numbers
    if length is not None:
        return length
    kind, length_fn = f"a {type(sample).__name__}", LengthsUnknownError.length_fn
    if isinstance(sample, Tensor | np.ndarray):
        kind = f"{type(sample).__name__} of shape {list(sample.shape)}"
    elif isinstance(sample, Mapping):
        kind = f"{type(sample).__name__} with keys {list(sample)[:10]}"
        key = next((name for name in sample if _length(sample[name]) is not None), "tokens")
        length_fn = f'lambda sample: len(sample["{key}"])'
    said = f"The length of a sample that is {kind} is not known. {_TEACH}{length_fn}, ...)"
    error = LengthsUnknownError(said)
    error.length_fn = length_fn
    raise error


def _length(sample: Any) -> int | None:
    if isinstance(sample, Mapping):
        ids: Any = sample.get("input_ids")
        # Tokenizers that return tensors put a batch dimension of one before the tokens.
        is_batch = isinstance(ids, Tensor | np.ndarray) and ids.ndim == 2 and len(ids) == 1
        return _length(ids[0] if is_batch else ids)
    if isinstance(sample, Tensor | np.ndarray):
        return len(sample) if sample.ndim == 1 else None
    if not isinstance(sample, Sequence) or isinstance(sample, str | bytes):
        return None
    if all(isinstance(item, Number) for item in (*sample[:1], *sample[-1:])):
        return len(sample)
    return _length(sample[0]) if isinstance(sample, tuple) else None


def plain(length: Any) -> Any:
    """A length as Python has numbers: what a tensor or array holds."""
    return length.tolist() if isinstance(length, Tensor | np.ndarray) else length


def check_longest(lengths: LengthArray, max_tokens: Any) -> None:
    """Refuse a sample that fits no microbatch."""
    if max_tokens is None or not len(lengths):
        return
    num_ranks = len(max_tokens) if isinstance(max_tokens, list) else 1
    check_caps(lengths, lengths, as_caps(max_tokens, num_ranks), num_ranks)


def _known(dataset: Any) -> Lengths | None:
    """What the data set says about its lengths without being looked through."""
    if isinstance(dataset, Subset):
        whole = _known(dataset.dataset)
        return None if whole is None else Lengths(whole.values[np.asarray(dataset.indices)], whole.source)
    if isinstance(dataset, ConcatDataset):
        parts = [_known(part) for part in dataset.datasets]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        if len({part.values.shape[1:] for part in found}) > 1:
            widths = [np.size(part.values[:1]) for part in found]
            raise ValueError(
                f"the parts of a ConcatDataset have lengths of {widths} numbers: say how long samples are, "
                'length_fn=lambda sample: (len(sample["input_ids"]), len(sample["patches"])).'
            )
        return Lengths(np.concatenate([part.values for part in found]), found[0].source)
    attribute = getattr(dataset, "lengths", None)
    if attribute is not None and not callable(attribute):
        return Lengths(as_lengths(attribute, "dataset.lengths", len(dataset)), "attribute")
    column = _column(dataset)
    return None if column is None else Lengths(column, "column")


def _column(dataset: Any) -> LengthArray | None:
    """Lengths from the columns of a Hugging Face data set, unless it transforms samples as they are read."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "with_format") or not len(dataset):
        return None
    if getattr(dataset, "format", {}).get("type") == "custom":
        return None
    if "input_ids" in names:
        if _length(dataset.with_format(None)[0]["input_ids"]) is None:
            return None
        # The Arrow form holds the lengths of its lists, so that no list is built.
        view, parts = dataset.with_format("arrow", columns=["input_ids"]), []
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            chunks = view[start : start + _ROWS_AT_ONCE]["input_ids"].chunks
            parts += [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        return as_lengths(np.concatenate(parts), "column 'input_ids'")
    name = next((name for name in ("length", "lengths") if name in names), None)
    if name is None:
        return None
    return as_lengths(dataset.with_format(None)[name][:], f"column {name!r}")


def _scan(dataset: Any, length_of: LengthFunction) -> LengthArray:
    """Look at every sample, with a progress bar if it takes more than a moment."""
    count, next_look, found = len(dataset), -math.inf, []
    with isolated_rng():
        for index in tqdm(range(count), desc="Lengths of samples", unit="sample", delay=2, leave=False):
            if time.monotonic() >= next_look:  # raise before the kernel ends this process
                next_look = time.monotonic() + _LOOK_EVERY_S
                short = host_memory.shortage(
                    f"the lengths of samples that are still to be looked at ({count - index} of {count})",
                    (count - index) * _BYTES_OF_A_LENGTH + _SPARE_BYTES,
                    "let the data set keep no samples that it has read, or say how long they are: "
                    "BalancedDataLoader(dataset, lengths=[12, 7, ...])",
                )
                if short:
                    raise MemoryError(short)
            found.append(plain(length_of(dataset[index])))
    return as_lengths(found, "the samples")


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
        if isinstance(value, Sequence | np.ndarray):
            parts = list(value)
        else:
            named = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            parts = [part for name in sorted(named, key=str) for part in (str(name), named[name])]
        for part in parts:
            yield from _pieces(part, depth - 1)
