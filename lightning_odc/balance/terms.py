"""The numbers that a cost comes down to for the samples of one minibatch, checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.costs import Cost, pair_of


@dataclass(frozen=True, eq=False)
class Terms:
    """All that a plan of one minibatch can cost.

    Attributes:
        samples: ``[1, n]`` costs of samples if all ranks are alike in them, else ``[num_ranks, n]``.
        overhead: ``[num_ranks]``, of every microbatch.
        pair: ``[num_ranks]``, of every two tokens of different samples in one microbatch.
    """

    samples: Floats
    overhead: Floats
    pair: Floats

    @property
    def rows(self) -> Floats:
        """``[num_ranks, n]`` costs of samples on every rank."""
        return np.broadcast_to(self.samples, (len(self.overhead), self.samples.shape[1]))

    @property
    def are_alike(self) -> bool:
        """Whether all ranks are alike."""
        return len(self.samples) == 1 and all(bool((t == t[0]).all()) for t in (self.overhead, self.pair))

    @property
    def depend_on_packing(self) -> bool:
        return bool(self.overhead.any() or self.pair.any())


def terms_of(cost: Cost, lengths: Ints, num_ranks: int) -> Terms:
    """The costs of samples of these lengths, checked.

    Raises:
        ValueError: a shape that does not fit, or a value that is no cost.
    """
    samples = _samples(cost, lengths, num_ranks)
    overhead = _per_rank("overhead", cost.overhead, num_ranks)
    return Terms(samples, overhead, _per_rank("pair", pair_of(cost), num_ranks))


def evaluate(cost: Cost, lengths: Ints, num_ranks: int) -> tuple[Floats, Floats]:
    """Costs of samples ``[1 or num_ranks, n]`` and overheads ``[num_ranks]``; see `terms_of`."""
    terms = terms_of(cost, lengths, num_ranks)
    return terms.samples, terms.overhead


def _samples(cost: Cost, lengths: Ints, num_ranks: int) -> Floats:
    samples = np.asarray(cost.samples(lengths.astype(np.float64)), dtype=np.float64)
    if samples.shape not in ((len(lengths),), (1, len(lengths)), (num_ranks, len(lengths))):
        raise ValueError(
            f"the cost gave shape {list(samples.shape)} for {len(lengths)} samples on {num_ranks} ranks; it must give "
            f"[{len(lengths)}], or [{num_ranks}, {len(lengths)}] for ranks that differ."
        )
    samples = samples.reshape(-1, len(lengths))
    good = ((samples > 0) & np.isfinite(samples)).all(0)
    if not good.all():
        index = int(np.argmin(good))
        raise ValueError(
            f"the cost of sample {index} ({lengths[index]} tokens) is {samples[:, index].tolist()}; costs must be "
            "positive and finite, for example cost=lambda lengths: lengths + 2e-5 * lengths**2."
        )
    return samples


def _per_rank(name: str, value: Floats, num_ranks: int) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    if array.shape not in ((), (1,), (num_ranks,)):
        raise ValueError(
            f"the cost has {name} of shape {list(array.shape)} for {num_ranks} ranks; it must be one number, or one "
            "per rank."
        )
    if not (array >= 0).all() or not np.isfinite(array).all():
        raise ValueError(
            f"the {name} of a microbatch is {array.tolist()}; it must be finite and not negative."
        )
    return np.broadcast_to(array, (num_ranks,))
