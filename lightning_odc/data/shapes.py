"""The shapes of all tensors in a batch, and the length of a sample that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_odc.data.content import Path, parts_in
from lightning_odc.data.rng import isolated_rng, seed_rng

Shape = tuple[int, ...]
Shapes = dict[Path, Shape]
"""The shape of every tensor, array and list of numbers in a batch."""
Place = tuple[Path, int]
"""A dimension of a tensor in a batch."""


def shapes_of(batch: Any) -> Shapes:
    """All shapes in a batch or a sample."""
    return dict(_walk(batch, ()))


def _walk(batch: Any, path: Path) -> Iterator[tuple[Path, Shape]]:
    if isinstance(batch, Tensor):
        if batch.is_nested:
            yield from _walk(list(batch.unbind()), path)
        else:
            yield path, tuple(batch.shape)
    elif isinstance(batch, np.ndarray):
        yield path, batch.shape
    elif (
        isinstance(batch, list)
        and batch
        and all(issubclass(kind, int | float) for kind in {*map(type, batch)})
    ):
        yield path, (len(batch),)
    else:
        for key, part in parts_in(batch):
            yield from _walk(part, (*path, key))


def are_all_shown(batch: Any) -> bool:
    """Whether it holds nothing but tensors and numbers, so that no size is hidden in a text or another object."""
    if isinstance(batch, Mapping):
        return all(map(are_all_shown, batch.values()))
    if isinstance(batch, list | tuple):
        return all(map(are_all_shown, batch))
    return isinstance(batch, Tensor | np.ndarray | int | float)


@dataclass(frozen=True)
class ShownLength:
    """The length of a sample as its shapes show it: the sizes of all its sequences, added."""

    sequences: tuple[tuple[Place, ...], ...]  # the dimensions of each in which samples differ
    collate_fn: Callable[[list[Any]], Any] | None  # of what it makes; `None`: of the sample as it is

    def __call__(self, sample: Any) -> int:
        """At least 1, also of a sample that ``collate_fn`` leaves out."""
        shapes: Shapes = {}
        with suppress(Exception):  # whatever it is, training will meet it, too
            shapes = self.shapes_of(sample)
        length = 0
        for places in self.sequences:
            sizes = [shapes[path][axis] for path, axis in places if path in shapes]
            if sizes:
                length += math.prod(sizes)
        return max(length, 1)

    def shapes_of(self, sample: Any) -> Shapes:
        """The shapes that show it."""
        if self.collate_fn is None:
            return shapes_of(sample)
        with isolated_rng():
            seed_rng(0)  # the same on all ranks
            return shapes_of(self.collate_fn([deepcopy(sample)]))  # it may change its samples

    def of(self, samples: Sequence[Any]) -> ShownLength:
        """The same, with the sequences in which some samples are seen to differ.

        ::

            chosen [1, 9], [1, 5]    rejected [1, 4], [1, 7]     two sequences: 9 + 4, and 5 + 7
            input_ids [1, 9], [1, 5]    labels [1, 9], [1, 5]    one
            input_ids [1, 9], [1, 5]    mask [1, 9, 9], [1, 5, 5]    one: the mask has its sizes
            image [1, 3, 8, 9], [1, 3, 6, 4]    one of 8 * 9, and of 6 * 4
        """
        shapes = [self.shapes_of(sample) for sample in samples]
        found: dict[tuple[Shape, ...], tuple[Place, ...]] = {}
        for path in dict.fromkeys(path for one in shapes for path in one):
            having = [one[path] for one in shapes if path in one]
            if len({len(shape) for shape in having}) > 1:
                continue
            places = [
                (path, axis) for axis, sizes in enumerate(zip(*having, strict=True)) if len({*sizes}) > 1
            ]
            if places:
                key = tuple(_differences(shapes, place) for place in places)
                found.setdefault(key, tuple(places))
        rows = {key[0] for key in found if len(key) == 1}
        sequences = [places for key, places in found.items() if len(key) == 1 or not rows.issuperset(key)]
        return ShownLength(tuple(sequences), self.collate_fn)


def _differences(shapes: Sequence[Shapes], place: Place) -> Shape:
    """Sizes less the smallest one: equal where two sequences differ by a constant, as by an end of text."""
    path, axis = place
    sizes = [one[path][axis] if path in one else 0 for one in shapes]
    least = min(sizes)
    return tuple(size - least for size in sizes)
