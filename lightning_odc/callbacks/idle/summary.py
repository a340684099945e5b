"""Numbers of a step and of an epoch, and what is said of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from torch import Tensor

from lightning_odc.callbacks.timeline.spans import Passage
from lightning_odc.metrics import idle_fraction, imbalance
from lightning_odc.protocol.waiting import Cause

UNKNOWN = math.nan

_Name = TypeVar("_Name")
Logged = dict[str, float]
"""Values by the names under which they are logged."""


class IdleCause(StrEnum):
    """Why a device was idle: the engine's causes, and four that only a monitor sees."""

    READ = Cause.READ
    LOCK = Cause.LOCK
    SETTLE = Cause.SETTLE
    NETWORK = Cause.NETWORK
    COLLECTIVE = "collective"
    WITHIN_GROUP = "within_group"  # inside collectives of the ranks that compute one sample together
    BROADCAST = "broadcast"
    DATA = "data"


class DevicePart(StrEnum):
    """What a GPU does in a part of a step: they add up to the step."""

    KERNEL = "kernel"  # at least one kernel or copy of its own
    COLLECTIVE = "collective"  # nothing but collectives, which wait or move bytes
    EMPTY = "empty"  # nothing: the host has not asked for anything


@dataclass
class StepNumbers:
    """One rank, one optimizer step. Whatever could not be measured is ``nan``."""

    seconds: float  # length of the step, evaluation not counted
    waits: dict[IdleCause, float] = field(default_factory=dict)  # seconds of waiting by cause
    microbatches: float = 0  # how many this rank ran
    samples: float = 0  # samples in these microbatches
    tokens: float = 0  # tokens in these microbatches, padding included
    real_tokens: float | Tensor = 0  # without padding; a device may still count them
    # This rank's collectives, in order; a `Passage` each, once they are read.
    meetings: list[Any] = field(default_factory=list)
    broadcasts: list[Passage] = field(default_factory=list)  # this rank's broadcasts from rank 0, in order
    seen: bool = True  # waiting was measured in this step; only in some, where single steps are looked at
    parts: dict[DevicePart, float] = field(default_factory=dict)  # seconds by what the device did, if known
    number: int = 0  # of the step, from the beginning of training
    peak_memory: float = 0  # bytes that this rank has held at most so far

    @property
    def idle(self) -> float:
        """All waiting, as far as it was measured."""
        return sum(self.waits.values())

    @property
    def busy(self) -> float:
        """The rest of the step: computing, moving own bytes, and whatever was not measured."""
        return max(self.seconds - self.idle, 0.0)

    @property
    def idle_fraction(self) -> float:
        """Waiting as a part of the time."""
        return idle_fraction(self.busy, self.idle)


def waits_in_meetings(by_rank: Sequence[Sequence[Passage]], common_clock: bool) -> list[float] | None:
    """Seconds that every rank waited inside collectives: see Note [Waiting inside a collective] in ``spans.py``."""
    # Without a common clock only durations can be compared. Then the ranks are taken to leave together, so that
    # the one that spent least time inside came last. The error is the time between the first leaving and the last.
    if not common_clock:
        by_rank = [
            [one._replace(entered=one.entered - one.left, left=0) for one in passages] for passages in by_rank
        ]

    def last_came(together: Sequence[Passage]) -> int:
        return max(passage.entered - passage.ahead for passage in together)

    return _waited(by_rank, last_came)


def waits_in_broadcasts(by_rank: Sequence[Sequence[Passage]]) -> list[float] | None:
    """Seconds that every rank waited for rank 0, which sends and does not wait, by one common clock."""
    return _waited(by_rank, lambda together: together[0].entered)


def _waited(
    by_rank: Sequence[Sequence[Passage]], awaited: Callable[[Sequence[Passage]], int]
) -> list[float] | None:
    """Seconds that every rank spent inside before the awaited moment of each passage."""
    # ``None`` if the ranks did not take part in equally many: then it is unknown which belong together.
    counts = {len(passages) for passages in by_rank}
    if len(counts) > 1:
        return None
    waited = [0] * len(by_rank)
    for together in zip(*by_rank, strict=True):
        until = awaited(together)
        for rank, passage in enumerate(together):
            end = min(until, passage.left)
            waited[rank] += max(end - passage.entered, 0)
    return [nanoseconds / 1e9 for nanoseconds in waited]


def resolve(ranks: Sequence[StepNumbers], common_clock: bool, group_size: int = 1) -> bool:
    """Replace the meetings, which ranks know alone, by the waits inside; returns whether that was possible."""
    cause = IdleCause.WITHIN_GROUP  # neighbours synchronize
    size = group_size
    if group_size == 1:  # all ranks synchronize
        cause = IdleCause.COLLECTIVE
        size = len(ranks)
    meetings = [rank.meetings for rank in ranks]
    waited = [
        waits_in_meetings(meetings[first : first + size], common_clock)
        for first in range(0, len(ranks), size)
    ]
    heard = None
    if common_clock and len(ranks) > 1:
        heard = waits_in_broadcasts([rank.broadcasts for rank in ranks])
    for index, rank in enumerate(ranks):
        rank.meetings = []
        rank.broadcasts = []
        of_group = waited[index // size]
        if of_group is not None and any(meetings):
            rank.waits[cause] = of_group[index % size]
        if heard is not None:
            rank.waits[IdleCause.BROADCAST] = heard[index]
    return None not in waited


class _Totals:
    """Sums over optimizer steps."""

    def __init__(self) -> None:
        self.steps = 0  # how many were added
        self.ranks: list[StepNumbers] = []  # what every rank did in them
        self.busiest = 0.0  # busy seconds of the busiest rank of every step

    def add(self, ranks: Sequence[StepNumbers]) -> None:
        """One more step: its numbers by rank."""
        self.steps += 1
        self.busiest += max(rank.busy for rank in ranks)
        if not self.ranks:
            self.ranks = [StepNumbers(0.0) for _ in ranks]
        for total, rank in zip(self.ranks, ranks, strict=True):
            total.seconds += rank.seconds
            total.microbatches += rank.microbatches
            total.samples += rank.samples
            total.tokens += rank.tokens
            total.real_tokens += rank.real_tokens
            total.peak_memory = max(total.peak_memory, rank.peak_memory)
            add_seconds(total.waits, rank.waits)
            add_seconds(total.parts, rank.parts)

    def mean(self, by_rank: Iterable[float]) -> float:
        """Per rank and step."""
        return statistics.fmean(by_rank) / self.steps


class IdleSummary:
    """Adds up optimizer steps and says what they amount to."""

    # Ratios are ratios of sums, so that a long step counts more than a short one. Seconds and counts are means
    # per optimizer step and rank, so that one step and a whole epoch compare. What is said of waiting is that
    # of the steps in which it was measured, on all ranks.

    def __init__(self) -> None:
        self._all = _Totals()
        self._seen = _Totals()

    @property
    def steps(self) -> int:
        """How many were added."""
        return self._all.steps

    def add(self, ranks: Sequence[StepNumbers]) -> None:
        """One more step: its numbers by rank."""
        self._all.add(ranks)
        if all(rank.seen for rank in ranks):
            self._seen.add(ranks)

    def values(self, complete: bool, per_rank: bool, group_size: int = 1) -> Logged:
        """What to log, by name; only what was measured."""
        # If not ``complete``, nothing is said about idle as a whole. Single ranks' names end in ``_rank0``, ...
        whole = self._all
        seen = self._seen
        if not seen.steps:
            seen = whole
            complete = False
        if not any(rank.seconds for rank in whole.ranks):
            return {}
        count = len(whole.ranks)
        values = {}
        for cause in IdleCause:
            if any(cause in rank.waits for rank in seen.ranks):
                values[f"idle/{cause}_seconds"] = seen.mean(rank.waits.get(cause, 0.0) for rank in seen.ranks)
        values |= _of_ranks(whole, seen, slice(count), complete, group_size)
        values["step_seconds"] = whole.mean(rank.seconds for rank in whole.ranks)
        if complete:
            fractions = [rank.idle_fraction for rank in seen.ranks]
            worst = max(range(count), key=fractions.__getitem__)
            values["idle/worst_fraction"] = fractions[worst]
            values["idle/worst_rank"] = float(worst)
            mean_busy = sum(rank.busy for rank in seen.ranks) / count
            values["imbalance"] = imbalance(seen.busiest, mean_busy)
        if per_rank:
            for index in range(count):
                own = _of_ranks(whole, seen, slice(index, index + 1), complete)
                values |= {f"{name}_rank{index}": value for name, value in own.items()}
        return {name: value for name, value in values.items() if not math.isnan(value)}


def add_seconds(total: dict[_Name, float], more: Mapping[_Name, float]) -> None:
    """Add seconds to those of the same name."""
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


def _of_ranks(whole: _Totals, seen: _Totals, chosen: slice, complete: bool, group_size: int = 1) -> Logged:
    """What is said of some of the ranks: of all of them, or of one."""
    ranks = whole.ranks[chosen][::group_size]  # a group runs a sample once
    seen_ranks = seen.ranks[chosen]
    seconds = max(rank.seconds for rank in ranks) or UNKNOWN
    computed = sum(rank.tokens for rank in ranks)
    real = float(sum(rank.real_tokens for rank in ranks))
    values = {
        "microbatches": sum(rank.microbatches for rank in ranks) / whole.steps,
        "samples_per_second": sum(rank.samples for rank in ranks) / seconds,
        "tokens_per_second": real / seconds,
        "computed_tokens_per_second": computed / seconds,
        "padding/fraction": 1 - real / (computed or UNKNOWN),
        "peak_memory_bytes": max(rank.peak_memory for rank in whole.ranks[chosen]) or UNKNOWN,
    }
    for part in DevicePart:
        if any(part in rank.parts for rank in seen_ranks):
            values[f"gpu/{part}_seconds"] = seen.mean(rank.parts.get(part, 0.0) for rank in seen_ranks)
    if complete:
        idle = sum(rank.idle for rank in seen_ranks)
        busy = sum(rank.busy for rank in seen_ranks)
        values["idle/fraction"] = idle_fraction(busy, idle)
        if any(IdleCause.WITHIN_GROUP in rank.waits for rank in seen_ranks):
            within = sum(rank.waits.get(IdleCause.WITHIN_GROUP, 0.0) for rank in seen_ranks)
            values["idle/within_group_fraction"] = idle_fraction(busy + idle - within, within)
        values["busy_seconds"] = seen.mean(rank.busy for rank in seen_ranks)
    return values
