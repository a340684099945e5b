"""A model whose layers sleep as long as they are told: real processes, sharding and protocol, and no work."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from .models import BenchModule

LAYERS = 3
WIDTH = 64


class Pause(torch.autograd.Function):
    """Sleeps a third of the seconds in the forward pass and the rest in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grads[0], None


class SleepingLayer(nn.Module):
    """One unit: a few parameters, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        y: Tensor = Pause.apply(x * self.scale, seconds)  # type: ignore[no-untyped-call]
        return y + self.shift


class SleepingModel(BenchModule):
    """An emulated model; a microbatch is its tokens and its time.

    Args:
        slowness: The slowness of this device.
    """

    def __init__(self, slowness: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer() for _ in range(LAYERS))
        self.slowness = slowness

    def compute(self, microbatch: Tensor) -> tuple[Tensor, int]:
        tokens, seconds = int(microbatch[0]), float(microbatch[1]) * self.slowness
        x = torch.ones(WIDTH)
        for layer in self.layers:
            x = layer(x, seconds / LAYERS)
        return x.square().mean() * tokens, tokens
