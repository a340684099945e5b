"""A piece of a timeline, as a timeline."""

from __future__ import annotations

from dataclasses import replace

from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.engine.tracing import Span


def close_up(timeline: Timeline, kind: str = "forward") -> Timeline:
    """The pass in which ranks waited longest, from where the first rank begins it to where the last one ends it.

    Args:
        timeline: of ranks that meet in every pass, so that the n-th pass of all of them is at the same time.
        kind: ``"forward"`` or ``"backward"``.

    Raises:
        ValueError: there is no such pass.
    """
    passes = list(zip(*(rank.of(kind) for rank in timeline.ranks), strict=False))
    if not passes:
        raise ValueError(f"the timeline has no {kind} passes on all of its ranks")
    windows = [(min(span.begin for span in spans), max(span.end for span in spans)) for spans in passes]
    cuts = [cut(timeline, begin, end) for begin, end in windows]
    return max(cuts, key=lambda one: sum(rank.idle_seconds for rank in one.ranks))


def cut(timeline: Timeline, begin: int, end: int) -> Timeline:
    """What happened between two moments, in nanoseconds since the beginning of the run; minibatches are left out."""
    return replace(timeline, ranks=[_cut_rank(rank, begin, end) for rank in timeline.ranks])


def _cut_rank(rank: RankTimeline, begin: int, end: int) -> RankTimeline:
    inside = [
        span for span in rank.spans if span.begin < end and span.end > begin and span.kind != "minibatch"
    ]
    spans = [Span(s.kind, max(s.begin, begin), min(s.end, end), s.details) for s in inside]
    return replace(rank, spans=spans)
