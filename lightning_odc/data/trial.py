"""The samples that a loss is tried with, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from lightning_odc.balance.arrays import first_number
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.rng import isolated_rng, seed_rng
from lightning_odc.data.split import some_rows
from lightning_odc.data.weighting import tensors_of

_MOST = 64


def spread_out(lengths: LengthArray) -> list[int]:
    """Positions of 64 samples, the shortest first and the longest last: enough to show a class that is not common."""
    order = first_number(lengths).argsort(kind="stable")
    return order[np.linspace(0, len(order) - 1, min(len(order), _MOST)).astype(int)].tolist()


class TrialSamples:
    """Makes batches of samples. Equal samples make equal batches, whatever is random in the ``collate_fn``.

    A ``collate_fn`` that is random (it masks some tokens, say) would show a sample alone in one way and among others in
    another. So where it is, all batches are rows of a single one.
    """

    def __init__(
        self, samples: Sequence[Any], lengths: LengthArray, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._samples = samples
        self._lengths = first_number(lengths)
        self._collate_fn = collate_fn
        self._whole: Any = None
        everything = range(len(samples))
        one, other = self._collated(everything, 0), self._collated(everything, 1)
        pairs = zip(tensors_of(one), tensors_of(other), strict=True)
        if not all(
            a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs
        ):
            self._whole = one

    def __len__(self) -> int:
        return len(self._samples)

    def batch_of(self, group: Sequence[int]) -> Any:
        """A batch of the samples at these positions."""
        if self._whole is None:
            return self._collated(group, 0)
        return deepcopy(some_rows(self._whole, len(self), list(group)))

    def _collated(self, group: Sequence[int], seed: int) -> Any:
        with isolated_rng():
            seed_rng(seed)
            return self._collate_fn([deepcopy(self._samples[position]) for position in group])

    def tokens_of(self, group: Sequence[int]) -> list[int]:
        """The lengths of the samples at these positions."""
        return self._lengths[list(group)].tolist()
