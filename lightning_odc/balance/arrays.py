"""Names of the array types, and the checks that every entry of the planner shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Plan = list[list[list[int]]]
"""For each rank its microbatches in the order to run them, each a list of sample indices."""

LENGTH_LIMIT = 2**40
"""Lengths are below it: far above any sample, and the sum of 8192 of them is still exact in float64."""


MOST_NUMBERS = 8
"""Numbers in the row of a sample: more of them are a mistake, for example the tokens themselves."""

_ROW_LINE = 'length_fn=lambda sample: (len(sample["input_ids"]), len(sample["patches"]))'


def as_lengths(lengths: Any) -> Ints:
    """``lengths`` as an int64 array: one number of tokens per sample, ``[n]``, or a row of numbers, ``[n, d]``.

    Args:
        lengths: anything that numpy reads as an array of numbers, ``[n]`` in tokens; or ``[n, d]``, of which the first
            number is positive and the others are not negative.

    Raises:
        ValueError: another shape, empty, not whole numbers, or one that is too small. The message names it.
    """
    array = as_table(lengths, "lengths")
    if array.ndim not in (1, 2) or not array.size:
        raise ValueError(
            f"lengths must be one row of tokens per sample with at least one sample, got shape {list(array.shape)}: "
            "plan_minibatch([812, 4096, 77], num_ranks=2)."
        )
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"lengths must be numbers of tokens, got {array.dtype}: lengths=[len(x) for x in samples]."
        )
    good = are_lengths(array)
    if not good.all():
        index = int(np.argmin(good))
        raise ValueError(
            f"the length of sample {index} is {array[index]}; lengths are positive whole numbers of tokens, below "
            f"2**40{among_others(array)}. Leave empty samples out of the data set."
        )
    return array.astype(np.int64)


def as_table(lengths: Any, name: str, dtype: Any = None) -> npt.NDArray[Any]:
    """What numpy makes of lengths; rows of one number become numbers.

    Raises:
        ValueError: rows of unequal width, empty ones, or ones with more than 8 numbers. The message names a sample.
    """
    try:
        array = np.asarray(lengths, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        widths = [width(row) for row in lengths] if width(lengths) else []
        other = next((index for index, width in enumerate(widths) if width != widths[0]), None)
        if other is None:
            raise
        raise ValueError(
            f"{name} must be one number per sample, or one row of as many numbers for each: sample 0 has "
            f"{widths[0] or 1}, and sample {other} has {widths[other] or 1}: {_ROW_LINE}."
        ) from None
    if array.ndim == 2 and len(array) and not 1 <= array.shape[1] <= MOST_NUMBERS:
        raise ValueError(
            f"{name} must be one number per sample, or a row of 2 to {MOST_NUMBERS}, and every row has "
            f"{array.shape[1]} numbers: {_ROW_LINE}."
        )
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def width(row: Any) -> int:
    """How many numbers a row has; 0 for a number."""
    return len(row) if isinstance(row, list | tuple) or bool(getattr(row, "shape", ())) else 0


def are_lengths(array: npt.NDArray[Any]) -> Bools:
    """``[n]``: which samples of ``[n]`` or ``[n, d]`` have lengths that are allowed."""
    least = np.arange(array[0].size) == 0 if array.ndim == 2 else True  # the first number: 1; the others: 0
    good = (array >= least) & (array < LENGTH_LIMIT) & (array == np.floor(array))  # NaN compares false
    return good if array.ndim == 1 else good.all(1)


def among_others(array: npt.NDArray[Any]) -> str:
    """What else messages say of rows of numbers."""
    if array.ndim == 1:
        return ""
    return "; in a row, only the numbers after the first may be 0, so put first what every sample has"


def check_count(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an integer of at least ``least``.

    Raises:
        ValueError: it is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}: {name}=8.")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that ``value`` is one of ``choices``.

    Raises:
        ValueError: it is not one of them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; write one of {', '.join(map(repr, choices))}.")
