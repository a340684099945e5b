"""How long this rank itself worked on each microbatch, for a cost that learns.

Own work is wall time less the engine's measured waits, in forward and backward together; data loading, the optimizer
and logging are not in it. What was measured travels with the record that ends an optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_odc.data.learning import Learning, Measurement
from lightning_odc.data.minibatch import Detail, Minibatch

_MOST_SAMPLES = 2000
"""Of a rank, in one record: a record has 64 KiB, and so many lengths tell a cost all it can learn in one step."""


class Stopwatch:
    """Runs while a rank works, if the loader wants to know.

    Args:
        waits: seconds that this rank has waited for others so far.
        device: whose work is waited for before the clock is read.
    """

    def __init__(self, waits: Callable[[], float], device: torch.device) -> None:
        self._waits = waits
        self._device = device
        self._learning: Learning | None = None
        self._number = 0
        self._measured: list[tuple[int, list[int], float]] = []
        self._is_set = False

    def open(self, share: Minibatch) -> None:
        """A share of a minibatch begins."""
        self._is_set = False
        if share.origin is not None and share.origin.learning is not None:
            self._learning, self._number = share.origin.learning, share.origin.number

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        self._is_set = self._learning is not None and detail is not None
        if self._is_set and detail is not None:
            self._measured.append((self._number, detail.lengths, 0.0))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what belongs to the current microbatch."""
        if not self._is_set:
            yield
            return
        begin = self._now()
        yield
        number, lengths, seconds = self._measured.pop()
        self._measured.append((number, lengths, seconds + self._now() - begin))

    def take(self) -> list[Measurement]:
        """What was measured since the last call, at most 2000 samples of it, evenly chosen; then start anew."""
        measured, self._measured = self._measured, []
        self._is_set = False
        samples = sum(len(lengths) for _, lengths, _ in measured)
        return [row for row in measured[:: max(-(-samples // _MOST_SAMPLES), 1)] if row[2] > 0]

    def report(self, by_rank: Sequence[Sequence[Measurement]]) -> None:
        """Tell the loader what all ranks measured."""
        if self._learning is not None:
            self._learning.observe(by_rank)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._waits()
