"""The length of a sample that shapes show: its own, or those of a batch of it alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_odc.samples.content import Path
from lightning_odc.samples.probe import Collate, Shape, Shapes, seen, shapes_of

Place = tuple[Path, int]
"""A dimension of a tensor in a batch."""
Sequences = tuple[tuple[Place, ...], ...]
"""The dimensions of each sequence in which samples differ."""


@dataclass(frozen=True)
class ShownLength:
    """The length of a sample as its shapes show it: the sizes of all its sequences, added."""

    sequences: Sequences
    collate_fn: Collate | None  # of what it makes; `None`: of the sample as it is

    def __call__(self, sample: Any) -> int:
        """At least 1, also of a sample that ``collate_fn`` leaves out."""
        if self.collate_fn is None:
            shapes = shapes_of(sample)
        else:
            shapes = seen(self.collate_fn, [sample]).shapes
        length = 0
        for places in self.sequences:
            sizes = [shapes[path][axis] for path, axis in places if path in shapes]
            if sizes:
                length += math.prod(sizes)
        return max(length, 1)


def sequences_in(shapes: Sequence[Shapes]) -> Sequences:
    """The sequences in which some samples of these shapes are seen to differ.

    ::

        chosen [1, 9], [1, 5]    rejected [1, 4], [1, 7]     two sequences: 9 + 4, and 5 + 7
        input_ids [1, 9], [1, 5]    labels [1, 9], [1, 5]    one
        input_ids [1, 9], [1, 5]    mask [1, 9, 9], [1, 5, 5]    one: the mask has its sizes
        image [1, 3, 8, 9], [1, 3, 6, 4]    one of 8 * 9, and of 6 * 4
    """
    found: dict[tuple[Shape, ...], tuple[Place, ...]] = {}
    for path in dict.fromkeys(path for one in shapes for path in one):
        having = [one[path] for one in shapes if path in one]
        if len({len(shape) for shape in having}) > 1:
            continue
        places = [(path, axis) for axis, sizes in enumerate(zip(*having, strict=True)) if len({*sizes}) > 1]
        if places:
            # Less the smallest one, sizes are equal where two sequences differ by a constant, as by an end of text.
            sizes = [[one[path][axis] if path in one else 0 for one in shapes] for _, axis in places]
            key = tuple(tuple(size - min(along) for size in along) for along in sizes)
            found.setdefault(key, tuple(places))
    rows = {key[0] for key in found if len(key) == 1}
    return tuple(places for key, places in found.items() if len(key) == 1 or not rows.issuperset(key))
