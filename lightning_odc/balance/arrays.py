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


def as_lengths(lengths: Any) -> Ints:
    """``lengths`` as a one-dimensional int64 array of positive numbers of tokens.

    Args:
        lengths: anything that numpy reads as an array of numbers, ``[n]``, in tokens.

    Raises:
        ValueError: not one-dimensional, empty, not whole numbers, or one that is not positive. The message names it.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"lengths must be one row of tokens per sample with at least one sample, got shape {list(array.shape)}: "
            "plan_minibatch([812, 4096, 77], num_ranks=2)."
        )
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"lengths must be numbers of tokens, got {array.dtype}: lengths=[len(x) for x in samples]."
        )
    good = (array >= 1) & (array < LENGTH_LIMIT) & (array == np.floor(array))  # NaN compares false
    if not good.all():
        index = int(np.argmin(good))
        raise ValueError(
            f"the length of sample {index} is {array[index]}; lengths are positive whole numbers of tokens, below "
            "2**40. Leave empty samples out of the data set."
        )
    return array.astype(np.int64)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an integer of at least ``least``.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}: {name}=8.")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that ``value`` is one of ``choices``.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; write one of {', '.join(map(repr, choices))}.")


def check_cap(lengths: Ints, max_tokens: int | None) -> int:
    """The token cap of a microbatch: ``max_tokens``, or the longest sample.

    Raises:
        ValueError: the cap is not a positive whole number, or a sample alone is above it.
    """
    longest = int(lengths.max())
    if max_tokens is None:
        return longest
    cap = check_count("max_tokens", max_tokens)
    if longest > cap:
        index = int(lengths.argmax())
        raise ValueError(
            f"sample {index} has {longest} tokens, more than max_tokens={cap}, and samples are never split: write "
            f"max_tokens={longest}, or shorten or leave out the longer samples."
        )
    return cap
