"""What this rank did when: spans of work and waiting, in bounded memory, and nothing at all without a listener."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One thing that this rank did."""

    # ``"read"``, ``"add"``, ``"wait"``, ``"settle"``, ``"publish"``, ``"forward"``, ``"backward"``, ``"optimizer"``,
    # ``"data"``, ``"sampling"``, ``"scoring"``, or the name of a collective. Spans nest: waits lie inside what waited.
    kind: str
    begin: int  # nanoseconds of the monotonic clock
    end: int  # nanoseconds of the monotonic clock
    details: dict[str, Any]  # what else is known: unit, peer, cause, microbatch, bytes, tokens


class Tracer:
    """Collects spans until it is full."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity  # later spans are dropped
        self.spans: list[Span] = []

    def begin_wait(self, cause: str) -> None:
        """A wait begins. When it has ended, `record` gets a ``"wait"``. Waits nest."""

    def record(self, kind: str, begin: int, **details: Any) -> None:
        """A span that ends now."""
        if len(self.spans) < self.capacity:
            self.spans.append(Span(kind, begin, time.monotonic_ns(), details))

    def take(self) -> list[Span]:
        """The spans so far; later ones begin a new list."""
        spans, self.spans = self.spans, []
        return spans


class Traced:
    """Something whose work can be traced. With no tracer, that costs next to nothing."""

    def __init__(self, tracers: list[Tracer] | None = None) -> None:
        if tracers is None:
            tracers = []
        self.tracers = tracers  # the list itself, so that all parts of an engine share it

    def listen(self, tracer: Tracer) -> None:
        """Let this one trace, too."""
        self.tracers.append(tracer)

    def unlisten(self, tracer: Tracer) -> None:
        """Let this one trace no longer. Idempotent."""
        if tracer in self.tracers:
            self.tracers.remove(tracer)

    def record(self, kind: str, begin: int, **details: Any) -> None:
        """A span that ends now."""
        for tracer in self.tracers:
            tracer.record(kind, begin, **details)

    @contextmanager
    def traced(self, kind: str, **details: Any) -> Iterator[None]:
        """Record the enclosed work as one span."""
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(kind, begin, **details)
