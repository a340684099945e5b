"""How long code of certain files ran, callees included: from a profile."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any


def seconds_in(profile: cProfile.Profile, belongs: Callable[[str], bool]) -> float:
    """Seconds that a profiled thread spent in functions of the files that ``belongs`` picks.

    What such a function calls counts, wherever it is, waiting included; each second counts once. The profiler itself
    makes Python code slower, so the result is an upper bound.

    Args:
        profile: a finished profile.
        belongs: says of a file name whether its functions count.
    """
    statistics: Any = pstats.Stats(profile)
    total = 0.0
    for (file, _, _), (_, _, _, inclusive, callers) in statistics.stats.items():
        if belongs(file):
            entered = [edge[3] for (caller, _, _), edge in callers.items() if not belongs(caller)]
            total += sum(entered) if callers else inclusive
    return total
