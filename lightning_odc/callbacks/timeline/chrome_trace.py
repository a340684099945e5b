"""Timelines as Chrome traces (Trace Event Format), which Perfetto and chrome://tracing open.

A rank is a process with three threads, computing, communicating and waiting. Every span is a complete event
(``"ph": "X"``) in microseconds. Its kind is the event's category, and further facts are in ``args``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_odc.callbacks.timeline.spans import COLLECTIVES, RankTimeline, Timeline
from lightning_odc.engine.tracing import Span

FORMAT = "lightning-odc timeline 1"

# Attributes that are facts in the file.
_RUN = ("strategy", "world_size", "waiting_seen")
_RANK = ("rank", "host", "dropped")
_COMPUTING = 1
_COMMUNICATING = 2
_WAITING = 3
_THREADS = {_COMPUTING: "computing", _COMMUNICATING: "communicating", _WAITING: "waiting"}
_COMMUNICATIONS = COLLECTIVES | {"read", "add", "settle", "publish"}


def encode(timeline: Timeline) -> bytes:
    """The content of a trace file."""
    ranks = [{name: getattr(rank, name) for name in _RANK} for rank in timeline.ranks]
    about = {name: getattr(timeline, name) for name in _RUN}
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, **about, "ranks": ranks},
        "traceEvents": [event for rank in timeline.ranks for event in _events(rank)],
    }
    return json.dumps(trace, separators=(",", ":"), default=str).encode()


def decode(content: bytes) -> Timeline:
    """The timeline in a trace file."""
    try:
        trace = json.loads(content)
        about = None
        if isinstance(trace, dict):
            about = trace.get("otherData")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"this is not a trace that TimelineRecorder wrote: its format is not {FORMAT!r}")
        spans: dict[int, list[Span]] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                begin = round(event["ts"] * 1000)
                end = begin + round(event["dur"] * 1000)
                span = Span(event["cat"], begin, end, event["args"])
                spans.setdefault(event["pid"], []).append(span)
        ranks = []
        for one in about["ranks"]:
            facts = {name: one[name] for name in _RANK}
            of_rank = spans.get(one["rank"], [])
            ranks.append(RankTimeline(spans=of_rank, **facts))
        run = {name: about[name] for name in _RUN}
        return Timeline(ranks, **run)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"this trace is damaged: {type(error).__name__}: {error}") from error


def load_timeline(path: str | Path) -> Timeline:
    """Read a trace file that `TimelineRecorder` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it was written by something else.
    """
    return decode(Path(path).read_bytes())


def _events(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    def about(what: str, fact: str, value: object, thread: int = 0) -> dict[str, Any]:
        place = {"pid": rank.rank, "tid": thread}
        return {"ph": "M", "ts": 0, "dur": 0, **place, "name": f"{what}_{fact}", "args": {fact: value}}

    yield about("process", "name", f"rank {rank.rank} on {rank.host}")
    yield about("process", "sort_index", rank.rank)
    for thread, name in _THREADS.items():
        yield about("thread", "name", name, thread)
        yield about("thread", "sort_index", thread, thread)
    # Perfetto nests events of equal begin in the order in which they come: the longest first.
    for span in sorted(rank.spans, key=lambda span: (span.begin, -span.end)):
        thread = _COMPUTING
        if span.kind == "wait":
            thread = _WAITING
        elif span.kind in _COMMUNICATIONS:
            thread = _COMMUNICATING
        yield {
            "ph": "X",
            "name": _title(span),
            "cat": span.kind,
            "ts": span.begin / 1000,
            "dur": (span.end - span.begin) / 1000,
            "pid": rank.rank,
            "tid": thread,
            "args": span.details,
        }


def _title(span: Span) -> str:
    details = span.details
    if span.kind == "wait":
        peer = details.get("peer")
        whom = f"rank {peer}"
        if peer is None:
            whom = "the others"
        cause = details.get("cause", "unknown")
        return f"wait for {whom} ({cause})"
    words = [span.kind]
    for key in ("number", "microbatch", "unit"):
        value = details.get(key)
        if value is not None:
            words.append(str(value))
    tokens = details.get("tokens")
    if tokens is not None:
        words.append(f"({tokens} tokens)")
    return " ".join(words)
