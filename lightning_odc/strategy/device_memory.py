"""How much memory microbatches take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_odc.data.memory_cap import LaggedCap
from lightning_odc.data.minibatch import Detail, Minibatch


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def begin(self) -> int:
        """What is held now; `peak` counts from here on."""

    def peak(self) -> int:
        """The most that was held since `begin`."""

    def usable(self) -> int:
        """What this process could hold in all."""


class CudaMemory:
    """Of torch's allocator. It knows what was asked for without waiting for the device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; ``None`` for a CPU, whose memory other processes share."""
    return CudaMemory(device) if device.type == "cuda" else None


class MemoryMeter:
    """Measures the memory of minibatches, for a cap that follows it, if the loader has one.

    Args:
        memory: The memory of this rank's device, if it can be asked.
    """

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._cap: LaggedCap | None = None
        self._number = self._base = self._tokens = 0
        self._is_open = False

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        origin = minibatch.origin
        if self._memory is None or origin is None or origin.cap is None:
            return
        self._cap, self._number = origin.cap, origin.number
        if not self._is_open:  # the first of an optimizer step
            self._is_open, self._tokens, self._base = True, 0, self._memory.begin()

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        if detail is not None and self._is_open:
            self._tokens = max(self._tokens, sum(detail.lengths))

    def take(self) -> list[int] | None:
        """The minibatch's number and the fields of a `MemoryUse`; ``None`` if nothing ran. It is forgotten here."""
        if self._memory is None or not self._is_open:
            return None
        self._is_open = False
        if not self._tokens:
            return None
        return [self._number, self._tokens, self._base, self._memory.peak(), self._memory.usable()]

    def report(self, by_rank: Sequence[Sequence[int] | None]) -> None:
        """Tell the loader what all ranks measured."""
        if self._cap is not None:
            self._cap.observe(by_rank)
