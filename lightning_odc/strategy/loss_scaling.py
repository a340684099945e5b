"""Loss scaling for fp16: as torch's, on any device, for gradients that may be missing or clipped by hand.

Note [Weights under fp16]
~~~~~~~~~~~~~~~~~~~~~~~~~
The gradient of ``w_m L_m`` is ``w_m`` times that of ``L_m``, and a loss that is summed over ``n`` items is ``n`` times
their mean. Weights are often numbers of tokens, and fp16 ends at 65504. So gradients would overflow until the loss
scale has shrunk by the size of the weights. The *weight unit* prevents that. It is a power of two near the weight of
one microbatch. Every weighted loss is divided by it before its backward pass, and so is the denominator of Note [Who
divides]. Dividing by a power of two changes no digits, except where numbers leave the range of their dtype.

Gradients of all ranks are added up, so all ranks need the same unit. They agree on it once, in the first step that has
weights. Each rank says the weight of its first microbatches when it comes to its first backward pass, or to the settle
if it had none. The unit is saved with the loss scale, which depends on it. bf16 has the range of fp32: its unit is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def unit_of(weights: Iterable[float]) -> float | None:
    """The power of two that is nearest to the mean of some weights; ``None`` if none of them is a positive number."""
    usable = [weight for weight in weights if 0 < weight < math.inf]
    return 2.0 ** round(math.log2(sum(usable) / len(usable))) if usable else None


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )
