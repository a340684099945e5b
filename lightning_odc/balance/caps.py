"""Caps of a microbatch: what users may write for ``max_tokens``, and whether samples fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, check_count, width

Caps = int | Sequence[int] | Sequence[tuple[int, ...]] | None
"""Most tokens of a microbatch: a number for all ranks, or a list with one for each rank; by default the longest row.

For samples with a row of numbers, a tuple has one cap for each number: ``(4096, 512)`` on all ranks, or
``[(4096, 512), (2048, 256)]`` by rank.
"""
KnownCaps = int | tuple[int, ...] | list[int] | list[tuple[int, ...]] | None


def as_caps(max_tokens: Any, num_ranks: int) -> KnownCaps:
    """``max_tokens`` as a number, a tuple with one per number of a sample, a list of either with one per rank, or None.

    Raises:
        ValueError: a cap is not a positive whole number, or there are not as many caps as ranks.
    """
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
    """``[num_ranks]`` token caps of a microbatch: ``max_tokens``, or the longest row. Of numbers, ``[num_ranks, d]``.

    Args:
        lengths: ``[n]`` tokens of the samples, or ``[n, d]`` numbers.
        rows: the same shape, what each sample has alone in its microbatch.
        max_tokens: what `as_caps` returns.
        num_ranks: the number of ranks.

    Raises:
        ValueError: a sample alone is above the caps of every rank, or there are not as many caps as numbers.
    """
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
