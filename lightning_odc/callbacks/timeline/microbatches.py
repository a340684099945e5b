"""Telling which microbatch a span belongs to, and how many tokens it has."""

from __future__ import annotations

import time
from typing import Any

from lightning_odc.data.batch_size import token_count
from lightning_odc.engine.tracing import Tracer

_UNKNOWN = object()


class MicrobatchTracer(Tracer):
    """A tracer that numbers the forward and backward passes of an optimizer step.

    A backward pass belongs to the forward pass before it, once; one without (the loss of an empty share) stays
    without a number.

    Args:
        capacity: most spans to keep; later ones are counted and dropped.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tokens: Any = _UNKNOWN
        self._forwards = 0
        self._last: dict[str, Any] = {}

    def begin_step(self) -> None:
        """The next forward pass is the first of a step."""
        self._forwards = 0
        self._last = {}

    def see_input(self, batch: Any) -> None:
        """What the next forward pass gets; what modules inside it get is not counted."""
        if self._tokens is _UNKNOWN:
            self._tokens = token_count(batch)

    def record(self, kind: str, begin: int, **details: Any) -> None:
        if kind == "forward":
            details |= self._number_forward(details.pop("step", "training_step"))
        elif kind == "backward":
            details |= self._last
            self._last = {}
        super().record(kind, begin, **details)

    def _number_forward(self, step: str) -> dict[str, Any]:
        tokens, self._tokens = self._tokens, _UNKNOWN
        known = {} if tokens is _UNKNOWN or tokens is None else {"tokens": tokens}
        if step != "training_step":
            return {"step": step, **known}
        self._last = {"microbatch": self._forwards, **known}
        self._forwards += 1
        return self._last


class Phases:
    """Forward, backward and optimizer from Lightning's hooks, one after another, where no engine tells.

    Args:
        tracer: gets the spans.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._kind = ""
        self._begin = 0

    def enter(self, kind: str) -> None:
        """End what goes on and begin something else."""
        self.leave()
        self._kind, self._begin = kind, time.monotonic_ns()

    def leave(self) -> None:
        """End what goes on, if anything does."""
        if self._kind:
            self._tracer.record(self._kind, self._begin)
        self._kind = ""
