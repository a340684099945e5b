"""Timelines as Chrome traces (Trace Event Format), which Perfetto and chrome://tracing open.

A rank is a process with three threads, computing, communicating and waiting. Every span is a complete event
(``"ph": "X"``) in microseconds. Its name is its kind, and further facts are in ``args``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_odc.callbacks.timeline.spans import COLLECTIVES, RankTimeline, Timeline
from lightning_odc.protocol.tracing import Span

FORMAT = "lightning-odc timeline 3"

_THREADS = ("computing", "communicating", "waiting")
_COMMUNICATIONS = COLLECTIVES | {"read", "add", "settle", "publish"}


def encode(timeline: Timeline) -> bytes:
    """The content of a trace file."""
    ranks = [{"rank": rank.rank, "host": rank.host} for rank in timeline.ranks]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "waiting_seen": timeline.waiting_seen, "ranks": ranks},
        "traceEvents": [event for rank in timeline.ranks for event in _events(rank)],
    }
    return json.dumps(trace, separators=(",", ":"), default=str).encode()


def _events(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    process = f"rank {rank.rank} on {rank.host}"
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": process}}
    for thread, name in enumerate(_THREADS):
        yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": thread, "args": {"name": name}}
    # Perfetto nests events of equal begin in the order in which they come: the longest first.
    for span in sorted(rank.spans, key=lambda span: (span.begin, -span.end)):
        name = "computing"
        if span.kind == "wait":
            name = "waiting"
        elif span.kind in _COMMUNICATIONS:
            name = "communicating"
        yield {
            "ph": "X",
            "name": span.kind,
            "ts": span.begin / 1000,
            "dur": (span.end - span.begin) / 1000,
            "pid": rank.rank,
            "tid": _THREADS.index(name),
            "args": span.details,
        }


def load_timeline(path: str | Path) -> Timeline:
    """Read a trace file that `TimelineRecorder` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it was written by something else, or by another version.
    """
    trace: dict[str, Any] = json.loads(Path(path).read_bytes())
    about = trace.get("otherData", {})
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} is not a trace that TimelineRecorder wrote: its format is not {FORMAT!r}")
    spans: dict[int, list[Span]] = {one["rank"]: [] for one in about["ranks"]}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            spans[event["pid"]].append(Span(event["name"], begin, end, event["args"]))
    ranks = [RankTimeline(one["rank"], one["host"], spans[one["rank"]]) for one in about["ranks"]]
    return Timeline(ranks, about["waiting_seen"])
