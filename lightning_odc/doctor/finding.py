"""One line of the doctor's: what was found, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        topic: The thing that was looked at, in one or two words.
        level: ``"ok"``, ``"warning"`` (it works, with a restriction), or ``"error"`` (the strategy cannot run so).
        message: The finding, in one sentence.
        remedy: What to do; empty if there is nothing to do.
    """

    topic: str
    level: Level
    message: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """The text for people: a line, and below it what to do."""
        line = f"{self.level:<8} {self.topic}: {self.message}"
        return f"{line}\n         -> {self.remedy}" if self.remedy else line


def summary(findings: Sequence[Finding]) -> str:
    """One line over all findings."""
    counts = {level: sum(one.level == level for one in findings) for level in ("error", "warning")}
    said = [f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count]
    if not said:
        return f"Everything is fine: {len(findings)} checks."
    return f"{' and '.join(said)} in {len(findings)} checks."
