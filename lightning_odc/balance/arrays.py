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


def as_lengths(lengths: Any, name: str = "lengths", count: int | None = None) -> Ints:
    """Checked lengths as int64: numbers of tokens, ``[n]``, or a row of numbers for each sample, ``[n, d]``.

    There must be ``count`` of them, by default any number but none.
    """
    try:
        if np.asarray(lengths).dtype.kind in "bUS":  # numpy would make numbers of them
            raise TypeError("text and truth values are no numbers.")
        array = np.asarray(lengths, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        widths = [width(row) or 1 for row in lengths] if width(lengths) else []
        other = next((index for index, own in enumerate(widths) if own != widths[0]), None)
        why = f"lengths=[len(x) for x in samples]. {error}"
        if other is not None:
            why = f"sample 0 has {widths[0]}, and sample {other} has {widths[other]}: {_ROW_LINE}."
        raise ValueError(
            f"{name} must be one number per sample, or a row of as many for each: {why}"
        ) from None
    if array.ndim not in (1, 2) or (count is None and not len(array)):
        raise ValueError(
            f"{name} must be one number per sample, or a row of numbers for each, with at least one sample, got shape "
            f"{list(array.shape)}: lengths=[812, 4096, 77]."
        )
    if count is not None and len(array) != count:
        raise ValueError(
            f"{name} has {len(array)} entries, but the data set has {count} samples: give one for each."
        )
    rows = array if array.ndim == 2 else array[:, None]
    if not 1 <= rows.shape[1] <= MOST_NUMBERS:
        raise ValueError(
            f"{name} must be one number per sample, or a row of 2 to {MOST_NUMBERS}, and every row has "
            f"{rows.shape[1]} numbers: {_ROW_LINE}."
        )
    least = np.arange(rows.shape[1]) == 0  # the first number: 1; the others: 0
    good = ((rows >= least) & (rows < LENGTH_LIMIT) & (rows == np.floor(rows))).all(1)  # NaN compares false
    if not good.all():
        index = int(good.argmin())
        own, others = ", ".join(f"{number:g}" for number in rows[index]), ""
        if rows.shape[1] > 1:
            own = f"({own})"
            others = (
                "; in a row, only the numbers after the first may be 0, so put first what every sample has"
            )
        raise ValueError(
            f"{name}: sample {index} has length {own} ({int((~good).sum())} such samples in all). Lengths are whole "
            f"numbers of at least 1, below 2**40{others}; leave empty samples out: "
            "torch.utils.data.Subset(dataset, indices)."
        )
    return (rows if rows.shape[1] > 1 else rows[:, 0]).astype(np.int64)


def width(row: Any) -> int:
    """How many numbers a row has; 0 for a number."""
    return len(row) if isinstance(row, list | tuple) or bool(getattr(row, "shape", ())) else 0


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
    numbers, by_rank = rows.reshape(len(rows), -1), caps.reshape(num_ranks, -1)
    is_by_rank = isinstance(max_tokens, list)
    distinct = np.unique(by_rank, axis=0) if is_by_rank else by_rank[:1]
    fits = np.any([(numbers <= cap).all(1) for cap in distinct], axis=0)
    if fits.all():
        return caps
    index = int(np.where(fits, 0, numbers[:, 0]).argmax())
    own = rows[index].tolist()
    has = f"{lengths[index]} tokens" if rows.ndim == 1 else tuple(own)
    if rows.ndim == 1 and own != lengths[index]:
        has = f"{has}, {'padded' if own > lengths[index] else 'cut'} to {own}"
    enough, fitting = by_rank.copy(), (numbers[index] <= by_rank).sum(1)
    rank = int(np.lexsort((-by_rank[:, 0], -fitting))[0])  # where most fits, the largest cap
    enough[rank] = np.maximum(enough[rank], numbers[~fits].max(0))
    line = [cap[0] if rows.ndim == 1 else tuple(cap) for cap in enough.tolist()]
    raise ValueError(
        f"sample {index} has {has}, more than max_tokens={max_tokens}{' on every rank' * is_by_rank}, and samples are "
        f"never split: write max_tokens={line if is_by_rank else line[rank]}, or shorten or leave out the longer "
        "samples."
    )


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
