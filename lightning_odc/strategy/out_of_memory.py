"""Running out of memory inside a microbatch: what counts as that, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Relief:
    """One microbatch that was not run as it was planned.

    Attributes:
        tokens: Its tokens, padding included; 0 where they are not known.
        samples: The number of its samples; 0 where it is not known.
        index: Which microbatch of this rank's minibatch it is, from 0.
        action: Whether it was cut in two, or left out.
        reason: ``"memory"``, or ``"nonfinite"`` for a loss that is not finite.
    """

    tokens: int
    samples: int
    index: int
    action: Literal["split", "skip"]
    reason: Literal["memory", "nonfinite"]


class Reliefs:
    """What happened since the last settle; `Training` has one."""

    def __init__(self) -> None:
        self._reliefs: list[Relief] = []

    def note(self, relief: Relief) -> None:
        """Remember one."""
        self._reliefs.append(relief)

    def take_reliefs(self) -> list[Relief]:
        """All since the last call. They are forgotten here."""
        reliefs, self._reliefs = self._reliefs, []
        return reliefs
