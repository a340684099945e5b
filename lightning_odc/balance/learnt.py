"""What a cost that learns knew at some moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_odc.balance.arrays import Floats


@dataclass(frozen=True)
class LearntCost:
    """Seconds of a microbatch for each rank, as a `FittedCost` had learnt them; it stays as it is.

    Attributes:
        coefficients: by rank: seconds per squared token, per token, and per microbatch.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].
    """

    coefficients: tuple[tuple[float, ...], ...]
    dense: bool

    def samples(self, lengths: Floats) -> Floats:
        """Seconds ``[num_ranks, n]`` of samples, without the constant."""
        terms = np.array(self.coefficients)
        return (terms[:, :1] * lengths + terms[:, 1:2]) * lengths

    @property
    def overhead(self) -> Floats:
        return np.array(self.coefficients)[:, 2]

    @property
    def pair(self) -> Floats:
        """What every two tokens of different samples in one microbatch cost."""
        return 2 * np.array(self.coefficients)[:, 0] * self.dense
