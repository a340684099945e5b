"""One rank's spans, with the microbatches that they belong to."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.timeline.spans import COLLECTIVES, RankTimeline, Timeline
from lightning_odc.data.minibatch import token_count
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Tracer

_UNKNOWN = object()


class MicrobatchTracer(Tracer):
    """A tracer that numbers the forward and backward passes of an optimizer step."""

    # A backward pass belongs to the forward pass before it, once; one without (the loss of an empty share)
    # stays without a number.

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
            tokens, self._tokens = self._tokens, _UNKNOWN
            known = {} if tokens is _UNKNOWN or tokens is None else {"tokens": tokens}
            if details.get("step", "training_step") == "training_step":
                details.pop("step", None)
                known = self._last = {"microbatch": self._forwards, **known}
                self._forwards += 1
            details |= known
        elif kind == "backward":
            details |= self._last
            self._last = {}
        super().record(kind, begin, **details)


_OVERHEAD = 0.01
_FIRST_PAUSE = 2.0


class Recording:
    """What one rank has recorded so far. Call `release` at the end."""

    def __init__(
        self,
        run: Timeline,  # without ranks
        own: RankTimeline,  # without spans
        origin_ns: int,  # rank 0's clock at the beginning
        capacity: int,
        engine: Engine | None,
        module: nn.Module,
    ) -> None:
        self.run = run
        self.own = own
        self.tracer = MicrobatchTracer(capacity)
        self.step: int | None = None  # the optimizer step that is being recorded, if one is
        self.complete = False  # whether all that was asked for is recorded
        self._engine = engine  # which traces what it does; ``None`` to go by Lightning's hooks alone
        self._module = module  # the module whose inputs are looked at to count tokens
        self._phase, self._phase_began = "", 0  # by the hooks, without an engine
        self._hook: RemovableHandle | None = None
        self._shift = origin_ns + own.offset_ns
        self._step_began = 0
        self._gap_began = time.monotonic_ns()
        self._not_before = 0.0

    def begin_epoch(self) -> None:
        """Count waits as waits for data from now on."""
        self._gap_began = time.monotonic_ns()

    def begin_batch(self, step: int, batch: Any) -> None:
        """A batch of a step that is to be recorded begins."""
        self.tracer.record("data", self._gap_began)
        if self.step != step:
            self.step, self._step_began = step, time.monotonic_ns()
            self.tracer.begin_step()
        if self._hook is None:
            self._hook = self._module.register_forward_pre_hook(self._see_forward)
            if self._engine is not None:
                self._engine.listen(self.tracer)
        if self._engine is None:
            self.tracer.see_input(batch)
            self.enter("forward")

    def enter(self, kind: str) -> None:
        """A hook says what comes now."""
        if self._engine is None and self.step is not None:
            self.leave()
            self._phase, self._phase_began = kind, time.monotonic_ns()

    def leave(self) -> None:
        """A hook says that what went on is over."""
        if self._phase:
            self.tracer.record(self._phase, self._phase_began)
        self._phase = ""

    def end_batch(self, next_step: int, wanted: bool) -> None:
        """A batch ends; what comes next is of ``next_step``, and ``wanted`` or not."""
        self.leave()
        if self.step is not None and next_step != self.step:
            self._end_step()
        if not wanted:
            self.release()
        self._gap_began = time.monotonic_ns()

    def end_gap(self, kind: str) -> None:
        """What went on between two batches until now was loading data, or validation."""
        if self._hook is not None:
            self.tracer.record(kind, self._gap_began)
        self._gap_began = time.monotonic_ns()

    def interrupt(self) -> None:
        """Training ends in the middle of something: keep what is known of it."""
        self.leave()
        if self.step is not None:
            self._end_step()
        self.release()

    def release(self) -> None:
        """Stop listening. Idempotent."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        if self._engine is not None:
            self._engine.unlisten(self.tracer)

    def timeline(self) -> Timeline:
        """This rank's timeline so far."""
        shift = self._shift
        spans = [one._replace(begin=one.begin - shift, end=one.end - shift) for one in self.tracer.spans]
        own = replace(self.own, spans=spans, dropped=self.tracer.dropped, complete=self.complete)
        seen = self.run.waiting_seen or any(span.kind in COLLECTIVES for span in spans)
        return replace(self.run, ranks=[own], waiting_seen=seen, notes=list(self.run.notes))

    def may_save(self) -> bool:
        """Whether saving now would cost less than 1 percent of the time since it was last done."""
        return time.monotonic() >= self._not_before

    def saved(self, began: float) -> None:
        """Saving began at ``began`` and ends now."""
        now = time.monotonic()
        self._not_before = now + max(_FIRST_PAUSE, (now - began) / _OVERHEAD)

    def _see_forward(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._engine is not None and inputs:
            self.tracer.see_input(inputs[0])

    def _end_step(self) -> None:
        self.tracer.record("minibatch", self._step_began, number=self.step)
        self.step = None
