"""What a user's ``collate_fn`` makes of samples of different lengths: it is tried with two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
from torch import Tensor

from lightning_odc.balance.arrays import first_number
from lightning_odc.balance.collation import Collation
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.weighting import parts_in

_PADDED = [Collation("padded", 2**power) for power in range(11)]

Shape = tuple[int, ...]
Path = tuple[Any, ...]
"""The keys and indices that lead to a tensor in a batch."""
Shapes = dict[Path, Shape]
"""The shape of every tensor and list of numbers in a batch."""


def find_collation(collate_fn: Any, sample: Callable[[int], Any], lengths: LengthArray) -> Collation | None:
    """How ``collate_fn`` lays out a microbatch; ``None`` if in none of the known ways, or if it raises."""
    if not len(lengths):
        return None
    several, lengths = lengths.ndim == 2, first_number(lengths)  # of rows of numbers, the first one tells

    def shapes_of(*indices: int) -> Shapes:
        # it may change its samples
        return dict(_walk(collate_fn([deepcopy(sample(index)) for index in indices]), ()))

    # The shapes of the shortest sample, of the longest one and of both together tell:
    #   [10], [17]  ->  (1, 10), (1, 17), together (2, 17)      pads
    #                   (1, 16), (1, 24), together (2, 24)      pads to a multiple of 8
    #                   (1, 32), (1, 32), together (2, 32)      pads to 32
    #                   (1, 12), (1, 12), together (2, 12)      pads to 12, and cuts
    #                   (1, 10), (1, 17), together (1, 27)      packs
    #                   a list of (10,), (17,)                  keeps apart
    #                   an error                                stacks what is equally long
    ends = short, long = [int(lengths.argmin()), int(lengths.argmax())]
    try:
        alone = shapes_of(short), shapes_of(long)
    except Exception:  # whatever it is, training will meet it, too
        return None
    try:
        together = shapes_of(short, long)
    except Exception:
        with suppress(Exception):
            shapes_of(short, short)
            return Collation("stacked")
        return None
    if (path := _telling(alone, together, lengths[ends].tolist() if several else None)) is None:
        parts = [*alone[0].values(), *alone[1].values()]
        return Collation("apart") if parts and sorted(parts) == sorted(together.values()) else None
    shapes = alone[0][path], alone[1][path], together[path]
    axis = _row_axis(*shapes)
    if axis is None:
        return Collation("packed")
    cuts = "input_ids" in path or (alone[0] == alone[1] and shapes[0][axis] >= lengths[short])
    own, (row, long_row, _) = lengths[ends], [shape[axis] for shape in shapes]
    if row == long_row and own[0] < own[1]:  # all samples are in between
        # Equal rows that are shorter than the long sample are its beginning if `cuts`, else something else.
        return Collation("padded", fixed=row) if cuts or row >= own[1] else None
    fitting = [one for one in _PADDED if one.row_lengths(own).tolist() == [row, long_row]] or _PADDED[:1]
    while len(fitting) > 1:  # try a sample in whose rows the multiples differ
        differ = np.flatnonzero(fitting[0].row_lengths(lengths) != fitting[-1].row_lengths(lengths))
        if not len(differ):
            break
        index = int(differ[0])
        row = shapes_of(index)[path][axis]
        fitting = [one for one in fitting if one.tokens([int(lengths[index])]) == row] or fitting[:1]
    return fitting[0]


def _telling(alone: tuple[Shapes, Shapes], together: Shapes, tokens: list[int] | None) -> Path | None:
    """A tensor that pads or packs: tokens before others, and what differs between the samples before what does not."""
    common = [path for path in together if path in alone[0] and path in alone[1]]

    def rank(path: Path) -> tuple[bool, ...]:
        short, long = alone[0][path], alone[1][path]
        # Where samples have several numbers, a tensor with the first ones in its shapes goes before all.
        is_other = tokens is not None and tokens not in map(list, zip(short, long, strict=False))
        return is_other, "input_ids" not in path, short == long

    for path in sorted(common, key=rank):
        shapes = alone[0][path], alone[1][path], together[path]
        is_alike = len({len(shape) for shape in shapes}) == 1
        sizes = list(zip(*shapes, strict=True))[:2] if is_alike else []
        joins = any(one + other == both and min(one, other) > 1 for one, other, both in sizes)
        if joins or _row_axis(*shapes) is not None:  # one row holds both samples, or a table does
            return path
    return None


def _row_axis(short: Shape, long: Shape, both: Shape) -> int | None:
    """The axis along a row, if the batches are tables of one row, one, and two, as long as their longest row."""
    if len(short) == len(long) == len(both) > 1:
        for rows, columns in ((0, 1), (1, 0)):
            is_table = (short[rows], long[rows], both[rows]) == (1, 1, 2)
            if is_table and both[columns] == max(short[columns], long[columns]) > 1:
                return columns
    return None


def _walk(batch: Any, path: Path) -> Iterator[tuple[Path, Shape]]:
    if isinstance(batch, Tensor):
        if batch.is_nested:
            yield from _walk(list(batch.unbind()), path)
        else:
            yield path, tuple(batch.shape)
    elif isinstance(batch, list) and batch and all(isinstance(value, int | float) for value in batch):
        yield path, (len(batch),)
    else:
        for key, part in parts_in(batch):
            yield from _walk(part, (*path, key))
