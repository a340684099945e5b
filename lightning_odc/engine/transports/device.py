"""What the CUDA transport asks of the device that holds the windows: memory, streams, copies and additions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import UnitSpec


class Mark(Protocol):
    """A place in a stream, as ``torch.cuda.Event`` is."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Sleep until everything before it is done."""
        ...


@dataclass(frozen=True)
class DeviceFacts:
    """What one rank knows of its device before it opens a window; see ``preflight``."""

    name: str
    uuid: str  # tells devices of one host apart
    free: int  # bytes that a window may take
    index: int = 0  # its number in this process
    stack: str = ""  # versions of torch, CUDA and driver, for messages
    backend: str | None = "CUDA"  # what provides symmetric memory in this torch; ``None`` if nothing does
    is_rocm: bool = False  # an AMD device under the name of CUDA
    shares_device: bool = False  # several ranks on one device are allowed
    expandable: bool = False  # torch's allocator works with expandable segments
    socket: str = ""  # path of the socket by which torch hands handles over
    # By the uuid of another device that this process sees: whether this one can access its memory, and whether
    # additions to it are atomic.
    reaches: Mapping[str, bool] = field(default_factory=dict)
    atomics: Mapping[str, bool] = field(default_factory=dict)


class Device(ABC):
    """One rank's device. Everything but `facts`, `open` and `close` only asks for work, and does not wait for it."""

    @abstractmethod
    def facts(self) -> DeviceFacts:
        """What there is."""

    @abstractmethod
    def why_not_atomic(self, units: Sequence[UnitSpec]) -> str:
        """Why several ranks cannot add into one accumulator of these units; empty if they can.

        Afterwards `add_rows` is ready for them: nothing is compiled in the first backward pass.
        """

    @abstractmethod
    def add_plainly(self) -> None:
        """Add by reading and writing from now on, because a link between the devices does not add atomically.

        What an atomic addition over such a link does is not defined, not even where nothing else adds to its place.
        """

    @abstractmethod
    def create(self, size: int) -> None:
        """Make this rank's window of ``size`` zero bytes."""

    @abstractmethod
    def attach(self) -> list[Tensor]:
        """All ranks' windows as bytes, in rank order; all ranks call it together after `create`."""

    @abstractmethod
    def close(self) -> None:
        """Release the windows, of which no view may be left. Idempotent."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called first in every thread that waits for marks."""

    @abstractmethod
    def stream(self) -> Hashable:
        """The current stream."""

    @abstractmethod
    def wait_for(self, stream: Hashable) -> None:
        """Let the current stream wait for all work on ``stream`` so far."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark after all work on the current stream so far."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor from any window, or into any, on the current stream."""

    @abstractmethod
    def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
        """Add to all windows at once: row ``r`` goes to byte ``offset`` of rank ``r``'s window, in ``dtype``.

        No addition is lost to other ranks that add to the same place, unless `why_not_atomic` has a reason.

        Args:
            offset: Bytes from the begin of each window.
            dtype: Dtype of the sums.
            rows: Addends in any floating dtype, shape ``[world_size, numel]``, each row contiguous.
        """
