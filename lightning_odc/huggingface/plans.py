"""The microbatches of this rank, as the batches of ``Trainer``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Task
from lightning_odc.data.weighting import Rule


class Planned(NamedTuple):
    """A microbatch, as it was planned."""

    indices: list[int]  # of its samples
    batch: Any  # when it was read
    weight: float | None  # ``None``: it is a whole batch of `Trainer`


def are_planned(batch: Any) -> bool:
    """Whether a batch is the microbatches of this rank."""
    return isinstance(batch, list) and all(isinstance(one, Planned) for one in batch)


class Plans:
    """A batch sampler: this rank's microbatches of each optimizer step, as lists.

    Of several accumulated batches, the last one has all microbatches, and the others are empty.

    Attributes:
        balanced: What plans them.
        rule: What a microbatch counts; with ``None``, batches are those of ``Trainer``.
        begun: The optimizer steps of the epoch of which batches were taken.
    """

    def __init__(
        self, balanced: BalancedDataLoader, own: DataLoader[Any], rank: int, accumulated: int
    ) -> None:
        self.balanced = balanced
        self.rule: Rule | None = None
        self.begun = 0
        self._own: Any = own
        self._rank = rank
        self._accumulated = accumulated
        self._epoch = 0
        # What deals out the rest of an epoch, and from which step on.
        self._rest: tuple[int, BalancedDataLoader] | None = None

    @property
    def batch_sampler(self) -> Plans:
        """Where `Trainer` looks for ``set_epoch``; it finds one that Accelerate begins in the middle there, too."""
        return self

    def adapt(self, rule: Rule | None) -> None:
        """Plan by what a trial has found."""
        self.rule = rule
        if rule is not None:
            info = replace(self.balanced.info, weighting=rule.planned, counter=rule.counter)
            self.balanced.adapt(info)

    def keep_whole(self, first: int) -> None:
        """From a step of this epoch on, deal out its other samples in whole batches. The next epoch is `Trainer`'s."""
        whole = copy.copy(self.balanced)  # weights of what was planned before are asked for later
        whole.adapt(replace(whole.info, packs=False, weighting=None, counter=None, whole="fixed"))
        self._rest = (first, whole)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._own.set_epoch(epoch)

    def task_of(self, planned: Planned) -> Task:
        """A microbatch that was read, and what it counts."""
        assert self.rule is not None
        assert planned.weight is not None
        task = self.balanced.counted(self._epoch, planned.indices, planned.batch, planned.weight)
        if self.rule.counter is not None and planned.weight:
            count = self.rule.counter.of(planned.batch)
            if count is not None:
                return task._replace(weight=float(count))
        return task

    def __len__(self) -> int:
        return len(self._own.batch_sampler)

    def __iter__(self) -> Iterator[list[Planned]]:
        if self._rest is not None:
            self.rule = None
        if self.rule is None:
            for indices in self._own.batch_sampler:
                yield [Planned(indices, None, None)]
            return
        for step in range(len(self.balanced)):
            self.begun = step + 1
            if self._rest is not None and step >= self._rest[0]:
                plan = self._rest[1].plan(step, self._epoch)
                yield from ([Planned(indices, None, None)] for indices in plan.microbatches[self._rank])
                continue
            first = step * self._accumulated
            for _ in range(first + 1, min(first + self._accumulated, len(self))):
                yield []
            plan = self.balanced.plan(step, self._epoch)
            weighted = zip(plan.microbatches[self._rank], plan.weights[self._rank], strict=True)
            # Those without weight make counts equal.
            meets = self.balanced.info.meets
            yield [Planned(indices, None, weight) for indices, weight in weighted if weight or meets]


class _Samples(Dataset[Any]):
    """The samples of microbatches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, planned: Planned) -> tuple[Planned, list[Any]]:
        return planned, [self._dataset[index] for index in planned.indices]


def _collate(
    collate: Callable[[list[Any]], Any], microbatches: Sequence[tuple[Planned, list[Any]]]
) -> list[Planned]:
    return [planned._replace(batch=collate(samples)) for planned, samples in microbatches]


def loader_of(plans: Plans, own: DataLoader[Any]) -> DataLoader[Any]:
    """What reads the planned microbatches, as ``own`` reads batches."""
    return DataLoader(
        _Samples(own.dataset),
        batch_sampler=plans,
        collate_fn=partial(_collate, own.collate_fn),
        num_workers=own.num_workers,
        pin_memory=own.pin_memory,
        prefetch_factor=own.prefetch_factor,
        persistent_workers=own.persistent_workers,
        timeout=own.timeout,
        worker_init_fn=own.worker_init_fn,
        multiprocessing_context=own.multiprocessing_context,
    )
