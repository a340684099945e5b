"""Loss scaling for fp16: as torch's, on any device, for gradients that may be missing or clipped by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler(torch.amp.GradScaler):
    """A ``GradScaler`` that fits into Lightning's order of events.

    Sharded gradients agree by themselves on whether one of them, on any rank, is not finite: ``DTensor`` takes the
    maximum over ranks. So every rank skips the same steps and has the same scale.

    Args:
        device_type: on which the loss is.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._unscaled: list[Optimizer] = []

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, unless they are already.

        Clipping by hand needs it before the step does, and an empty minibatch leaves nothing to divide.
        """
        if optimizer not in self._unscaled and _has_gradients(optimizer):
            super().unscale_(optimizer)
            self._unscaled.append(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not _has_gradients(optimizer):
            return optimizer.step(*args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled or new_scale is not None:
            super().update(new_scale)
        self._unscaled.clear()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )
