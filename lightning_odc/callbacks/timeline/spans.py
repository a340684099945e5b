"""Timelines: the activities of all ranks on one common clock.

Note [Waiting inside a collective]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A collective cannot end on any rank before the last rank has begun it. So on a common clock, the time from a rank's own
begin to the last rank's begin is waiting for that last rank. The rest is moving bytes. All ranks run the same
collectives in the same order, so the n-th on one rank is the n-th on the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_odc.metrics import idle_fraction
from lightning_odc.protocol.tracing import Span

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "exchange"})
"""Kinds of spans in which all ranks synchronize."""


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did.

    Attributes:
        rank: its number.
        host: the machine it ran on.
        spans: Spans in nanoseconds since the beginning of the run.
    """

    rank: int
    host: str
    spans: list[Span]

    def of(self, *kinds: str) -> list[Span]:
        """The spans of these kinds."""
        return [span for span in self.spans if span.kind in kinds]

    @property
    def covered_seconds(self) -> float:
        """Time of which it is known what this rank did, waiting included."""
        return covered((span.begin, span.end) for span in self.spans) / 1e9

    @property
    def idle_seconds(self) -> float:
        """Time in which this rank waited for others."""
        return covered((span.begin, span.end) for span in self.of("wait")) / 1e9

    @property
    def idle_fraction(self) -> float:
        """``idle_seconds / covered_seconds``, and ``nan`` for an empty timeline."""
        idle = self.idle_seconds
        return idle_fraction(self.covered_seconds - idle, idle)


@dataclass(frozen=True)
class Timeline:
    """What the ranks of one run did when.

    Attributes:
        ranks: Ranks in order. What a rank writes after an error has itself alone.
        waiting_seen: whether waits for other ranks are among the spans.
    """

    ranks: list[RankTimeline]
    waiting_seen: bool = True

    @property
    def begin_ns(self) -> int:
        """When the first span began."""
        return min((span.begin for rank in self.ranks for span in rank.spans), default=0)

    @property
    def seconds(self) -> float:
        """Seconds from the first begin to the last end."""
        end = max((span.end for rank in self.ranks for span in rank.spans), default=0)
        return (end - self.begin_ns) / 1e9

    @property
    def idle_fraction(self) -> float:
        """Idle time of all ranks over the time of all ranks."""
        known = sum(rank.covered_seconds for rank in self.ranks)
        idle = sum(rank.idle_seconds for rank in self.ranks)
        return idle_fraction(known - idle, idle)


def with_collective_waits(timeline: Timeline) -> Timeline:
    """A timeline of all ranks, with waits as spans: see Note [Waiting inside a collective]."""
    ranks = timeline.ranks
    meetings = [sorted(rank.of(*COLLECTIVES), key=lambda span: span.begin) for rank in ranks]
    waits: list[list[Span]] = [[] for _ in ranks]
    for together in zip(*meetings, strict=False):
        kinds = {span.kind for span in together}
        if len(kinds) > 1:
            break  # some spans were dropped: from here on it is unknown which belong together
        begins = [span.begin for span in together]
        last = max(begins)
        peer = ranks[begins.index(last)].rank
        for of_rank, span in zip(waits, together, strict=True):
            until = min(last, span.end)
            if until > span.begin:
                details = {"cause": "collective", "peer": peer}
                of_rank.append(Span("wait", span.begin, until, details))
    with_waits = [replace(rank, spans=rank.spans + new) for rank, new in zip(ranks, waits, strict=True)]
    waiting_seen = timeline.waiting_seen or any(meetings)
    return replace(timeline, ranks=with_waits, waiting_seen=waiting_seen)


def covered(stretches: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds covered by at least one stretch, begin to end; one that ends before it begins covers nothing."""
    total = 0
    reached = -sys.maxsize  # up to where they are covered so far
    for begin, end in sorted(stretches):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


class Passage(NamedTuple):
    """The moments at which a rank entered and left an exchange or a collective, in nanoseconds of its own clock."""

    entered: int
    left: int
    ahead: int = 0  # nanoseconds from its coming to the moment from which on it waited for the others
