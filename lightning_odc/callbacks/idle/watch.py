"""What a source of idle time looks like to the measurement."""

from __future__ import annotations

from typing import Any

from lightning_odc.callbacks.idle.summary import IdleCause, StepNumbers
from lightning_odc.callbacks.timeline.clocks import Passage
from lightning_odc.engine.base import Engine


class Watch:
    """Sees waiting for other ranks: what the engine has counted, which under some strategies is nothing."""

    samples = False  # it sees single steps only, those in whose numbers `end_step` sets ``seen``

    def __init__(self, complete: bool, engine: Engine | None = None, why: str = "") -> None:
        # All waiting for other ranks that the documentation lists is seen. Else nothing is said of idle as a whole.
        self.complete = complete
        self.why = why  # why it is not complete, if there is more to say than the name of the strategy
        self._engine = engine  # counts its waits, on demand and in lockstep
        self._meetings: list[Any] = []

    def begin_batch(self) -> None:
        """A Lightning batch begins."""

    def before_backward(self) -> None:
        """Lightning's backward pass begins."""

    def after_backward(self) -> None:
        """Lightning's backward pass is over."""

    def waits(self) -> dict[IdleCause, float]:
        """Seconds of waiting since the start that this rank knows alone."""
        counted = {} if self._engine is None else self._engine.waits
        return {IdleCause(cause): seconds for cause, seconds in counted.items()}

    def take_meetings(self) -> list[Any]:
        """What is known of the collectives of the step that has just ended, for `read`."""
        meetings, self._meetings = self._meetings, []
        return meetings

    def read(self, taken: list[Any], wait: bool) -> list[Passage] | None:
        """When this rank entered and left these collectives, in order."""
        # Without ``wait`` the answer may be ``None``: the device has not come so far.
        return taken

    def end_step(self, numbers: StepNumbers) -> None:
        """An optimizer step has ended, and the next one has not begun: the time now counts in neither."""

    def interrupt(self) -> None:
        """What comes now is not training: a step that is being looked at will not be a step like others."""

    def release(self) -> None:
        """Leave everything as it was found. Idempotent."""
