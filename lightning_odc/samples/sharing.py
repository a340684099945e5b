"""What ranks tell each other of the samples that they have read.

Note [Read first, planned then]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A plan needs the lengths of all samples of a minibatch. Where the data set does not tell them, ranks look at samples for
some seconds before training, each at others. A sample of 20 ms is soon known, if there are a thousand of them. Of a
hundred thousand, most are not. So a minibatch of the first epoch is read before it is planned::

    rank                        0                  1
    reads, as under DDP         a c                b d
    tells all ranks             a 9, c 2           b 5, d 4      lengths and samples
    plans, all alike            a | b d c
    collates its part           a                  b d c

Each sample is read once, by the user's own workers, ahead of training. (What is larger than a megabyte, or cannot be
pickled, is read again where it runs.) Lengths are remembered, so the second epoch is
planned before it is read. A cap that the user does not set is then the largest batch that DDP would make of the
minibatch. So a plan depends on its own samples alone, and is the same after a resume.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_BYTES = 2**20  # of a sample that all ranks get


class Sharing(NamedTuple):
    """How ranks share what they have read, all of them together."""

    exchange: Callable[[Any], list[Any]]  # takes what this rank tells, and returns what each rank does
    rank: int
    ranks: int


ALONE = Sharing(lambda item: [item], 0, 1)
"""That of a single process."""


class Read(NamedTuple):
    """A sample that was read before it was planned."""

    place: int  # in the data set
    length: int
    content: bytes | None  # `None`: it is not sent, and is read again where it is needed


class _Pickler(pickle.Pickler):
    """Takes of a tensor what it shows, and not all of the memory in which it lies."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided
        if is_plain and value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def content_of(sample: Any) -> bytes | None:
    """A sample as bytes; ``None`` if it cannot be pickled, or is too large to be sent to all ranks."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(sample)
    except Exception:  # whatever a class of the user's raises
        return None
    content = file.getvalue()
    return content if len(content) <= _MOST_BYTES else None
