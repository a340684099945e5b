"""The contract between the monitor and whatever lets it see a strategy's waiting."""

from __future__ import annotations

from typing import Any

from lightning_odc.callbacks.idle.step_numbers import IdleCause, Meeting


class Watch:
    """Sees nothing: what is left where a strategy has no door to look in by.

    Attributes:
        complete: whether all the waiting for other ranks that the documentation lists is seen. Without it nothing
            can be said about idle time as a whole.
    """

    complete = False

    def begin_batch(self) -> None:
        """A Lightning batch begins."""

    def before_backward(self) -> None:
        """Lightning's backward pass begins."""

    def after_backward(self) -> None:
        """Lightning's backward pass is over."""

    def waits(self) -> dict[IdleCause, float]:
        """Seconds of waiting since the start that this rank knows alone."""
        return {}

    def take_meetings(self) -> list[Any]:
        """What is known of the collectives of the step that has just ended, for `read`."""
        return []

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        """When this rank entered and left these collectives, in order.

        Args:
            taken: by `take_meetings`.
            wait: for a device that has not come so far; else the answer may be ``None``, not yet.
        """
        return taken

    def release(self) -> None:
        """Leave everything as it was found. Idempotent."""
