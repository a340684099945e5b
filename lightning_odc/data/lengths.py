"""How long every sample is: where lengths come from, and what they must be like."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Annotated, Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_odc import host_memory
from lightning_odc.arguments import Like
from lightning_odc.balance.arrays import Ints, as_cap, as_lengths
from lightning_odc.data.probe import seen, shapes_of
from lightning_odc.data.rng import isolated_rng
from lightning_odc.data.shapes import ShownLength, sequences_in
from lightning_odc.progress import progress

LengthFunction = Annotated[Callable[[Any], int], Like('lambda sample: len(sample["input_ids"])')]
"""The length of a sample."""
Source = Literal["given", "attribute", "column", "length_fn", "samples", "collated"]

_LOOKED_AT = 16  # samples that show in which dimensions others may differ
_ROWS_AT_ONCE = 1000
_BYTES_OF_A_LENGTH = 64  # a number of Python in a list, and its places in two arrays
_SPARE_BYTES = 64 * 2**20  # for a sample, and for what else runs
_LOOK_EVERY_S = 1.0
EQUALLY_LONG = ShownLength((), None)
"""Measures samples of which equally large batches are made."""
_TEACH = (
    "Say how long the samples are:\n"
    "    BalancedDataLoader(dataset, lengths=[12, 7, ...], ...)    # or `dataset.lengths = [12, 7, ...]`\n"
    "    BalancedDataLoader(dataset, length_fn="
)


class LengthsUnknownError(ValueError):
    """The lengths of the samples are unknown, so they cannot be balanced."""

    length_fn = "lambda sample: ..."
    """The function to write, with a part of the sample that has a length, if there is one."""

    @property
    def reason(self) -> str:
        """The message without the lines to write, for who knows better ones."""
        return str(self).partition(_TEACH)[0].rstrip()


@dataclass(frozen=True)
class Lengths:
    """One length per sample of a data set."""

    values: Ints  # at least 1 each
    # "given", "attribute" (`dataset.lengths`), "column" (of a Hugging Face data set), "length_fn", "samples" (every
    # sample was looked at), or "collated" (the same, alone in a batch)
    source: Source
    # what has measured the samples, if it may be done again at any time
    length_of: LengthFunction | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.values)

    def of(self, indices: list[int]) -> list[int]:
        """The lengths of some samples."""
        return self.values[indices].tolist()

    @cached_property
    def digest(self) -> str:
        """Short text that differs when a length does."""
        content = self.values.astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()[:12]


def find_lengths(
    dataset: Any,
    lengths: Any = None,
    length_fn: LengthFunction | None = None,
    collate_fn: Callable[[list[Any]], Any] = list,
) -> Lengths:
    """The length of every sample: as given, by ``length_fn``, as the data set knows it, or of every sample itself.

    See `length_function` for the last of these.
    """
    count = len(dataset)
    if lengths is not None:
        return Lengths(as_lengths(lengths, count=count), "given")
    if length_fn is None:
        # A `Subset` or `ConcatDataset` of data sets that know their lengths knows its own.
        known = _known(dataset)
        if known is not None:
            return Lengths(as_lengths(known.values, f"the data set's {known.source}", count), known.source)
    if count == 0:
        return Lengths(np.empty(0, dtype=np.int64), "samples")
    if length_fn is not None:
        return Lengths(_scan(dataset, length_fn), "length_fn")
    with isolated_rng():
        length_of = length_function(dataset.__getitem__, count, collate_fn)
    if length_of == EQUALLY_LONG:
        return Lengths(np.ones(count, dtype=np.int64), "collated")
    if isinstance(length_of, ShownLength) and length_of.collate_fn is not None:
        return Lengths(_scan_collated(dataset, length_of), "collated")
    return Lengths(_scan(dataset, length_of), "samples", length_of)


def length_function(
    read: Callable[[int], Any], count: int, collate_fn: Callable[[list[Any]], Any]
) -> LengthFunction:
    """What measures samples: their own form; else the one of a batch of each, in the dimensions that differ.

    Args:
        read: Reads the sample at a position.
        count: The number of samples.
        collate_fn: Makes a batch of a list of samples.

    Returns:
        `measure`, or a `ShownLength`. Several sequences of unequal sizes are added.
    """
    samples = [read(place) for place in _looked_at(count)]
    with suppress(LengthsUnknownError):
        for sample in samples:
            measure(sample)
        if isinstance(samples[0], tuple):
            sequences = sequences_in(list(map(shapes_of, samples)))
            if len(sequences) > 1:
                return ShownLength(sequences, None)
        return measure
    batches = [seen(collate_fn, [sample]) for sample in samples]
    sequences = sequences_in([batch.shapes for batch in batches])
    if sequences:
        return ShownLength(sequences, collate_fn)
    if batches[0].shows_all:
        return EQUALLY_LONG
    return measure


def _looked_at(count: int) -> list[int]:
    return np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int).tolist()


def measure(sample: Any) -> int:
    """The length of a sample: of its ``"input_ids"``, of itself, or of the first item if it is a tuple.

    ``None``, which a ``collate_fn`` leaves out, has 1.
    """
    if sample is None:
        return 1
    first = sample[0] if isinstance(sample, tuple) and sample else sample
    if _is_series(first):
        return len(first)
    length = _length(sample)
    if length is not None:
        return length
    kind = f"a {type(sample).__name__}"
    if isinstance(sample, Tensor | np.ndarray):
        kind = f"{type(sample).__name__} of shape {list(sample.shape)}"
    elif isinstance(sample, Mapping):
        kind = f"{type(sample).__name__} with keys {list(sample.keys())[:10]}"
    length_fn = f"lambda sample: {_length_in_words(sample)}"
    said = f"The length of a sample that is {kind} is not known. {_TEACH}{length_fn}, ...)"
    error = LengthsUnknownError(said)
    error.length_fn = length_fn
    raise error


def _length_in_words(sample: Any) -> str:
    """The line that gives a length: of the sample, or of the part of it that most looks like a sequence."""
    parts: dict[str, Any] = {"sample": sample}
    if isinstance(sample, Mapping):
        parts = {f"sample[{key!r}]".replace("'", '"'): value for key, value in sample.items()}
    elif isinstance(sample, tuple):
        parts = {f"sample[{place}]": value for place, value in enumerate(sample)}
    known = [name for name, part in parts.items() if _length(part) is not None]
    sized = [name for name, part in parts.items() if _has_length(part)]
    for name in known + sized:
        return f"len({name})"
    return "..."


def _has_length(value: Any) -> bool:
    try:
        return len(value) > 0
    except TypeError:
        return False


def _is_series(value: Any) -> bool:
    """Whether it is a table of numbers that are no tokens: steps of a series, each with some numbers."""
    if isinstance(value, Tensor):
        return value.ndim == 2 and value.is_floating_point()
    return isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind == "f"


def _length(sample: Any) -> int | None:
    if isinstance(sample, Mapping):
        ids: Any = sample.get("input_ids")
        # Tokenizers that return tensors put a batch dimension of one before the tokens.
        if isinstance(ids, Tensor | np.ndarray) and ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        return _length(ids)
    if isinstance(sample, Tensor | np.ndarray):
        return len(sample) if sample.ndim == 1 else None
    if not isinstance(sample, Sequence) or isinstance(sample, str | bytes):
        return None
    ends = (*sample[:1], *sample[-1:])
    if all(isinstance(item, Number) for item in ends):
        return len(sample)
    if isinstance(sample, tuple):
        return _length(sample[0])
    return None


def plain(length: Any) -> Any:
    """A length as Python has numbers: what a tensor or array holds."""
    if isinstance(length, Tensor | np.ndarray):
        return length.tolist()
    return length


def check_longest(lengths: Ints, max_tokens: int | None) -> None:
    """Refuse a sample that fits no microbatch."""
    if len(lengths):
        as_cap(lengths, lengths, max_tokens)


def _known(dataset: Any) -> Lengths | None:
    """What the data set says about its lengths without being looked through."""
    if isinstance(dataset, Subset):
        whole = _known(dataset.dataset)
        if whole is None:
            return None
        return Lengths(whole.values[np.asarray(dataset.indices)], whole.source)
    if isinstance(dataset, ConcatDataset):
        parts = [_known(part) for part in dataset.datasets]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        return Lengths(np.concatenate([part.values for part in found]), found[0].source)
    attribute = getattr(dataset, "lengths", None)
    if attribute is not None and not callable(attribute):
        return Lengths(as_lengths(attribute, "dataset.lengths", len(dataset)), "attribute")
    column = _column(dataset)
    if column is None:
        return None
    return Lengths(column, "column")


def _column(dataset: Any) -> Ints | None:
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
        view = dataset.with_format("arrow", columns=["input_ids"])
        parts = []
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            chunks = view[start : start + _ROWS_AT_ONCE]["input_ids"].chunks
            parts += [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        return as_lengths(np.concatenate(parts), "column 'input_ids'")
    for name in ("length", "lengths"):
        if name in names:
            return as_lengths(dataset.with_format(None)[name][:], f"column {name!r}")
    return None


def _scan_collated(dataset: Any, collated: ShownLength) -> Ints:
    """What ``collated`` measures: by the samples' own shapes if these say the same, since batches take much longer."""

    def differs(places: Iterable[int]) -> bool:
        return any(own(dataset[place]) != collated(dataset[place]) for place in places)

    with isolated_rng():
        looked_at = _looked_at(len(dataset))
        own = ShownLength(sequences_in([shapes_of(dataset[place]) for place in looked_at]), None)
        if not own.sequences or differs(looked_at):
            return _scan(dataset, collated)
        values = _scan(dataset, own)
        if differs(values.argsort(kind="stable")[-_LOOKED_AT:].tolist()):  # the longest ones may be cut off
            return _scan(dataset, collated)
    return values


def _scan(dataset: Any, length_of: LengthFunction) -> Ints:
    """Look at every sample, with a progress bar if it takes more than a moment."""
    count = len(dataset)
    next_look = -math.inf
    found = []
    with isolated_rng():
        for index in progress(range(count), "Lengths of samples", "sample"):
            if time.monotonic() >= next_look:  # raise before the kernel ends this process
                next_look = time.monotonic() + _LOOK_EVERY_S
                left = count - index
                short = host_memory.shortage(
                    f"the lengths of samples that are still to be looked at ({left} of {count})",
                    left * _BYTES_OF_A_LENGTH + _SPARE_BYTES,
                    "let the data set keep no samples that it has read, or say how long they are: "
                    "BalancedDataLoader(dataset, lengths=[12, 7, ...])",
                )
                if short:
                    raise MemoryError(short)
            found.append(plain(length_of(dataset[index])))
    return as_lengths(found, "the samples")
