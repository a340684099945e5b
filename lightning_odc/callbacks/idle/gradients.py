"""Waiting under ``DistributedDataParallel``: from a rank's last own gradient to the end of ``backward``.

Note [Where data parallel ranks wait]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
DDP reduces gradients bucket by bucket beside the backward pass, and only the end of ``backward`` waits for all of
them. A rank hands in its last bucket when its last gradient is there; no rank leaves before all have done so. So from
its own last gradient to the last rank's last gradient a rank waits, and what follows is moving bytes. It is one
collective per backward pass in the sense of Note [Waiting inside a collective], entered with the last gradient and
left with the end of ``backward``. Backward passes of batches that only accumulate do not meet and do not count.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from lightning_odc.callbacks.idle.step_numbers import Meeting
from lightning_odc.callbacks.idle.watch import Watch


class GradientWatch(Watch):
    """See Note [Where data parallel ranks wait]. Enters by the public hook after a parameter's gradient.

    On CUDA devices moments are events on the compute stream, read when they have passed, without waiting for them;
    as events of different devices have no common clock, meetings are given as ``(-duration, 0)``.

    Args:
        module: whose parameters.
        device: of this rank.
    """

    complete = True

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._stamp = _CudaStamps() if device.type == "cuda" else _HostStamps()
        self._batch: list[Any] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._see_gradient)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def begin_batch(self) -> None:
        self._batch.clear()

    def before_backward(self) -> None:
        self._stamp.enter()

    def after_backward(self) -> None:
        self._batch.append(self._stamp.leave())

    def take_meetings(self) -> list[Any]:
        batch, self._batch = self._batch, []
        return batch

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        return self._stamp.read(taken, wait)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see_gradient(self, _: Any) -> None:
        self._stamp.enter()


class _HostStamps:
    """Moments of the host's monotonic clock; a later `enter` replaces an earlier one."""

    def __init__(self) -> None:
        self._entered = 0

    def enter(self) -> None:
        self._entered = time.monotonic_ns()

    def leave(self) -> Any:
        return self._entered, time.monotonic_ns()

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        return taken


class _CudaStamps(_HostStamps):
    """Moments of the device's current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._event = torch.cuda.Event(enable_timing=True)

    def enter(self) -> None:
        self._event.record()

    def leave(self) -> Any:
        entered, self._event = self._event, torch.cuda.Event(enable_timing=True)
        left = torch.cuda.Event(enable_timing=True)
        left.record()
        return entered, left

    def read(self, taken: list[Any], wait: bool) -> list[Meeting] | None:
        for _, left in taken:
            if wait:
                left.synchronize()
            elif not left.query():
                return None
        return [(-round(entered.elapsed_time(left) * 1e6), 0) for entered, left in taken]
