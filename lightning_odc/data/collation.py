"""What a user's ``collate_fn`` makes of samples of different lengths: it is tried with two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lightning_odc.balance.collation import Collation

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Shape = tuple[int, ...]
Shapes = dict[tuple[Any, ...], Shape]
"""The shape of every tensor and list of numbers in a batch, by the keys and indices that lead to it."""


def find_collation(collate_fn: Any, short: Any, long: Any, lengths: tuple[int, int]) -> Collation | None:
    """How ``collate_fn`` lays out a microbatch.

    It is called with the short sample, with the long one, with both, and if that fails with the short one twice. What
    tells is how the shapes of the batches go together::

        [10], [13]  ->  (1, 10), (1, 13), together (2, 13)      pads
                        (1, 16), (1, 16), together (2, 16)      pads to 16
                        (1, 10), (1, 13), together (1, 23)      packs
                        a list of (10,), (13,)                  keeps apart
                        an error                                stacks what is equally long

    Args:
        collate_fn: The function to try.
        short: A sample.
        long: Another one, longer if there is any.
        lengths: The lengths of both.

    Returns:
        ``None``: it is none of these.
    """
    try:
        alone = _shapes(collate_fn([short])), _shapes(collate_fn([long]))
    except Exception:  # whatever it is, training will meet it, too
        return None
    try:
        together = _shapes(collate_fn([short, long]))
    except Exception:
        return Collation("stacked") if _stacks(collate_fn, short) else None
    for path, shape in sorted(together.items(), key=_tokens_first):
        if path in alone[0] and path in alone[1]:
            found = _compare(alone[0][path], alone[1][path], shape, lengths)
            if found is not None:
                return found
    return Collation("apart") if _is_apart(*alone, together) else None


def _stacks(collate_fn: Any, sample: Any) -> bool:
    try:
        collate_fn([sample, sample])
    except Exception:
        return False
    return True


def _tokens_first(item: tuple[tuple[Any, ...], Shape]) -> bool:
    return "input_ids" not in item[0]


def _compare(short: Shape, long: Shape, both: Shape, lengths: tuple[int, int]) -> Collation | None:
    """What one tensor of the three batches tells."""
    if not len(short) == len(long) == len(both):
        return None
    for rows, columns in ((0, 1), (1, 0)):
        if len(both) > 1 and (short[rows], long[rows], both[rows]) == (1, 1, 2):
            return _table(short[columns], long[columns], both[columns], lengths)
    for axis in range(min(len(both), 2)):
        if short[axis] + long[axis] == both[axis] and min(short[axis], long[axis]) > 1:
            return Collation("packed")
    return None


def _table(short: int, long: int, both: int, lengths: tuple[int, int]) -> Collation | None:
    """Rows of this length for the short sample, the long one, and both together."""
    if both != max(short, long) or both < 2:
        return None
    if short == long and lengths[0] < lengths[1]:  # no sample is outside these two
        return Collation("padded", fixed=both) if both >= lengths[1] else None
    for multiple in _MULTIPLES:
        padded = Collation("padded", multiple)
        if padded.row_lengths(list(lengths)).tolist() == [short, long]:
            return padded
    return Collation("padded")


def _is_apart(short: Shapes, long: Shapes, both: Shapes) -> bool:
    """Whether the batch of two holds what the batches of one hold."""
    parts = [*short.values(), *long.values()]
    return len(both) == len(parts) > 0 and sorted(parts) == sorted(both.values())


def _shapes(batch: Any) -> Shapes:
    return dict(_walk(batch, ()))


def _walk(batch: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Shape]]:
    if isinstance(batch, Tensor):
        if batch.is_nested:
            yield from _walk(list(batch.unbind()), path)
        else:
            yield path, tuple(batch.shape)
    elif isinstance(batch, list) and batch and all(isinstance(value, int | float) for value in batch):
        yield path, (len(batch),)
    else:
        for key, part in _parts(batch):
            yield from _walk(part, (*path, key))


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, list | tuple):
        return enumerate(batch)
    if is_dataclass(batch):
        return [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return ()
