"""What idle fraction and imbalance are."""

from __future__ import annotations

import math


def imbalance(slowest: float, mean: float) -> float:
    """How much longer the slowest rank is busy than the average rank: the factor that perfect balance would save.

    It is 1 for perfect balance, the number of ranks if only one works, and ``nan`` if no rank was busy.

    Args:
        slowest: Busy seconds of the slowest rank of every step, added up.
        mean: Busy seconds of an average rank, added up over the same steps.
    """
    return slowest / (mean or math.nan)


def idle_fraction(busy: float, idle: float) -> float:
    """The part of all devices' time that was spent waiting for other ranks; ``nan`` if no time was counted.

    Args:
        busy: Seconds of computing, or of moving own bytes, of all ranks.
        idle: Seconds of waiting, of all ranks.
    """
    return idle / (busy + idle or math.nan)
