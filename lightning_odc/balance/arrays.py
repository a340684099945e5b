"""Array types, lengths and caps: what users may write for them, and whether samples fit.

A sample may have a row of numbers instead of one length: text tokens and image patches, nodes and edges. The first
number is special: a padding collator pads it, and attention squares it (Note [Dense attention]). The sums of the other
numbers must only fit into a microbatch.

Example: at most 100 tokens and 8 patches in a microbatch. Samples ``(40, 8)`` and ``(30, 0)`` fit together: 70 tokens
and 8 patches. ``(40, 8)`` and ``(10, 1)`` do not: there are 9 patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lightning_odc.arguments import Count, Like

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Cap = int | tuple[int, ...]
"""The most tokens of a microbatch; or a cap for each number of a sample."""

Plan = list[list[list[int]]]
"""For each rank its microbatches in the order to run them, each a list of sample indices."""

State = dict[str, Any]
"""What is saved, by name: numbers, text, lists, and dicts of them."""

LENGTH_LIMIT = 2**40
"""Lengths are below it: far above any sample, and the sum of 8192 of them is still exact in float64."""

MOST_NUMBERS = 8
"""Numbers in the row of a sample: more of them are a mistake, for example the tokens themselves."""

_ROW_LINE = 'length_fn=lambda sample: (len(sample["input_ids"]), len(sample["patches"]))'


def floats(values: Any) -> Floats:
    """Values as an array of float64."""
    return np.asarray(values, dtype=np.float64)


def as_lengths(lengths: Any, name: str = "lengths", count: int | None = None) -> Ints:
    """Checked lengths as int64: numbers of tokens, ``[n]``, or a row of numbers for each sample, ``[n, d]``.

    There must be ``count`` of them, by default any number but none.
    """
    array = _numbers(lengths, name)
    if array.ndim not in (1, 2) or (count is None and not len(array)):
        raise ValueError(
            f"{name} must be one number per sample, or a row of numbers for each, with at least one sample, got shape "
            f"{list(array.shape)}: lengths=[812, 4096, 77]."
        )
    if count is not None and len(array) != count:
        raise ValueError(
            f"{name} has {len(array)} entries, but the data set has {count} samples: give one for each."
        )
    rows = columns(array).T
    numbers = rows.shape[1]
    if not 1 <= numbers <= MOST_NUMBERS:
        raise ValueError(
            f"{name} must be one number per sample, or a row of 2 to {MOST_NUMBERS}, and every row has {numbers} "
            f"numbers: {_ROW_LINE}."
        )
    least = np.arange(numbers) == 0  # the first number: 1; the others: 0
    is_whole = rows == np.floor(rows)  # NaN compares false
    good = (is_whole & (rows >= least) & (rows < LENGTH_LIMIT)).all(1)
    if not good.all():
        index = int(good.argmin())
        text = ", ".join(f"{number:g}" for number in rows[index])
        others = ""
        if numbers > 1:
            text = f"({text})"
            others = (
                "; in a row, only the numbers after the first may be 0, so put first what every sample has"
            )
        raise ValueError(
            f"{name}: sample {index} has length {text} ({np.sum(~good)} such samples in all). Lengths are whole "
            f"numbers of at least 1, below 2**40{others}; leave empty samples out: "
            "torch.utils.data.Subset(dataset, indices)."
        )
    if numbers == 1:
        rows = rows[:, 0]
    return rows.astype(np.int64)


def _numbers(lengths: Any, name: str) -> Floats:
    try:
        if np.asarray(lengths).dtype.kind in "bUS":  # numpy would make numbers of them
            raise TypeError("text and truth values are no numbers.")
        return floats(lengths)
    except (TypeError, ValueError, OverflowError) as error:
        why = f"lengths=[len(x) for x in samples]. {error}"
        if isinstance(lengths, list | tuple):
            widths = [len(np.atleast_1d(np.array(row, dtype=object))) for row in lengths]
            other = int(np.not_equal(widths, widths[0]).argmax())
            if other:
                why = f"sample 0 has {widths[0]}, and sample {other} has {widths[other]}: {_ROW_LINE}."
        raise ValueError(
            f"{name} must be one number per sample, or a row of as many for each: {why}"
        ) from None


def first_number(lengths: Ints) -> Ints:
    """``[n]`` of lengths ``[n]`` or ``[n, d]``: the tokens that are padded and attended to."""
    return columns(lengths)[0]


def columns(lengths: NDArray[Any]) -> NDArray[Any]:
    """``[d, n]``: each number of all samples, of lengths ``[n]`` or ``[n, d]``."""
    return np.atleast_2d(lengths.T)


def first_and_rest(lengths: Floats) -> tuple[Floats, Floats]:
    """``[n]`` first numbers, and ``[n]`` sums of the others; 0 if there are none."""
    first, *others = columns(lengths)
    return first, sum(others, np.zeros(len(first)))


Caps = Annotated[
    Count | tuple[Count, ...] | Sequence[Count] | Sequence[Sequence[Count]] | None,
    Like("8192, (8192, 64) with one for each number of a sample, or a list with one for each rank"),
]
"""Most tokens of a microbatch: a number for all ranks, or a list with one for each rank; by default the longest row.

For samples with a row of numbers, a tuple has one cap for each number: ``(4096, 512)`` on all ranks, or
``[(4096, 512), (2048, 256)]`` by rank.
"""
KnownCaps = Cap | list[Cap] | None


def as_caps(max_tokens: Any, num_ranks: int) -> KnownCaps:
    """``max_tokens`` as a number, a tuple with one per number of a sample, a list of those by rank, or None."""
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, Sequence | np.ndarray) or isinstance(max_tokens, tuple):
        return as_cap(max_tokens)
    caps = list(map(as_cap, max_tokens))
    if len(caps) != num_ranks:
        example = [*caps, *[8192] * num_ranks][:num_ranks]
        raise ValueError(
            f"max_tokens has {len(caps)} caps for {num_ranks} ranks: write one per rank, max_tokens={example}, "
            f"or one number for all, max_tokens={example[0]}. One cap for each number of a sample is a tuple: "
            "max_tokens=(4096, 512)."
        )
    widest = max(caps, key=np.size)
    if np.size(widest) > min(map(np.size, caps)):
        raise ValueError(
            f"max_tokens={caps} has another number of caps on one rank than on others: write one tuple per rank, "
            f"max_tokens={[widest] * num_ranks}."
        )
    return caps


def as_cap(cap: Any) -> Cap:
    """A number, or a tuple with one per number of a sample."""
    numbers = tuple(np.atleast_1d(cap).tolist())
    if not numbers:
        raise ValueError("max_tokens=() caps nothing: write max_tokens=8192, or None for the longest sample.")
    if len(numbers) == 1:
        return numbers[0]
    return numbers


def check_caps(lengths: Ints, rows: Ints, max_tokens: Any, num_ranks: int) -> Ints:
    """``[num_ranks, d]`` caps of a microbatch, for each number of a sample: ``max_tokens``, or the longest row."""
    numbers = columns(rows).T
    longest = np.maximum(numbers.max(0), 1)
    known = as_caps(max_tokens, num_ranks)
    caps = longest[None]
    if known is not None:
        ranks = len(known) if isinstance(known, list) else 1
        caps = np.array(known).reshape(ranks, -1)
    if caps.shape[1] != len(longest):
        _refuse_numbers(longest, caps[0].tolist(), known)
    fits = np.any([(numbers <= cap).all(1) for cap in np.unique(caps, axis=0)], axis=0)
    if not fits.all():
        _refuse_sample(lengths, numbers, caps, fits, known)
    return np.broadcast_to(caps, (num_ranks, len(longest)))


def _refuse_sample(lengths: Ints, numbers: Ints, caps: Ints, fits: Bools, known: KnownCaps) -> NoReturn:
    """Raise `ValueError` about a sample that fits nowhere, with caps that are enough for all on one rank."""
    index = int(np.where(fits, 0, numbers[:, 0]).argmax())
    own = numbers[index]
    has = str(tuple(own.tolist()))
    if len(own) == 1:
        has = f"{lengths[index]} tokens"
        if own > lengths[index]:
            has += f", padded to {own[0]}"
        elif own < lengths[index]:
            has += f", cut to {own[0]}"
    rank = int(caps[:, 0].argmax())
    enough = caps.copy()
    enough[rank] = np.maximum(caps[rank], numbers[~fits].max(0))
    line: Any = as_cap(enough[rank])
    where = ""
    if isinstance(known, list):
        line = list(map(as_cap, enough))
        where = " on every rank"
    raise ValueError(
        f"sample {index} has {has}, more than max_tokens={known}{where}, and samples are never split: write "
        f"max_tokens={line}, or shorten or leave out the longer samples."
    )


def _refuse_numbers(longest: Ints, cap: list[int], known: KnownCaps) -> NoReturn:
    """Raise `ValueError` about a cap, of one rank, that has another number of numbers than samples have."""
    numbers = len(longest)
    if numbers == 1:
        raise ValueError(
            f"max_tokens={known}: a tuple has one cap for each number of a sample, and samples have one length "
            f"here. Write max_tokens={cap[0]}; one cap for each rank is a list, max_tokens={cap}."
        )
    line: Any = (*cap, *longest.tolist()[len(cap) :])[:numbers]
    if isinstance(known, list):
        line = [line] * len(known)
    raise ValueError(
        f"samples have {numbers} numbers each, and max_tokens={known} caps {len(cap)}: write a tuple with one cap for "
        f"each number, max_tokens={line}."
    )
