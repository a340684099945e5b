"""From what the ranks recorded to the numbers of the demo's table: pure functions of plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_odc.callbacks.timeline.clocks import Passage
from lightning_odc.callbacks.timeline.spans import Timeline

WARM_UP = 1
"""Minibatches at the start of every repetition that are trained on but not timed."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank saw in one repetition; every list has one entry per minibatch.

    Attributes:
        seconds: from the start of the minibatch to the start of the next one.
        loss_sums: summed loss of this rank's tokens.
        tokens: predicted tokens of this rank.
        waits: measured seconds of waiting for others, by cause; empty under a mode that does not measure.
        traffic: what this rank read and added over the transport in the whole repetition (a plain count).
        meetings: when this rank entered and left each collective; empty lists where there are none.
    """

    seconds: list[float]
    loss_sums: list[float]
    tokens: list[int]
    waits: list[dict[str, float]]
    traffic: dict[str, int] = field(default_factory=dict)
    meetings: list[list[Passage]] = field(default_factory=list)


@dataclass(frozen=True)
class Repetition:
    """All planned minibatches trained once under one mode.

    Attributes:
        mode: which.
        ranks: by rank, what it saw.
        timeline: what the ranks did when in one minibatch, on rank 0, if that was recorded.
    """

    mode: str
    ranks: Sequence[RankRecord]
    timeline: Timeline | None = None

    @property
    def seconds(self) -> list[float]:
        """Time of each timed minibatch: rank 0's from start to start.

        Ranks leave a minibatch together, so another rank's clock says the same within milliseconds; one
        rank's spans have neither gaps nor overlaps, hence they add up to the time that the user waited
        (a maximum over ranks, taken per minibatch, adds up to more).
        """
        return self.ranks[0].seconds[WARM_UP:]

    @property
    def losses(self) -> list[float]:
        """Mean loss per token of each minibatch over all ranks, the untimed one included."""
        sums = zip(*(rank.loss_sums for rank in self.ranks), strict=True)
        counts = zip(*(rank.tokens for rank in self.ranks), strict=True)
        return [sum(loss) / max(sum(count), 1) for loss, count in zip(sums, counts, strict=True)]

    @property
    def tokens(self) -> int:
        """Predicted tokens of the timed minibatches, all ranks."""
        return sum(sum(rank.tokens[WARM_UP:]) for rank in self.ranks)

    @property
    def bounds(self) -> list[float]:
        """For each timed minibatch the busy seconds of the busiest rank; empty if waits were not measured.

        No schedule of the same work on the same ranks is faster: this is what on-demand communication
        can reach without moving work.
        """
        if not any(wait for rank in self.ranks for wait in rank.waits):
            return []
        busy = (
            [seconds - sum(waits.values()) for seconds, waits in zip(rank.seconds, rank.waits, strict=True)]
            for rank in self.ranks
        )
        return [max(of_ranks) for of_ranks in zip(*busy, strict=True)][WARM_UP:]


@dataclass(frozen=True)
class RunSummary:
    """One mode over all its repetitions; the entry of ``result.json``.

    Attributes:
        samples_per_second: over all timed minibatches of all ranks.
        tokens_per_second: likewise, predicted tokens.
        seconds_per_minibatch: every timed minibatch, repetition after repetition.
        seconds_quartiles: first quartile, median and third quartile of the same.
        loss: mean loss per token of each minibatch of the last repetition, the untimed one included.
        traffic_per_minibatch: reads and adds over the transport and their bytes, all ranks; zero or empty
            where it is not measured.
        idle_seconds: waiting by cause, summed over ranks and timed minibatches; empty if not measured.
        idle_share: all waiting as a part of all ranks' time, or None.
        over_bound: measured time over the busy time of the busiest rank, minus 1, or None.
    """

    samples_per_second: float
    tokens_per_second: float
    seconds_per_minibatch: list[float]
    seconds_quartiles: tuple[float, float, float]
    loss: list[float]
    traffic_per_minibatch: dict[str, float]
    idle_seconds: dict[str, float]
    idle_share: float | None
    over_bound: float | None


def summarise(repetitions: Sequence[Repetition], samples_per_minibatch: int) -> RunSummary:
    """Put the repetitions of one mode together; ``samples_per_minibatch`` counts all ranks' samples."""
    seconds = [span for repetition in repetitions for span in repetition.seconds]
    total = sum(seconds)
    bound = sum(span for repetition in repetitions for span in repetition.bounds)
    ranks = [rank for repetition in repetitions for rank in repetition.ranks]
    idle = _add(waits for rank in ranks for waits in rank.waits[WARM_UP:])
    traffic = _add(rank.traffic for rank in ranks)
    minibatches = sum(len(repetition.losses) for repetition in repetitions)
    return RunSummary(
        samples_per_second=samples_per_minibatch * len(seconds) / total,
        tokens_per_second=sum(repetition.tokens for repetition in repetitions) / total,
        seconds_per_minibatch=seconds,
        seconds_quartiles=quartiles(seconds),
        loss=repetitions[-1].losses,
        traffic_per_minibatch={kind: count / minibatches for kind, count in traffic.items()},
        idle_seconds=idle,
        idle_share=sum(idle.values()) / (len(repetitions[0].ranks) * total) if bound else None,
        over_bound=total / bound - 1 if bound else None,
    )


def _add(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each key."""
    total: dict[str, float] = {}
    for count in counts:
        for key, value in count.items():
            total[key] = total.get(key, 0) + value
    return total


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation."""
    if len(values) == 1:
        return (values[0],) * 3
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def speedups(runs: Mapping[str, RunSummary], baseline: str = "collective") -> dict[str, float]:
    """Samples per second of each mode over the baseline's; empty if the baseline was not run."""
    if baseline not in runs:
        return {}
    reference = runs[baseline].samples_per_second
    return {mode: run.samples_per_second / reference for mode, run in runs.items()}


def speedups_by_repetition(
    repetitions: Sequence[Repetition], mode: str = "on_demand", baseline: str = "collective"
) -> list[float]:
    """Time of the baseline over time of the mode, for each pair of neighbouring repetitions."""
    times = {
        name: [sum(repetition.seconds) for repetition in repetitions if repetition.mode == name]
        for name in (mode, baseline)
    }
    return [slow / fast for fast, slow in zip(times[mode], times[baseline], strict=False)]


def speedup_undisturbed(
    repetitions: Sequence[Repetition], mode: str = "on_demand", baseline: str = "collective"
) -> float | None:
    """The speed-up if every minibatch had taken what it took in its fastest repetition, or None.

    Whatever else runs on the machine only adds time, so the fastest repetition is the least disturbed one.
    """
    times = {
        name: [repetition.seconds for repetition in repetitions if repetition.mode == name]
        for name in (mode, baseline)
    }
    if not all(times.values()):
        return None
    fast, slow = (sum(map(min, zip(*times[name], strict=True))) for name in (mode, baseline))
    return slow / fast


def loss_disagreement(repetitions: Sequence[Repetition]) -> float:
    """Largest relative difference between the losses of a minibatch in any two repetitions, of any modes."""
    of_minibatches = zip(*(repetition.losses for repetition in repetitions), strict=True)
    return max(map(relative_spread, of_minibatches))


def relative_spread(losses: Sequence[float]) -> float:
    """Largest minus smallest over the size of the smallest; infinite if one of them is NaN or infinite.

    Comparisons with NaN are false: ``max`` and ``min`` alone would pass over it.
    """
    if not all(map(math.isfinite, losses)):
        return math.inf
    return (max(losses) - min(losses)) / max(abs(min(losses)), 1e-12)
