"""Sums the gradients of a unit on this rank, so that they are added to their owners once per minibatch.

Note [Added once per minibatch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every microbatch has a gradient of every unit, and adding it to the owners moves the whole unit each time. Only the sum
over the minibatch counts. So where memory is left, a rank sums the gradients of a unit in a tensor of its own, in the
dtype of the accumulators, and adds the sum: in the backward pass of its last microbatch, as soon as that has the
gradient of the unit. A rank that does not know which one is its last (work stealing) adds when nothing is left to take.
Other ranks do not notice, so every rank decides for itself, as in Note [Read once per minibatch].

A microbatch that breaks off changes nothing about this: what it had added to a sum stays there as it would have stayed
in the accumulators, see Note [Added once].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import Segment
from lightning_odc.engine.unit_window import UnitWindow


class UnitSum:
    """The gradients of one unit that this rank has not added to their owners yet."""

    def __init__(self, window: UnitWindow) -> None:
        self._window = window
        spec = window.spec
        self._shape = (window.owners, spec.grad_numel)
        self.size = math.prod(self._shape) * spec.grad_dtype.itemsize  # bytes of the sum
        self.moved = 0  # bytes of this minibatch's gradients, which adding each of them by itself would move
        self.waits = False  # gradients of microbatches that are not the last one are summed here
        self._total: Tensor | None = None
        self._parts: set[tuple[int, int]] = set()  # of each owner's row, begin and end: what has a gradient
        self._written: torch.cuda.Event | None = None  # `fully_shard` reduces on a stream of its own

    def add(self, chunks: Tensor, segments: Sequence[Segment], is_last: bool) -> None:
        """Take in the gradient of a microbatch, ``[owners * numel]``; see `UnitWindow.accumulate`."""
        self.moved += chunks.nbytes
        if self._total is None and self.waits and not is_last:
            # A microbatch that broke off here could not be taken back: see Note [Added once].
            with contextlib.suppress(RuntimeError):  # out of memory
                self._total = chunks.new_empty(self._shape, dtype=self._window.spec.grad_dtype)
        if self._total is None or (not self._parts and (is_last or not self.waits)):
            self._window.accumulate(chunks, segments)
            return
        rows = chunks.view(len(self._total), -1)
        if not self._parts and rows.shape == self._total.shape:
            self._total.copy_(rows)
        else:
            if not self._parts:
                self._total.zero_()
            for part in segments:
                self._total.narrow(1, part.target, part.numel).add_(rows.narrow(1, part.source, part.numel))
        self._parts |= {(part.target, part.target + part.numel) for part in segments}
        if self._total.is_cuda:
            self._written = torch.cuda.current_stream(self._total.device).record_event()
        if is_last:
            self.give()

    def give(self) -> None:
        """Add the sum to the owners."""
        if self._parts and self._total is not None:
            if self._written is not None:
                torch.cuda.current_stream(self._total.device).wait_event(self._written)
            parts, self._parts = _united(self._parts), set()
            rows = self._total
            if parts != [(0, rows.shape[1])]:
                rows = torch.cat([rows[:, begin:end] for begin, end in parts], 1)
            segments, source = [], 0
            for begin, end in parts:
                segments.append(Segment(begin, source, end - begin))
                source += end - begin
            self._window.accumulate(rows.view(-1), segments)

    def clear(self, start: int, numel: int) -> None:
        """Forget a part of each owner's row: the gradients of a parameter were dropped."""
        if self._parts and self._total is not None:
            self._total[:, start : start + numel].zero_()

    def release(self) -> None:
        """Add the sum to the owners, and free its memory."""
        self.give()
        self.waits = False
        if self._total is not None and self._total.is_cuda:  # another stream may still read it
            self._total.record_stream(torch.cuda.current_stream(self._total.device))
        self._total = None


def _united(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs without overlap: ``(0, 6), (4, 6), (6, 7), (9, 12)`` become ``(0, 7), (9, 12)``."""
    runs: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if runs and begin <= runs[-1][1]:
            begin, before = runs.pop()
            end = max(before, end)
        runs.append((begin, end))
    return runs
