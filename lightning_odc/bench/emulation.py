"""Emulated devices: everything is real except the layers' work. For that, a rank sleeps as long as a cost model says.

Note [Emulated devices]
~~~~~~~~~~~~~~~~~~~~~~~
Processes, Lightning, ``fully_shard``, engine, transport, protocol and plans are the real ones; parameters are few, and
a layer's forward pass sleeps a third of its part of the microbatch's time, its backward pass two thirds. A sleeping
rank needs no core, so many ranks fit on few cores, and the protocol decides who waits for whom, not a formula.

What is real *and* takes processor time (Python, the bytes of the small shards) is not sped up with the devices, and the
ranks share the cores for it. So sleeping has to dominate. First, the time of a minibatch without any sleep is measured,
with all ranks running, under the slowest communication that is compared. Then the unit of time is chosen so long that
this time is a fiftieth of a minibatch (``--seconds-per-minibatch`` overrides). The time is reported, as is the share of
the cores that was busy.

What is not emulated: the time that large shards take on a real interconnect, overlap of communication with computing,
memory, and devices whose speed changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_odc.balance.costs import Cost, pair_of
from lightning_odc.bench.models import BenchModule

LAYERS = 3
WIDTH = 64
OVERHEAD_FRACTION = 0.02
SHORTEST_MINIBATCH, LONGEST_MINIBATCH = 1.0, 20.0


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
        by_hand: Whether the strategy does not unroll a `Minibatch`.
    """

    def __init__(self, slowness: float = 1.0, by_hand: bool = False) -> None:
        super().__init__(by_hand)
        self.layers = nn.ModuleList(SleepingLayer() for _ in range(LAYERS))
        self.slowness = slowness

    def compute(self, microbatch: Tensor) -> tuple[Tensor, int]:
        tokens, seconds = int(microbatch[0]), float(microbatch[1]) * self.slowness
        x = torch.ones(WIDTH)
        for layer in self.layers:
            x = layer(x, seconds / LAYERS)
        return x.square().mean() * tokens, tokens


def collate_by(cost: Cost, seconds_per_cost: float) -> Callable[[Sequence[Tensor]], Tensor]:
    """What makes a microbatch of samples, whose one element is their length: ``[tokens, seconds]``, float64."""

    def collate(samples: Sequence[Tensor]) -> Tensor:
        lengths = np.array([float(sample[0]) for sample in samples])
        pairs = (lengths.sum() ** 2 - (lengths**2).sum()) / 2
        total = cost.samples(lengths).sum() + cost.overhead.mean() + pair_of(cost).mean() * pairs
        return torch.tensor([lengths.sum(), float(total) * seconds_per_cost], dtype=torch.float64)

    return collate


def seconds_per_cost(overhead: float, cost_per_minibatch: float, wanted: float | None) -> float:
    """The unit of time, see Note [Emulated devices].

    Args:
        overhead: Seconds of a minibatch in which no rank sleeps.
        cost_per_minibatch: The cost of an average minibatch on its busiest rank.
        wanted: Seconds of an average minibatch, if they were chosen.
    """
    seconds = wanted or min(max(overhead / OVERHEAD_FRACTION, SHORTEST_MINIBATCH), LONGEST_MINIBATCH)
    return seconds / cost_per_minibatch
