"""What the trainer accumulates, and what it counts while batches are folded into minibatches.

Note [Folded accumulation]
~~~~~~~~~~~~~~~~~~~~~~~~~~
``DataLoader(batch_size=b)`` with ``Trainer(accumulate_grad_batches=k)`` makes an optimizer step of ``b * k`` samples
per rank. All of them become one `Minibatch`, so that a plan has something to choose from, and the trainer steps after
each. While it fits, its ``accumulate_grad_batches`` is 1, and numbers that count batches are divided by ``k``. Numbers
that count optimizer steps (``global_step``, ``max_steps``, ``every_n_train_steps``) stay. An example: 100 samples,
``batch_size=2``, ``accumulate_grad_batches=4``, 2 ranks. ::

                                    accumulated                   folded
    samples of a batch, all ranks   4                             16
    batches per epoch               25                            7, the last one of 4 samples
    limit_train_batches=10          10 batches, 3 steps           ceil(10 / 4) = 3
    limit_train_batches=0.5         12 batches, 3 steps           ceil(12 / 4) = 3
    val_check_interval=8            after 2 steps, 4, 6           ceil(8 / 4) = 2
    a scheduler's frequency=8       after 2 steps, 4, 6           8 / gcd(8, 4) = 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, cast

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.types import LRSchedulerConfig

_FACTOR = "accumulate_grad_batches"
_LIMIT = "limit_train_batches"
_INTERVAL = "val_check_interval"


class _Counts(Protocol):
    """What is used of a trainer; Lightning sets some of it where no type checker looks."""

    callbacks: list[Callback]
    accumulate_grad_batches: int
    limit_train_batches: float


class Accumulation:
    """What the trainer accumulates, and what it counts while that is folded; see Note [Folded accumulation]."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = cast(_Counts, trainer)
        self._before: dict[str, object] = {}  # what was folded
        self.batches = 1  # of the user's loader in a minibatch

    @property
    def foldable(self) -> int:
        """How many batches of the loader can become one; 1 where their number changes while training."""
        return 1 if self.is_scheduled else int(self._trainer.accumulate_grad_batches)

    @property
    def is_scheduled(self) -> bool:
        """Whether a ``GradientAccumulationScheduler`` decides how many batches are accumulated."""
        return any(
            isinstance(callback, GradientAccumulationScheduler)
            and callback.going_to_accumulate_grad_batches()
            for callback in self._trainer.callbacks
        )

    def fold(self, num_batches: float) -> None:
        """Step after every batch from now on; ``num_batches`` is those of an epoch."""
        self.batches = self.foldable
        if self.batches == 1:
            return
        trainer = self._trainer
        folded = {_FACTOR: 1, _LIMIT: folded_limit(trainer.limit_train_batches, num_batches, self.batches)}
        interval = getattr(trainer, _INTERVAL, None)  # there is none where validation goes by time
        if isinstance(interval, int):
            folded[_INTERVAL] = math.ceil(interval / self.batches)
        for name, value in folded.items():
            self._before[name] = getattr(trainer, name)
            setattr(trainer, name, value)

    def fold_schedulers(self, schedulers: Iterable[LRSchedulerConfig]) -> None:
        """Let schedulers that step by batches step as often as before. Once per fit: a fit creates new ones."""
        for config in schedulers:
            if config.interval == "step":
                config.frequency //= math.gcd(config.frequency, self.batches)

    def show_interval(self) -> None:
        """Put ``val_check_interval`` back when it has been read: callbacks compare it with 1.0, once per epoch."""
        if _INTERVAL in self._before:
            setattr(self._trainer, _INTERVAL, self._before.pop(_INTERVAL))

    def put_back(self) -> None:
        """The trainer is as the user made it. Safe to call again."""
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._before.clear()
        self.batches = 1


def folded_limit(limit: float, num_batches: float, factor: int) -> float:
    """``limit_train_batches`` in batches that are ``factor`` times as large: 10 becomes 3 for a factor of 4."""
    if isinstance(limit, float):
        if limit == 1.0 or num_batches == math.inf or int(limit * num_batches) == 0:
            return limit  # all of them, or what Lightning refuses
        limit = int(limit * num_batches)
    return math.ceil(limit / factor)
