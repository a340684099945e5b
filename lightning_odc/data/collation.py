"""What a user's ``collate_fn`` makes of samples of different lengths: it is tried with two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.collation import Collation
from lightning_odc.data.content import Path
from lightning_odc.data.shapes import Shape, Shapes, shapes_of

_TRIED = 9  # samples
_PADDED = [Collation("padded", 2**power) for power in range(11)]


def find_collation(collate_fn: Any, sample: Callable[[int], Any], tokens: Ints) -> Collation | None:
    """How ``collate_fn`` lays out a microbatch; ``None`` if in none of the known ways, or if it raises."""
    if not len(tokens):
        return None
    shapes = partial(_shapes, collate_fn, sample)
    # The shapes of the shortest sample, of the longest one and of both together tell; of those that are not left out:
    #   [10], [17]  ->  (1, 10), (1, 17), together (2, 17)      pads
    #                   (1, 16), (1, 24), together (2, 24)      pads to a multiple of 8
    #                   (1, 32), (1, 32), together (2, 32)      pads to 32
    #                   (1, 12), (1, 12), together (2, 12)      pads to 12, and cuts
    #                   (1, 10), (1, 17), together (1, 27)      packs
    #                   a list of (10,), (17,)                  keeps apart
    #                   an error                                stacks what is equally long
    order = tokens.argsort(kind="stable")
    tried: list[int] = order[np.linspace(0, len(order) - 1, _TRIED).astype(int)].tolist()
    short, of_short = _first_kept(tried, shapes)
    long, of_long = _first_kept(tried[::-1], shapes)
    together = shapes(short, long)
    if not together:
        return Collation("stacked") if shapes(short, short) else None
    ends = tokens[[short, long]]
    path = _telling(of_short, of_long, together)
    if path is None:
        parts = [*of_short.values(), *of_long.values()]
        is_apart = bool(parts) and sorted(parts) == sorted(together.values())
        return Collation("apart") if is_apart else None
    axis = _row_axis(of_short[path], of_long[path], together[path])
    if axis is None:
        return Collation("packed")
    row = of_short[path][axis]
    long_row = of_long[path][axis]
    if row == long_row and ends[0] < ends[1]:  # all samples are in between
        cuts = "input_ids" in path or (of_short == of_long and row >= ends[0])
        # Equal rows that are shorter than the long sample are its beginning if `cuts`, else something else.
        if cuts or row >= ends[1]:
            return Collation("padded", fixed=row)
        return None

    def row_of(index: int) -> int:
        return shapes(index).get(path, (0, 0))[axis]

    return _padded(tokens, ends, [row, long_row], row_of)


def _shapes(collate_fn: Any, sample: Callable[[int], Any], *indices: int) -> Shapes:
    """Those of a batch of samples; empty if it fails, as of samples that are left out, or holds nothing."""
    with suppress(Exception):  # whatever it is, training will meet it, too
        # it may change its samples
        found = shapes_of(collate_fn([deepcopy(sample(index)) for index in indices]))
        if any(map(math.prod, found.values())):
            return found
    return {}


def _first_kept(indices: list[int], shapes: Callable[[int], Shapes]) -> tuple[int, Shapes]:
    """The first of some samples that is not left out, and the shapes of a batch of it."""
    for index in indices:
        found = shapes(index)
        if found:
            return index, found
    return 0, {}


def _padded(tokens: Ints, ends: Ints, rows: list[int], row_of: Callable[[int], int]) -> Collation:
    """The multiple to which samples are padded, of which the shortest and the longest one have these rows."""
    fitting = [padded for padded in _PADDED if padded.row_lengths(ends).tolist() == rows]
    if not fitting:
        return _PADDED[0]
    while len(fitting) > 1:  # try a sample in whose rows the multiples differ
        by_first = fitting[0].row_lengths(tokens)
        by_last = fitting[-1].row_lengths(tokens)
        differ = np.flatnonzero(by_first != by_last)
        if not len(differ):
            break
        rows = [row_of(index) for index in differ[:_TRIED].tolist()]
        known = np.flatnonzero(rows)
        if not len(known):
            break
        length = int(tokens[differ[known[0]]])
        row = rows[known[0]]
        fitting = [padded for padded in fitting if padded.tokens([length]) == row] or fitting[:1]
    return fitting[0]


def _telling(short: Shapes, long: Shapes, together: Shapes) -> Path | None:
    """A tensor that pads or packs: tokens before others, and what differs between the samples before what does not."""

    def rank(path: Path) -> tuple[bool, ...]:
        return "input_ids" not in path, short[path] == long[path]

    common = [path for path in together if path in short and path in long]
    for path in sorted(common, key=rank):
        shapes = short[path], long[path], together[path]
        if _row_axis(*shapes) is not None or _joins(*shapes):
            return path
    return None


def _joins(short: Shape, long: Shape, both: Shape) -> bool:
    """Whether one row holds both samples."""
    if not len(short) == len(long) == len(both):
        return False
    sizes = list(zip(short, long, both, strict=True))[:2]
    return any(one + other == total and min(one, other) > 1 for one, other, total in sizes)


def _row_axis(short: Shape, long: Shape, both: Shape) -> int | None:
    """The axis along a row, if the batches are tables of one row, one, and two, as long as their longest row."""
    if len(short) == len(long) == len(both) > 1:
        for rows, columns in ((0, 1), (1, 0)):
            is_table = (short[rows], long[rows], both[rows]) == (1, 1, 2)
            longest = max(short[columns], long[columns])
            if is_table and both[columns] == longest > 1:
                return columns
    return None
