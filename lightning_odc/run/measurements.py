"""What a loader learns from: the times of microbatches, and which of them ran out of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_odc.balance.learnt import Sums
from lightning_odc.data.learning import Learning
from lightning_odc.data.minibatch import MicrobatchFacts, Minibatch


@dataclass
class _Timed:
    """A microbatch that is measured."""

    lengths: Sequence[Any]  # as `MicrobatchFacts` has them
    seconds: float = 0.0


class Measured(NamedTuple):
    """What a rank tells the others about an optimizer step. It travels as JSON."""

    times: Sums  # empty if nothing learns from them
    ran_out: list[tuple[int, int]]  # `size_of` the microbatches that did
    contradiction: str = ""  # what an audit has found, see Note [The proof continues]


class Measurements:
    """Measures microbatches: seconds, less the engine's waits, and what ran out of memory."""

    def __init__(
        self,
        waits: Callable[[], float],
        device: torch.device,
        warn: Callable[[str], object],
        times: bool = True,
    ) -> None:
        """Nothing is measured yet.

        Args:
            waits: Returns the seconds that this rank has waited for others so far.
            device: The device whose work is part of the time.
            warn: Shows a text to the user.
            times: Whether times may change plans: not where runs must be bit-equal, or waits are not known.
        """
        self.ran_out: list[tuple[int, int]] = []  # `size_of` what did in this optimizer step
        self.contradiction = ""  # found in this optimizer step
        self._waits = waits
        self._times = times
        self._device = device
        self._warn = warn
        self._learning: Learning | None = None
        self._number = 0  # of the minibatch
        self._timed: list[_Timed] = []  # in this optimizer step
        self._current: _Timed | None = None  # of them, the microbatch at hand
        self._is_running = False

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        self._current = None
        origin = minibatch.origin
        if origin is not None:
            self._learning = origin.learning
            self._number = origin.number

    def begin(self, detail: MicrobatchFacts | None) -> None:
        """What runs from now on works on this microbatch."""
        self._current = None
        learning = self._learning if self._times else None
        if detail is not None and learning is not None and learning.measures(self._number):
            self._current = _Timed(detail.lengths)
            self._timed.append(self._current)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what belongs to the current microbatch."""
        current = self._current
        if current is None or self._is_running:
            yield
            return
        begin = self._now()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
        current.seconds += self._now() - begin

    def forget(self) -> None:
        """The current microbatch broke off: its time says nothing about its lengths."""
        if self._current is not None:
            self._timed.pop()
            self._current = None

    def take(self) -> Measured:
        """Times of an optimizer step, and what ran out of memory in it."""
        times: Sums = []
        if self._learning is not None and self._learning.cost is not None:
            counted = [(timed.lengths, timed.seconds) for timed in self._timed if timed.seconds > 0]
            times = self._learning.cost.sums_of(counted)
        ran_out = self.ran_out
        contradiction = self.contradiction
        self._timed = []
        self._current = None
        self.ran_out = []
        self.contradiction = ""
        return Measured(times, ran_out, contradiction)

    def report(self, by_rank: Sequence[Measured]) -> None:
        """Tell the loader what `take` returned on every rank, and the user if a cap fell."""
        learning = self._learning
        if learning is None:
            return
        before = learning.max_tokens
        times = [measured.times for measured in by_rank]
        learning.observe(self._number, times, [measured.ran_out for measured in by_rank])
        after = learning.max_tokens
        if after == before:
            return
        ranks = [rank for rank, measured in enumerate(by_rank) if measured.ran_out]
        self._warn(
            f"max_tokens falls from {before} to {after} for the plans that follow: microbatches ran out of memory on "
            f"rank {ranks[-1]}. To start with it, write max_tokens={after}."
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._waits()
