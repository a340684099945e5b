"""What the runs of ``bench.policies`` say: speed-ups split in two, idle time, and the distance to the bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Combination(NamedTuple):
    """What is compared: how ranks communicate, who places the samples, and by which cost."""

    communication: str
    policy: str
    cost: str = "quadratic"


COMBINATIONS = (
    Combination("collective", "local_sort"),
    Combination("collective", "lb_micro"),
    Combination("collective", "lb_micro", "dense"),
    Combination("on_demand", "local_sort"),
    Combination("on_demand", "lb_micro"),
    Combination("on_demand", "lb_mini"),
    Combination("on_demand", "lb_micro", "dense"),
    Combination("on_demand", "lb_mini", "dense"),
    Combination("on_demand", "lb_mini", "fitted"),
    Combination("on_demand", "steal", "dense"),
    Combination("on_demand", "steal", "fitted"),
)
PLAIN = "local_sort"

Run = dict[str, Any]
"""Of one rank: ``seconds`` and ``idle`` of every timed minibatch, ``losses`` and ``tokens`` of all."""


class Row(NamedTuple):
    """What one combination measured, over its repetitions.

    Attributes:
        combination: which.
        seconds: per minibatch, by repetition.
        communication: time of the plain policy over collectives, over its time with this communication.
        balancing: time of the plain policy with this communication, over the time of this combination.
        idle: share of the time in which a rank waited.
        over_bound: how far the time is above `bound`, as a share of it.
        losses: of every minibatch, over all ranks.
    """

    combination: Combination
    seconds: list[float]
    communication: float
    balancing: float
    idle: float
    over_bound: float
    losses: list[float]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        measured = {**self._asdict(), "total": self.total}
        del measured["combination"]
        gains = {f"by_{name}": measured.pop(name) for name in ("communication", "balancing")}
        return {**self.combination._asdict(), **measured, **gains}

    @property
    def total(self) -> float:
        """How many times as fast as the plain policy over collectives."""
        return self.communication * self.balancing


def bound(busy: Sequence[float], speeds: Sequence[float]) -> float:
    """Seconds if the work of all ranks had been shared out perfectly, by their speeds.

    Args:
        busy: seconds that each rank worked.
        speeds: of each rank; one of speed 0.5 takes twice as long for the same work.
    """
    work = sum(seconds * speed for seconds, speed in zip(busy, speeds, strict=True))
    return work / sum(speeds)


def summarize(by_rank: Sequence[dict[Combination, list[Run]]], speeds: Sequence[float]) -> list[Row]:
    """One row per combination.

    Args:
        by_rank: every rank's runs.
        speeds: of every rank.
    """
    times = {key: [statistics.fmean(run["seconds"]) for run in runs] for key, runs in by_rank[0].items()}
    plain = times[Combination("collective", PLAIN)]
    rows = []
    for key, own in times.items():
        same = times[Combination(key.communication, PLAIN)]
        repetitions = list(zip(*(runs[key] for runs in by_rank), strict=True))
        idle, over = _busy(repetitions, speeds)
        rows.append(
            Row(key, own, _ratio(plain, same), _ratio(same, own), idle, over, _losses(repetitions[0]))
        )
    return rows


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Of what was measured in turns, repetition by repetition."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def _busy(repetitions: Sequence[Sequence[Run]], speeds: Sequence[float]) -> tuple[float, float]:
    """Share of idle time, and distance to the bound; medians over repetitions."""
    idle, over = [], []
    for ranks in repetitions:
        span = sum(ranks[0]["seconds"])
        busy = [span - sum(run["idle"]) for run in ranks]
        idle.append(1 - statistics.fmean(busy) / span)
        over.append(span / bound(busy, speeds) - 1)
    return statistics.median(idle), statistics.median(over)


def _losses(ranks: Sequence[Run]) -> list[float]:
    sums = zip(*(run["losses"] for run in ranks), strict=True)
    counts = zip(*(run["tokens"] for run in ranks), strict=True)
    return [sum(values) / sum(tokens) for values, tokens in zip(sums, counts, strict=True)]


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = (
        "communication|policy|cost|s/minibatch (runs)|speed-up|by communication|by balancing|idle|over bound"
    )
    lines = [f"| {' | '.join(head.split('|'))} |", f"|{' --- |' * (head.count('|') + 1)}"]
    for row in rows:
        runs = ", ".join(f"{seconds:.2f}" for seconds in row.seconds)
        measured = [f"{100 * value:z.1f} %" for value in (row.idle, row.over_bound)]
        ratios = [f"x{value:.2f}" for value in (row.total, row.communication, row.balancing)]
        seconds = f"{statistics.median(row.seconds):.2f} ({runs})"
        lines.append(f"| {' | '.join([*row.combination, seconds, *ratios, *measured])} |")
    return "\n".join(lines)


def worst_loss_difference(rows: Sequence[Row]) -> float:
    """The largest relative difference of any minibatch's loss from that of the first row.

    Infinite if a loss is NaN or infinite.
    """
    pairs = [(a, b) for row in rows for a, b in zip(row.losses, rows[0].losses, strict=True)]
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
