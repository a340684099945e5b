"""Array types, lengths and the cap: what users may write for them, and whether samples fit."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from lightning_odc.arguments import Like

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Cap = Annotated[int, Like("8192 (one number for all ranks)", lambda value: value >= 1)] | None
"""The most tokens of a microbatch, on any rank; by default those of the longest row."""

Plan = list[list[list[int]]]
"""For each rank its microbatches in the order to run them, each a list of sample indices."""

State = dict[str, Any]
"""What is saved, by name: numbers, text, lists, and dicts of them."""

LENGTH_LIMIT = 2**40
"""Lengths are below it: far above any sample, and the sum of 8192 of them is still exact in float64."""


def floats(values: Any) -> Floats:
    """Values as an array of float64."""
    return np.asarray(values, dtype=np.float64)


def as_lengths(lengths: Any, name: str = "lengths", count: int | None = None) -> Ints:
    """Checked lengths as int64, ``[n]``. There must be ``count`` of them, by default any number but none."""
    array = _numbers(lengths, name)
    if count is None and not len(array):
        raise ValueError(f"{name} must have at least one sample: lengths=[812, 4096, 77].")
    if count is not None and len(array) != count:
        raise ValueError(
            f"{name} has {len(array)} entries, but the data set has {count} samples: give one for each."
        )
    is_whole = array == np.floor(array)  # NaN compares false
    good = is_whole & (array >= 1) & (array < LENGTH_LIMIT)
    if not good.all():
        index = int(good.argmin())
        raise ValueError(
            f"{name}: sample {index} has length {array[index]:g}. Lengths are whole numbers of at least 1, below "
            "2**40; leave empty samples out: torch.utils.data.Subset(dataset, indices)."
        )
    return array.astype(np.int64)


def _numbers(lengths: Any, name: str) -> Floats:
    """One number for each sample, ``[n]``."""
    try:
        if np.asarray(lengths).dtype.kind in "bUS":  # numpy would make numbers of them
            raise TypeError("Text and truth values are not numbers.")
        array = floats(lengths)
        if array.ndim != 1:
            raise ValueError(f"These have shape {list(array.shape)}.")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} must be one number per sample, as in lengths=[812, 4096, 77]: the tokens of its row. Patches that "
            'become tokens count, too: length_fn=lambda sample: len(sample["input_ids"]) + len(sample["patches"]). '
            f"{error}"
        ) from None
    return array


def as_cap(rows: Ints, max_tokens: int | None) -> int:
    """The most tokens of a microbatch: ``max_tokens``, or those of the longest row. Every row must fit alone."""
    index = int(rows.argmax())
    longest = int(rows[index])
    if max_tokens is None:
        return longest
    if longest > max_tokens:
        raise ValueError(
            f"the row of sample {index} has {longest} tokens, more than max_tokens={max_tokens}, and samples are never "
            f"split: write max_tokens={longest}, or shorten or leave out the longer samples."
        )
    return int(max_tokens)
