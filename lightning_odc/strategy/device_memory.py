"""How much memory microbatches take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_odc.data.memory_cap import LaggedCap
from lightning_odc.data.minibatch import Detail, Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.engine.keeping import CudaMemory
from lightning_odc.strategy.out_of_memory import Relief


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def begin(self) -> int:
        """What is held now; `peak` counts from here on."""

    def peak(self) -> int:
        """The most that was held since `begin`."""

    def usable(self) -> int:
        """What this process could hold in all."""


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; ``None`` for a CPU, whose memory other processes share."""
    return CudaMemory(device) if device.type == "cuda" else None


class MemoryMeter:
    """Measures the memory of minibatches and records where it ran out, for the loader's caps, if it has any.

    Args:
        memory: The memory of this rank's device, if the device reports it.
        engine: The engine. What it keeps is given back when microbatches need it, and so counts as free.
    """

    def __init__(self, memory: DeviceMemory | None, engine: Engine) -> None:
        self._memory = memory
        self._engine = engine
        self._cap: LaggedCap | None = None
        self._number = self._base = self._tokens = 0
        self._is_open = False

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        origin = minibatch.origin
        if origin is None or origin.cap is None:
            return
        self._cap, self._number = origin.cap, origin.number
        if (
            self._memory is not None and self._cap.measures and not self._is_open
        ):  # the first of an optimizer step
            self._is_open, self._tokens, self._base = True, 0, self._memory.begin()
            self._engine.leave_room(2.0)  # a cap at most doubles

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        if detail is not None and self._is_open:
            self._tokens = max(self._tokens, sum(detail.lengths))

    def take(self, reliefs: Sequence[Relief] = ()) -> list[Any] | None:
        """What all ranks must know of this optimizer step; ``None`` if that is nothing. It is forgotten here.

        Args:
            reliefs: The microbatches of this rank that were not run as planned.

        Returns:
            The minibatch's number, the fields of a `MemoryUse` or ``None``, and of each microbatch those of a `RanOut`.
        """
        use, ran_out = self._use(), _ran_out(reliefs)
        return [self._number, use, ran_out] if use or ran_out else None

    def _use(self) -> list[int] | None:
        if self._memory is None or not self._is_open:
            return None
        self._is_open = False
        if not self._tokens:
            return None
        peak = self._memory.peak() - self._engine.kept_bytes
        return [self._tokens, self._base, peak, self._memory.usable()]

    def report(self, by_rank: Sequence[Sequence[Any] | None]) -> None:
        """Tell the loader what all ranks measured, and the user if a cap fell."""
        if self._cap is None:
            return
        before = self._cap.cap.value
        self._cap.observe(by_rank)
        after = self._cap.cap.value
        ran_out = [(max(one[2])[0], rank) for rank, one in enumerate(by_rank) if one is not None and one[2]]
        if ran_out and after != before:
            tokens, rank = max(ran_out)
            begin = "" if self._cap.measures else f" To start with it, write max_tokens={after}."
            rank_zero_warn(
                f"max_tokens falls from {before} to {after} for the plans that follow: a microbatch of {tokens or '?'} "
                f"tokens ran out of memory on rank {rank}.{begin}"
            )


def _ran_out(reliefs: Sequence[Relief]) -> list[list[int]]:
    """The largest part of each microbatch that ran out of memory, as the fields of a `RanOut`."""
    whole: dict[int, list[int]] = {}
    for relief in reliefs:
        if relief.reason == "memory":
            part = [relief.tokens, relief.samples]
            whole[relief.index] = max(whole.get(relief.index, part), part)
    return list(whole.values())
