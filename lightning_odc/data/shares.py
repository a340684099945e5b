"""Reading one rank's share of a minibatch from a map-style data set, in this process or in a worker.

Note [Random numbers follow the sample]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before a sample is read, the generators of Python, numpy and torch are seeded from (seed, epoch, index of the sample),
and before ``collate_fn`` from (seed, epoch, index of the first sample). So what a random crop or mask does depends
neither on the rank or worker that reads the sample, nor on the policy that placed it, nor on whether training was
interrupted before. The generators of the process itself are left as they were. A data set with ``__getitems__`` reads
several samples at once, and is seeded once for them.

In the same way `ODCStrategy` seeds the generators from (seed, epoch, index of the first sample, 1) before a microbatch
goes through the model, and puts them back afterwards: dropout, too, is that of the microbatch, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from lightning_odc.balance import LearntCost
from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthFunction
from lightning_odc.data.minibatch import Detail, Minibatch
from lightning_odc.data.plan import Plan, Schedule
from lightning_odc.data.rng import isolated_rng, seed_rng

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Share:
    """One rank's share of a minibatch, before its samples are read.

    Attributes:
        epoch: it belongs to.
        microbatches: lists of sample indices.
        weights: one per microbatch.
        plan: text that is equal on all ranks.
        lengths: what the samples' lengths must be, in the same form, if that is to be checked.
    """

    epoch: int
    microbatches: list[list[int]]
    weights: list[float]
    plan: str
    lengths: list[list[int]] | None = None


class Planned(NamedTuple):
    """A minibatch that was handed out to be read.

    Attributes:
        plan: of all ranks.
        learnt: the cost that it was made with, if it is one that learns.
        details: by rank, one per microbatch.
    """

    plan: Plan
    learnt: LearntCost | None
    details: list[list[Detail]]


class ShareSampler:
    """The shares of one rank, in order, for ``DataLoader(sampler=...)``.

    Args:
        schedule: the plans.
        rank: whose shares.
        relative: weights relative to their mean over the minibatch.
        lengths_too: note in the shares how long the samples must be.
        learning: of a cost that learns.

    Attributes:
        begin: epoch and number of the first minibatch of the next pass.
        planned: by number, the minibatches that were handed out and have not been asked for.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        *,
        relative: bool,
        lengths_too: bool,
        learning: Learning | None,
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._relative = relative
        self._lengths_too = lengths_too
        self._learning = learning
        self.begin = (0, 0)
        self.planned: dict[int, Planned] = {}

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Share]:
        return self._shares(*self.begin)

    def _shares(self, epoch: int, first: int) -> Iterator[Share]:
        self.planned.clear()
        begun = 0 if self._learning is None else self._learning.begun
        for step in range(first, len(self)):
            planned = self._plan(epoch, step, begun + step - first)
            self.planned[step] = planned
            own = planned.details[self._rank]
            yield Share(
                epoch,
                planned.plan.microbatches[self._rank],
                planned.plan.weights_of(self._rank, self._relative),
                planned.plan.text,
                [detail.lengths for detail in own] if self._lengths_too else None,
            )

    def _plan(self, epoch: int, step: int, number: int) -> Planned:
        schedule = self._schedule
        learnt = None if self._learning is None else self._learning.cost_for(number)
        plan = schedule.plan(epoch, step, learnt)

        def detail(microbatch: list[int]) -> Detail:
            seed = (schedule.recipe.seed, epoch, microbatch[0], 1)
            return Detail(schedule.lengths.values[microbatch].tolist(), seed)

        return Planned(plan, learnt, [[detail(m) for m in rank] for rank in plan.microbatches])


class ShareReader:
    """Turns a `Share` into a `Minibatch`; what ``DataLoader`` calls its data set.

    Args:
        dataset: the samples.
        collate_fn: makes a microbatch of a list of samples.
        seed: of random numbers, see Note [Random numbers follow the sample].
        length_of: compares the lengths of samples with those of the share, if it has them.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate, seed: int, length_of: LengthFunction | None
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self._length_of = length_of

    def __getitem__(self, share: Share) -> Minibatch:
        """Read a share.

        Raises:
            ValueError: a sample is not as long as it was when lengths were looked up.
        """
        expected: Sequence[list[int] | None] = share.lengths or [None] * len(share.microbatches)
        with isolated_rng():
            microbatches = [
                self._microbatch(share.epoch, indices, lengths)
                for indices, lengths in zip(share.microbatches, expected, strict=True)
            ]
        return Minibatch(microbatches, share.weights, share.plan)

    def read(self, epoch: int, indices: list[int]) -> Any:
        """Read one microbatch."""
        with isolated_rng():
            return self._microbatch(epoch, indices, None)

    def _microbatch(self, epoch: int, indices: list[int], lengths: list[int] | None) -> Any:
        samples = self._samples(epoch, indices)
        if lengths is not None:
            for index, sample, length in zip(indices, samples, lengths, strict=True):
                self._check_length(index, sample, length)
        seed_rng(self._seed, epoch, indices[0])
        return collate(self._collate, samples)

    def _samples(self, epoch: int, indices: list[int]) -> list[Any]:
        if callable(getattr(self._dataset, "__getitems__", None)):
            seed_rng(self._seed, epoch, indices[0])
            return list(self._dataset.__getitems__(indices))
        samples = []
        for index in indices:
            seed_rng(self._seed, epoch, index)
            samples.append(self._dataset[index])
        return samples

    def _check_length(self, index: int, sample: Any, expected: int) -> None:
        assert self._length_of is not None
        found = self._length_of(sample)
        if found != expected:
            raise ValueError(
                f"Sample {index} has length {found}, but had {expected} when the lengths were looked up. If the data "
                "set changed, delete the cached lengths (see BalancedDataLoader(cache_dir=...)); if its samples differ "
                "in length from epoch to epoch, say what to plan with: BalancedDataLoader(dataset, lengths=[...])."
            )


def collate(collate_fn: Collate, samples: list[Any]) -> Any:
    """``collate_fn(samples)``; where torch's default fails on unequal lengths, with a hint."""
    try:
        return collate_fn(samples)
    except RuntimeError as error:
        if collate_fn is default_collate:
            error.add_note(
                "Samples of different lengths cannot be stacked. Pass a collate_fn that pads them, or one that packs "
                "them: BalancedDataLoader(..., collate_fn=lightning_odc.data.packing.pack_samples)."
            )
        raise
