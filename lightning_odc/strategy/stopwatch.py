"""How long microbatches take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_odc.data.learning import DelayedCost, Measurement
from lightning_odc.data.minibatch import Detail, Minibatch

_MOST_LENGTHS = 2000
"""Of a rank, in one record: a record has 64 KiB, and so many lengths tell a cost all it can learn in one step."""


class Stopwatch:
    """Measures how long microbatches take, for a cost that learns, if the loader has one.

    The time of a microbatch is the wall time of its forward and backward pass, less the engine's measured waits. Data
    loading, the optimizer and logging are not in it. What was measured travels with the record that ends an optimizer
    step.
    """

    def __init__(self, waits: Callable[[], float], device: torch.device) -> None:
        self._waits = waits  # returns the seconds that this rank has waited for others so far
        self._device = device
        self._cost: DelayedCost | None = None
        self._number = 0
        self._measured: list[tuple[list[Any], float]] = []
        self._measures = False
        self._is_set = False

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        self._is_set = False
        origin = minibatch.origin
        if origin is not None and origin.cost is not None:
            self._cost, self._number = origin.cost, origin.number
            self._measures = origin.cost.measures(origin.number)

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        self._is_set = self._measures and detail is not None
        if self._is_set and detail is not None:
            self._measured.append((detail.lengths, 0.0))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what belongs to the current microbatch."""
        if not self._is_set:
            yield
            return
        begin = self._now()
        yield
        lengths, seconds = self._measured.pop()
        self._measured.append((lengths, seconds + self._now() - begin))

    def forget(self) -> None:
        """The current microbatch broke off: its time says nothing about its lengths."""
        if self._is_set:
            self._measured.pop()
            self._is_set = False

    def take(self) -> tuple[list[Measurement], list[Any] | None]:
        """What all ranks must know at the end of an optimizer step. It is forgotten here.

        Returns:
            What was measured since the last call, at most 2000 lengths of it, evenly chosen; and what the cost posts.
        """
        measured, self._measured = self._measured, []
        self._is_set = False
        count = sum(np.size(lengths) for lengths, _ in measured)
        some = measured[:: max(-(-count // _MOST_LENGTHS), 1)]
        posted = None if self._cost is None else self._cost.post(self._number)
        return [(lengths, seconds) for lengths, seconds in some if seconds > 0], posted

    def report(self, by_rank: Sequence[tuple[Sequence[Measurement], list[Any] | None]]) -> None:
        """Tell the loader what `take` returned on every rank."""
        if self._cost is not None:
            self._cost.observe(by_rank)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._waits()
