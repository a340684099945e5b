"""Signals of the operating system, as the ranks tell each other of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Signals:
    """Signals of the operating system, which ranks act on together.

    Attributes:
        raised: numbers of those that this rank was sent, to tell the others at every meeting.
        agreed: those that some rank had been sent before the last meeting; the same on all ranks.
    """

    raised: set[int] = field(default_factory=set)
    agreed: set[int] = field(default_factory=set)

    def forget(self, number: int) -> None:
        """All ranks have acted on it."""
        self.raised.discard(number)
        self.agreed.discard(number)
