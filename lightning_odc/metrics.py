"""Torchmetrics for idle time and load imbalance, exact over any number of ranks and steps; usable without a trainer.

A rank without work in a step often has nothing to report, and no other rank waits for it. So for both metrics, a
missing update counts like an update with zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


class IdleFraction(Metric):
    """The part of all devices' time that was spent waiting for other ranks.

    ``idle[r, s]`` and ``busy[r, s]`` are the seconds that rank ``r`` gives in its update ``s``. The value is
    ``sum(idle) / sum(idle + busy)`` over all ranks and updates: a mean over ranks and steps, each weighted by its time.
    It is ``nan`` until some time was counted. A rank that was not updated adds no time.

    Args:
        **kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        busy: Seconds counted as busy so far, on this rank.
        idle: Seconds counted as idle so far, on this rank.
    """

    higher_is_better = False
    full_state_update = False

    busy: Tensor
    idle: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("busy", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("idle", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, busy_seconds: float, idle_seconds: float) -> None:
        """Count more time of this rank.

        Args:
            busy_seconds: Time spent computing, or moving own bytes.
            idle_seconds: Time spent waiting for other ranks.

        Raises:
            ValueError: A time is negative or not finite.
        """
        _check("busy_seconds", busy_seconds)
        _check("idle_seconds", idle_seconds)
        self.busy += busy_seconds
        self.idle += idle_seconds

    def compute(self) -> Tensor:
        """A scalar between 0 and 1."""
        return (self.idle / (self.idle + self.busy)).float()


class LoadImbalance(Metric):
    """How much longer the slowest rank is busy than the average rank: the factor that perfect balance would save.

    The ``s``-th update of every rank belongs to the ``s``-th step, at whose end the ranks meet. ``busy[r, s]`` are the
    seconds that rank ``r`` gives in its update ``s``. The value is ``sum_s max_r busy / sum_s mean_r busy``. For
    one update that is the slowest rank's time over the mean. For several updates it is a ratio of sums, not a mean of
    ratios, so long steps count more. The slowest rank is found in every step: two ranks that are slow in turns are as
    unbalanced as one rank that is always slow. To compare totals instead, update once, with the totals. The mean is
    over all ranks of the process group, updated or not. A rank with fewer updates was busy for 0 seconds in the missing
    steps. The value is 1 for perfect balance, the number of ranks if only one works, and ``nan`` until a rank was busy.

    Args:
        **kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        steps: Seconds by update: on one rank ``[S]``, and while synchronised ``[ranks, S]``; 8 bytes each, so
            reset the metric at the end of an epoch.
    """

    higher_is_better = False
    full_state_update = True  # updates are a sequence: there is no way to add two states up

    steps: Tensor

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("dist_sync_fn", _gather_padded)
        super().__init__(**kwargs)
        self.add_state("steps", torch.zeros(0, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, busy_seconds: float) -> None:
        """Count one more step of this rank.

        Args:
            busy_seconds: Time spent computing, or moving own bytes.

        Raises:
            ValueError: A time is negative or not finite.
        """
        _check("busy_seconds", busy_seconds)
        self.steps = torch.cat([self.steps, self.steps.new_tensor([busy_seconds])])

    def compute(self) -> Tensor:
        """A scalar of at least 1."""
        table = torch.atleast_2d(self.steps)
        return (table.amax(0).sum() / table.mean(0).sum()).float()


def imbalance(slowest: float, mean: float) -> float:
    """The arithmetic of `LoadImbalance`, from seconds that were added up over steps; ``nan`` if no rank was busy.

    Args:
        slowest: Busy seconds of the slowest rank of every step.
        mean: Busy seconds of an average rank.
    """
    if not mean:
        return math.nan
    return slowest / mean


def idle_fraction(busy: float, idle: float) -> float:
    """The arithmetic of `IdleFraction`, from seconds of all ranks; ``nan`` if no time was counted.

    Args:
        busy: Seconds of computing, or of moving own bytes.
        idle: Seconds of waiting.
    """
    time = busy + idle
    if not time:
        return math.nan
    return idle / time


def _gather_padded(values: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's 1-D tensor, in rank order, filled with zeros up to the longest. All ranks together."""
    gathered = gather_all_tensors(values, group)
    longest = max(map(len, gathered))
    return [pad(steps, (0, longest - len(steps))) for steps in gathered]


def _check(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {seconds}")
