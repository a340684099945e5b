"""The in-process body of the transport contract: ranks are threads that share tensors."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import torch
from torch import Tensor

from lightning_odc.protocol.transports.base import Transport, WindowSpec


class ThreadHub:
    """What the threads of one job share. Make one, then one `transport` per thread.

    Args:
        world_size: number of threads.
        timeout: seconds after which a rendezvous gives up.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.windows: dict[int, _ThreadWindow] = {}
        self.dead: set[int] = set()
        self._slots: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout)

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def rendezvous(self, rank: int, item: Any) -> list[Any]:
        """Every thread's item, in rank order."""
        self._slots[rank] = item
        self._barrier.wait()
        items = list(self._slots)
        self._barrier.wait()
        return items


class _ThreadLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        return self._lock.acquire(blocking=False)

    def give(self) -> None:
        self._lock.release()


class _ThreadWindow:
    def __init__(self, spec: WindowSpec) -> None:
        self.words = array("q", [0] * spec.words)
        self.mailboxes = [b""] * spec.mailboxes
        self.shards = [torch.zeros(u.shard_numel, dtype=u.shard_dtype) for u in spec.units]
        self.accumulators = [
            [torch.zeros(u.grad_numel, dtype=u.grad_dtype) for _ in range(spec.sources)] for u in spec.units
        ]
        self.locks = [_ThreadLock() for _ in range(len(spec.units) + 1)]  # the last one is that of claims


class ThreadTransport(Transport):
    """One thread's view of all windows of a `ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._spec = WindowSpec(units=(), words=0)

    def open(self, spec: WindowSpec) -> None:
        self._spec = spec
        self._hub.windows[self.rank] = _ThreadWindow(spec)
        self._hub.rendezvous(self.rank, None)

    def close(self) -> None:
        """Windows live as long as the hub: peers may still read them."""

    def shard(self, owner: int, unit: int) -> Tensor:
        return self._hub.windows[owner].shards[unit]

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        return self._hub.windows[owner].accumulators[unit][source]

    def lock(self, owner: int, unit: int) -> _ThreadLock:
        return self._hub.windows[owner].locks[unit]

    def load(self, owner: int, word: int) -> int:
        return self._hub.windows[owner].words[word]

    def store(self, word: int, value: int, owner: int | None = None) -> None:
        self._hub.windows[self.rank if owner is None else owner].words[word] = value

    def post(self, box: int, message: bytes) -> None:
        assert len(message) <= self._spec.mailbox_bytes
        self._hub.windows[self.rank].mailboxes[box] = message

    def fetch(self, owner: int, box: int) -> bytes:
        return self._hub.windows[owner].mailboxes[box]

    def dead_peers(self) -> list[int]:
        return sorted(self._hub.dead - {self.rank})
