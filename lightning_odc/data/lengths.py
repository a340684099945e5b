"""How long every sample is: where lengths come from, and what they must be like."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Annotated, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lightning_odc.arguments import Like
from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.data.content import spread
from lightning_odc.data.probe import Collate, seen, shapes_of
from lightning_odc.data.rng import isolated_rng
from lightning_odc.data.shapes import ShownLength, sequences_in
from lightning_odc.progress import progress

LengthFunction = Annotated[Callable[[Any], int], Like('lambda sample: len(sample["input_ids"])')]
"""The length of a sample."""

_LOOKED_AT = 16  # samples that show in which dimensions others may differ
_ROWS_AT_ONCE = 1000
EQUALLY_LONG = ShownLength((), None)
"""Measures samples of which equally large batches are made."""
EXAMPLE = 'lambda sample: len(sample["text"])'
"""A function for samples without a length of their own."""
_TEACH = (
    "Say how long the samples are:\n"
    "    BalancedDataLoader(dataset, lengths=[12, 7, ...], ...)    # or `dataset.lengths = [12, 7, ...]`\n"
    f"    BalancedDataLoader(dataset, length_fn={EXAMPLE}, ...)"
)


class LengthsUnknownError(ValueError):
    """The lengths of the samples are unknown, so they cannot be balanced."""

    @property
    def reason(self) -> str:
        """The message without the lines to write, for who knows better ones."""
        return str(self).partition(_TEACH)[0].rstrip()


@dataclass(frozen=True)
class Lengths:
    """One length per sample of a data set."""

    values: Ints  # at least 1 each
    # what has measured the samples, if it may be done again at any time
    length_of: LengthFunction | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def digest(self) -> str:
        """Short text that differs when a length does."""
        content = self.values.astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()[:12]


def find_lengths(
    dataset: Any,
    lengths: Any = None,
    length_fn: LengthFunction | None = None,
    collate_fn: Collate = list,
) -> Lengths:
    """The length of every sample: as given, by ``length_fn``, as the data set knows it, or of every sample itself.

    See `length_function` for the last of these.
    """
    count = len(dataset)
    if lengths is not None:
        return Lengths(as_lengths(lengths, count=count))
    if length_fn is None:
        known = _known(dataset)
        if known is not None:
            return Lengths(known)
    if count == 0:
        return Lengths(np.empty(0, dtype=np.int64))
    if length_fn is not None:
        return Lengths(_scan(dataset, length_fn))
    with isolated_rng():
        length_of = length_function(dataset.__getitem__, count, collate_fn)
    if length_of == EQUALLY_LONG:
        return Lengths(np.ones(count, dtype=np.int64))
    if isinstance(length_of, ShownLength) and length_of.collate_fn is not None:
        return Lengths(_scan_collated(dataset, length_of))
    return Lengths(_scan(dataset, length_of), length_of)


def length_function(read: Callable[[int], Any], count: int, collate_fn: Collate) -> LengthFunction:
    """What measures samples: their own form; else the one of a batch of each, in the dimensions that differ.

    Args:
        read: Reads the sample at a position.
        count: The number of samples.
        collate_fn: Makes a batch of a list of samples.

    Returns:
        `measure`, or a `ShownLength`. Several sequences of unequal sizes are added.
    """
    samples = [read(place) for place in spread(count, _LOOKED_AT)]
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


def measure(sample: Any) -> int:
    """The length of a sample: of its ``"input_ids"``, of itself, or of the first item if it is a tuple.

    ``None``, which a ``collate_fn`` leaves out, has 1.
    """
    if sample is None:
        return 1
    length = _length(sample)
    if length is not None:
        return length
    kind = f"a {type(sample).__name__}"
    if isinstance(sample, Mapping):
        kind += f" with keys {list(sample.keys())[:10]}"
    raise LengthsUnknownError(f"The length of a sample that is {kind} is not known. {_TEACH}")


def _length(sample: Any) -> int | None:
    if isinstance(sample, Mapping):
        ids: Any = sample.get("input_ids")
        # Tokenizers that return tensors put a batch dimension of one before the tokens.
        if isinstance(ids, Tensor | np.ndarray) and ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        return _length(ids)
    if isinstance(sample, Tensor | np.ndarray):
        # A table of numbers that are no tokens is a series: steps, each with some numbers.
        is_series = sample.ndim == 2 and "float" in str(sample.dtype)
        return len(sample) if sample.ndim == 1 or is_series else None
    if not isinstance(sample, Sequence) or isinstance(sample, str | bytes):
        return None
    ends = (*sample[:1], *sample[-1:])
    if all(isinstance(item, Number) for item in ends):
        return len(sample)
    if isinstance(sample, tuple):
        return _length(sample[0])
    return None


def _known(dataset: Any) -> Ints | None:
    """What the data set says about its lengths without being looked through."""
    if isinstance(dataset, Subset):
        whole = _known(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    attribute = getattr(dataset, "lengths", None)
    if attribute is not None and not callable(attribute):
        return as_lengths(attribute, "dataset.lengths", len(dataset))
    return _column(dataset)


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
        looked_at = spread(len(dataset), _LOOKED_AT)
        own = ShownLength(sequences_in([shapes_of(dataset[place]) for place in looked_at]), None)
        if not own.sequences or differs(looked_at):
            return _scan(dataset, collated)
        values = _scan(dataset, own)
        if differs(values.argsort(kind="stable")[-_LOOKED_AT:].tolist()):  # the longest ones may be cut off
            return _scan(dataset, collated)
    return values


def _scan(dataset: Any, length_of: LengthFunction) -> Ints:
    """Look at every sample, with a progress bar if it takes more than a moment."""
    with isolated_rng():
        places = progress(range(len(dataset)), "Lengths of samples", "sample")
        found = [length_of(dataset[place]) for place in places]
    return as_lengths(found, "the samples")
