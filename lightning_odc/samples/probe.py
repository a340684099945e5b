"""What a user's ``collate_fn`` makes of a few samples, alone and together: one look, from which all else follows.

The samples are read once, from the shortest to the longest, and each batch is made once. Pure functions of the `Probe`
say how batches are laid out (`collation.py`) and where they show what they hold (`ran.py`). A trial of the loss runs
the same samples. Lengths are found before, by the same means, from samples that are taken evenly (`lengths.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from lightning_odc.balance.arrays import Ints
from lightning_odc.samples.content import Path, given_bounds, parts_in, spread
from lightning_odc.samples.rng import isolated_rng, seed_rng

Collate = Callable[[list[Any]], Any]
Shape = tuple[int, ...]
Shapes = dict[Path, Shape]
"""The shape of every tensor, array and list of numbers in a batch."""

_MOST_READ = 64  # samples, enough to show a class that is not common
_IN_PAIRS = 9  # of them


@dataclass(frozen=True)
class Seen:
    """What can be seen of a batch."""

    shapes: Shapes
    counts: Mapping[Hashable, int]  # what may be the number of samples, by name
    shows_all: bool  # it holds nothing but tensors and numbers: no size is hidden in a text or another object

    @classmethod
    def of(cls, batch: Any) -> Seen:
        """All that is asked about a batch."""
        return cls(shapes_of(batch), dict(counts_in(batch)), _shows_all(batch))

    @property
    def holds_something(self) -> bool:
        """Whether anything is left of its samples."""
        return any(map(math.prod, self.shapes.values()))


NOTHING = Seen({}, {}, False)
"""What is seen of a batch that cannot be made, as of samples that are left out."""


@dataclass(frozen=True)
class Probe:
    """A few samples, the shortest first, and what a ``collate_fn`` makes of them."""

    collate_fn: Collate
    indices: list[int]  # of the samples in the data set
    tokens: Ints  # their lengths
    samples: list[Any]  # as they were read; empty where they are no longer needed
    alone: list[Seen]  # the batch of each one
    together: Mapping[
        tuple[int, int], Seen
    ]  # the batches of some pairs; also of the first one that is kept, twice

    @property
    def kept(self) -> list[int]:
        """Places of the samples that are not left out."""
        return [place for place, seen in enumerate(self.alone) if seen.holds_something]


def look(read: Callable[[int], Any], lengths: Ints, collate_fn: Collate) -> Probe:
    """Read a few samples of a data set, from the shortest to the longest known one, and collate them."""
    known = lengths.nonzero()[0]
    order = known[lengths[known].argsort(kind="stable")]
    indices: list[int] = order[spread(len(order), _MOST_READ)].tolist()
    with isolated_rng():
        samples = [read(index) for index in indices]
    alone = [seen(collate_fn, [sample]) for sample in samples]
    kept = [place for place, own in enumerate(alone) if own.holds_something]
    pairs = list(pairwise(spread(len(samples), _IN_PAIRS)))
    if kept:
        pairs += [(kept[0], kept[-1]), (kept[0], kept[0])]
    together = {pair: seen(collate_fn, [samples[place] for place in pair]) for pair in pairs}
    return Probe(collate_fn, indices, lengths[indices], samples, alone, together)


def first_of_stream(stream: Iterable[Any], count: int) -> list[Any]:
    """The first samples of a stream, which yields them again to whoever reads it next.

    Args:
        stream: One that can be read several times.
        count: The most samples.

    Raises:
        ValueError: it can be read only once.
    """
    if iter(stream) is iter(stream):
        raise ValueError("the stream can be read only once")
    return list(islice(stream, count))


def seen(collate_fn: Collate, samples: Sequence[Any]) -> Seen:
    """What is seen of a batch of some samples, which stay as they are. The batch is the same on all ranks."""
    with suppress(Exception):  # whatever it is, training will meet it, too
        return Seen.of(collated(collate_fn, samples))
    return NOTHING


def collated(collate_fn: Collate, samples: Sequence[Any], seed: int = 0) -> Any:
    """A batch of some samples, which stay as they are, and so do random numbers."""
    with isolated_rng():
        seed_rng(seed)
        return collate_fn([deepcopy(sample) for sample in samples])


# -- what a batch shows -----------------------------------------------------------------------------------


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


def counts_in(batch: Any, path: Path = ()) -> Iterator[tuple[Hashable, int]]:
    """What may be the number of samples in a batch, by name. It waits for no device."""
    if isinstance(batch, Tensor):
        if not batch.is_nested:
            for axis, size in enumerate(batch.shape[:2]):
                yield (path, axis), size
            if batch.dim() == 1:
                yield (path, "bounds"), size - 1
        return
    if isinstance(batch, Mapping):
        bounds = given_bounds(batch)
        if bounds:
            yield (path, "row"), len(bounds) - 1
    if isinstance(batch, list | tuple):
        yield (path, "list"), len(batch)
    for key, part in parts_in(batch):
        yield from counts_in(part, (*path, key))


def _shows_all(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(map(_shows_all, batch.values()))
    if isinstance(batch, list | tuple):
        return all(map(_shows_all, batch))
    return isinstance(batch, Tensor | np.ndarray | int | float)
