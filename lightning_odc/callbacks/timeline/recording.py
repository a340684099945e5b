"""One rank's spans, with the microbatches that they belong to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.timeline.clocks import Clock
from lightning_odc.callbacks.timeline.spans import COLLECTIVES, RankTimeline, Timeline
from lightning_odc.data.batch_size import token_count
from lightning_odc.engine.base import Engine
from lightning_odc.engine.tracing import Span, Tracer

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
    """Forward, backward and optimizer, one after another, from Lightning's hooks, if there is no engine."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer  # the tracer that gets the spans
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


_OVERHEAD = 0.01
_FIRST_PAUSE = 2.0


@dataclass(frozen=True)
class RunFacts:
    """What the ranks of a recording agreed on when training began."""

    name: str  # distinguishes this run from earlier ones in the same directory
    origin_ns: int  # rank 0's clock at the beginning
    world_size: int  # number of ranks
    strategy: str  # name of the strategy, for people
    notes: list[str]  # what cannot be seen under this strategy
    waits: bool  # whether the engine traces waits


class Recording:
    """What one rank has recorded so far. Call `release` at the end."""

    def __init__(
        self, run: RunFacts, rank: int, clock: Clock, capacity: int, engine: Engine | None, module: nn.Module
    ) -> None:
        self.run = run  # what the ranks agreed on
        self.rank = rank
        self.clock = clock
        self.tracer = MicrobatchTracer(capacity)
        self.step: int | None = None  # the optimizer step that is being recorded, if one is
        self.complete = False  # whether all that was asked for is recorded
        # the engine, which traces what it does, or ``None`` to go by Lightning's hooks alone
        self._engine = engine
        self._module = module  # the module whose inputs are looked at to count tokens
        self._phases = Phases(self.tracer) if engine is None else None
        self._hook: RemovableHandle | None = None
        self._step_began = 0
        self._gap_began = time.monotonic_ns()
        self._not_before = 0.0

    # -- what happens -------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Count waits as waits for data from now on."""
        self._gap_began = time.monotonic_ns()

    def begin_batch(self, step: int, batch: Any) -> None:
        """A batch of a step that is to be recorded begins."""
        self.tracer.record("data", self._gap_began)
        if self.step != step:
            self.step, self._step_began = step, time.monotonic_ns()
            self.tracer.begin_step()
        self._listen()
        if self._phases is not None:
            self.tracer.see_input(batch)
            self._phases.enter("forward")

    def enter(self, kind: str) -> None:
        """A hook says what comes now."""
        if self._phases is not None and self.step is not None:
            self._phases.enter(kind)

    def leave(self) -> None:
        """A hook says that what went on is over."""
        if self._phases is not None:
            self._phases.leave()

    def end_batch(self, next_step: int, wanted: bool) -> None:
        """A batch ends; what comes next is of ``next_step``, and ``wanted`` or not."""
        self.leave()
        if self.step is not None and next_step != self.step:
            self._end_step()
        if not wanted:
            self.release()
        self._gap_began = time.monotonic_ns()

    def begin_validation(self) -> None:
        """Validation is not loading data."""
        if self._hook is not None:
            self.tracer.record("data", self._gap_began)
        self._gap_began = time.monotonic_ns()

    def end_validation(self) -> None:
        """What comes now is loading data again."""
        if self._hook is not None:
            self.tracer.record("validation", self._gap_began)
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

    # -- what is known ------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """This rank's timeline so far."""
        shift = self.run.origin_ns + self.clock.offset_ns
        spans = [
            Span(kind, begin - shift, end - shift, details) for kind, begin, end, details in self.tracer.spans
        ]
        rank = RankTimeline(
            self.rank,
            self.clock.host,
            spans,
            dropped=self.tracer.dropped,
            complete=self.complete,
            offset_ns=self.clock.offset_ns,
            uncertainty_ns=self.clock.uncertainty_ns,
        )
        seen = self.run.waits or any(span.kind in COLLECTIVES for span in spans)
        return Timeline(
            [rank], self.run.world_size, self.run.strategy, self.run.name, seen, list(self.run.notes)
        )

    def may_save(self) -> bool:
        """Whether saving now would cost less than 1 percent of the time since it was last done."""
        return time.monotonic() >= self._not_before

    def saved(self, began: float) -> None:
        """Saving began at ``began`` and ends now."""
        now = time.monotonic()
        self._not_before = now + max(_FIRST_PAUSE, (now - began) / _OVERHEAD)

    def _listen(self) -> None:
        if self._hook is not None:
            return
        self._hook = self._module.register_forward_pre_hook(self._see_forward)
        if self._engine is not None:
            self._engine.listen(self.tracer)

    def _see_forward(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._engine is not None and inputs:
            self.tracer.see_input(inputs[0])

    def _end_step(self) -> None:
        self.tracer.record("minibatch", self._step_began, number=self.step)
        self.step = None
