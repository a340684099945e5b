"""Array types, lengths and caps: what users may write for them, and whether samples fit.

A sample may have a row of numbers instead of one length: text tokens and image patches, nodes and edges. The first
number is special: a padding collator pads it, and attention squares it (Note [Dense attention]). The sums of the other
numbers must only fit into a microbatch.

Example: at most 100 tokens and 8 patches in a microbatch. Samples ``(40, 8)`` and ``(30, 0)`` fit together: 70 tokens
and 8 patches. ``(40, 8)`` and ``(10, 1)`` do not: there are 9 patches.
"""

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


MOST_NUMBERS = 8
"""Numbers in the row of a sample: more of them are a mistake, for example the tokens themselves."""

_ROW_LINE = 'length_fn=lambda sample: (len(sample["input_ids"]), len(sample["patches"]))'


def as_lengths(lengths: Any) -> Ints:
    """Checked ``lengths`` as int64: numbers of tokens, ``[n]``, or a row of numbers for each sample, ``[n, d]``."""
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
    """What numpy makes of lengths; rows of one number become numbers. Raises `ValueError` for rows of other widths."""
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
    """``value`` as an integer, or a `ValueError` if it is not one of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}: {name}=8.")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` if ``value`` is not one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; write one of {', '.join(map(repr, choices))}.")


def first_number(lengths: Ints) -> Ints:
    """``[n]`` of lengths ``[n]`` or ``[n, d]``: the tokens that are padded and attended to."""
    return lengths if lengths.ndim == 1 else lengths[:, 0]


def first_and_rest(lengths: Floats) -> tuple[Floats, Floats | float]:
    """``[n]`` first numbers, and ``[n]`` sums of the others; 0 if there are none."""
    return (lengths, 0.0) if lengths.ndim == 1 else (lengths[:, 0], lengths[:, 1:].sum(1))


Caps = int | Sequence[int] | Sequence[tuple[int, ...]] | None
"""Most tokens of a microbatch: a number for all ranks, or a list with one for each rank; by default the longest row.

For samples with a row of numbers, a tuple has one cap for each number: ``(4096, 512)`` on all ranks, or
``[(4096, 512), (2048, 256)]`` by rank.
"""
KnownCaps = int | tuple[int, ...] | list[int] | list[tuple[int, ...]] | None


def as_caps(max_tokens: Any, num_ranks: int) -> KnownCaps:
    """``max_tokens`` as a number, a tuple with one per number of a sample, a list of those by rank, or None."""
    if max_tokens is None:
        return None
    is_by_rank = isinstance(max_tokens, Sequence | np.ndarray) and not isinstance(max_tokens, str | tuple)
    if not is_by_rank:
        return _as_cap(max_tokens)
    caps: Any = [_as_cap(tuple(cap) if width(cap) else cap) for cap in max_tokens]
    if len(caps) != num_ranks:
        example = ((caps or [8192]) * num_ranks)[:num_ranks]
        raise ValueError(
            f"max_tokens has {len(caps)} caps for {num_ranks} ranks: write one per rank, max_tokens={list(example)}, "
            f"or one number for all, max_tokens={example[0]}. One cap for each number of a sample is a tuple: "
            "max_tokens=(4096, 512)."
        )
    if len({width(cap) for cap in caps}) > 1:
        widest = max(caps, key=width)
        raise ValueError(
            f"max_tokens={caps} has another number of caps on one rank than on others: write one tuple per rank, "
            f"max_tokens={[widest] * num_ranks}."
        )
    return caps


def _as_cap(cap: Any) -> int | tuple[int, ...]:
    if not isinstance(cap, tuple):
        return check_count("max_tokens", cap)
    if not cap:
        raise ValueError("max_tokens=() caps nothing: write max_tokens=8192, or None for the longest sample.")
    numbers = tuple(check_count("max_tokens", number) for number in cap)
    return numbers if len(numbers) > 1 else numbers[0]


def check_caps(lengths: Ints, rows: Ints, max_tokens: KnownCaps, num_ranks: int) -> Ints:
    """``[num_ranks]`` caps of a microbatch: ``max_tokens``, or the longest row; of numbers ``[num_ranks, d]``."""
    longest = np.maximum(rows.max(0), 1)
    _check_numbers(longest, max_tokens)
    caps = np.asarray(longest if max_tokens is None else max_tokens)
    caps = np.broadcast_to(caps, (num_ranks, *longest.shape))
    if rows.ndim == 1 and longest > caps.max():
        raise ValueError(_does_not_fit(lengths, rows, max_tokens))
    if rows.ndim == 2:
        fits = np.any([(rows <= cap).all(1) for cap in np.unique(caps, axis=0)], axis=0)
        if not fits.all():
            raise ValueError(_row_does_not_fit(rows, int(np.argmin(fits)), max_tokens))
    return caps


def _check_numbers(longest: Ints, max_tokens: KnownCaps) -> None:
    """Refuse caps of another number of numbers than samples have; ``longest`` is ``[]`` or ``[d]``."""
    if max_tokens is None:
        return
    cap = max_tokens[0] if isinstance(max_tokens, list) else max_tokens
    numbers, caps = longest.size, max(width(cap), 1)
    if numbers == caps:
        return
    if numbers == 1:
        assert isinstance(cap, tuple)
        raise ValueError(
            f"max_tokens={max_tokens}: a tuple has one cap for each number of a sample, and samples have one length "
            f"here. Write max_tokens={cap[0]}; one cap for each rank is a list, max_tokens={list(cap)}."
        )
    known = cap if isinstance(cap, tuple) else (cap,)
    whole = (*known, *longest.tolist()[caps:])[:numbers]
    line = whole if not isinstance(max_tokens, list) else [whole] * len(max_tokens)
    raise ValueError(
        f"samples have {numbers} numbers each, and max_tokens={max_tokens} caps {caps}: write a tuple with one cap for "
        f"each number, max_tokens={line}."
    )


def _row_does_not_fit(rows: Ints, index: int, max_tokens: Any) -> str:
    own, caps = rows[index], np.atleast_2d(np.asarray(max_tokens))
    rank = int(np.argmax((own <= caps).sum(1)))
    enough = [tuple(cap) for cap in caps.tolist()]
    enough[rank] = tuple(np.maximum(own, caps[rank]).tolist())
    return (
        f"sample {index} has {tuple(own.tolist())}, more than max_tokens={max_tokens} on every rank, and samples are "
        f"never split: write max_tokens={enough if isinstance(max_tokens, list) else enough[0]}, or shorten or leave "
        "out the larger samples."
    )


def _does_not_fit(lengths: Ints, rows: Ints, max_tokens: Any) -> str:
    index = int(rows.argmax())
    length, longest = int(lengths[index]), int(rows[index])
    padded = "" if length == longest else f", {'padded' if length < longest else 'cut'} to {longest}"
    if not isinstance(max_tokens, list):
        limit, line = f"max_tokens={max_tokens}", f"max_tokens={longest}"
    else:
        largest, caps = max(max_tokens), max_tokens
        limit = f"{largest}, the largest cap of max_tokens={caps}"
        line = f"max_tokens={[longest if cap == largest else cap for cap in caps]}"
    return (
        f"sample {index} has {length} tokens{padded}, more than {limit}, and samples are never split: write {line}, "
        "or shorten or leave out the longer samples."
    )
