"""Names of the array types, and the checks that every entry of the planner shares."""

from __future__ import annotations

from collections.abc import Sequence
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


Caps = int | Sequence[int] | None
"""Most tokens of a microbatch: for all ranks, or one number per rank; by default the longest row."""


def as_caps(max_tokens: Any, num_ranks: int) -> int | tuple[int, ...] | None:
    """``max_tokens`` as a number, one number per rank, or None.

    Raises:
        ValueError: a cap is not a positive whole number, or there are not as many caps as ranks.
    """
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, Sequence | np.ndarray) or isinstance(max_tokens, str):
        return check_count("max_tokens", max_tokens)
    caps = tuple(check_count("max_tokens", cap) for cap in max_tokens)
    if len(caps) != num_ranks:
        example = ((caps or (8192,)) * num_ranks)[:num_ranks]
        raise ValueError(
            f"max_tokens has {len(caps)} caps for {num_ranks} ranks: write one per rank, max_tokens={list(example)}, "
            f"or one number for all, max_tokens={example[0]}."
        )
    return caps


def check_caps(lengths: Ints, rows: Ints, max_tokens: int | tuple[int, ...] | None, num_ranks: int) -> Ints:
    """``[num_ranks]`` token caps of a microbatch: ``max_tokens``, or the longest row.

    Args:
        lengths: ``[n]`` tokens of the samples.
        rows: ``[n]`` tokens that each sample has alone in its microbatch.
        max_tokens: what `as_caps` returns.
        num_ranks: the number of ranks.

    Raises:
        ValueError: a sample alone is above the largest cap.
    """
    longest = int(rows.max())
    caps = np.broadcast_to(np.asarray(longest if max_tokens is None else max_tokens), (num_ranks,))
    if longest > caps.max():
        raise ValueError(_does_not_fit(lengths, rows, max_tokens))
    return caps


def _does_not_fit(lengths: Ints, rows: Ints, max_tokens: Any) -> str:
    index = int(rows.argmax())
    length, longest = int(lengths[index]), int(rows[index])
    padded = "" if length == longest else f", {'padded' if length < longest else 'cut'} to {longest}"
    if not isinstance(max_tokens, tuple):
        limit, line = f"max_tokens={max_tokens}", f"max_tokens={longest}"
    else:
        largest, caps = max(max_tokens), list(max_tokens)
        limit = f"{largest}, the largest cap of max_tokens={caps}"
        line = f"max_tokens={[longest if cap == largest else cap for cap in caps]}"
    return (
        f"sample {index} has {length} tokens{padded}, more than {limit}, and samples are never split: write {line}, "
        "or shorten or leave out the longer samples."
    )
