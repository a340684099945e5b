"""What was known after each of the latest minibatches; see Note [Plans of what everybody knows]."""

from __future__ import annotations

from typing import Generic, TypeVar

Known = TypeVar("Known")


class History(Generic[Known]):
    """Values that are learnt from minibatches, as each plan may use them.

    Args:
        first: What is known before any minibatch.

    Attributes:
        lag: The number of minibatches that a plan is behind.
        begun: The number of minibatches that were handed out so far.
    """

    def __init__(self, first: Known) -> None:
        self.lag = 1
        self.begun = 0
        self.known: list[tuple[int, Known]] = [(-1, first)]

    def at(self, number: int) -> Known:
        """What minibatch ``number`` is planned with."""
        usable = [value for last, value in self.known if last <= number - self.lag]
        return usable[-1] if usable else self.known[0][1]

    def begin(self) -> int:
        """The number of the minibatch that is handed out now."""
        self.begun += 1
        return self.begun - 1

    def learn(self, number: int, value: Known) -> None:
        """Record what is known after minibatch ``number``."""
        self.known.append((number, value))

    def forget(self) -> None:
        """Drop what no plan will ask for again."""
        old = [index for index, (last, _) in enumerate(self.known) if last <= self.begun - self.lag]
        del self.known[: old[-1] if old else 0]
