"""A device made of host memory and threads: what the CUDA transport does can be seen without a GPU.

Windows are anonymous shared memory, so ranks may be threads or processes. With ``delays`` it is as asynchronous as a
GPU: every stream is a thread that does what it was asked for in order, late by random times.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lightning_odc.protocol.transports.base import Rendezvous, UnitSpec
from lightning_odc.protocol.transports.cuda import CudaTransport
from lightning_odc.protocol.transports.preflight import DeviceFacts
from lightning_odc.protocol.transports.shared_memory import HEADER_BYTES, Address, MappedWindow, RangeLock

_SECRET = bytes(32)
_LONGEST_DELAY = 300e-6
_LINKED = 8  # devices that add to each other's memory


class FakeStream:
    """A thread that does one thing after another."""

    def __init__(self, seed: int) -> None:
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, function: Callable[[], Any]) -> None:
        self._asked.put(function)

    def stop(self) -> None:
        self._asked.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (function := self._asked.get()) is not None:
            time.sleep(self._random.random() * _LONGEST_DELAY)
            function()


class FakeMark:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(30)


class FakeDevice:
    """One rank's device.

    Args:
        rank: this rank.
        rendezvous: of all ranks.
        delays: seed of the delays; ``None`` for a device that does at once what it is asked for.
        why_not: what `why_not_atomic` answers.
        **facts: other than those of a device that has everything.
    """

    def __init__(
        self, rank: int, rendezvous: Rendezvous, delays: int | None = None, why_not: str = "", **facts: Any
    ) -> None:
        self._rank = rank
        self._rendezvous = rendezvous
        self._why_not = why_not
        linked = {f"uuid{peer}": True for peer in range(_LINKED)}
        self._facts = replace(DeviceFacts("Fake", f"uuid{rank}", free=2**40, atomics=linked), **facts)
        self._regions: dict[int, MappedWindow] = {}
        self._here = threading.local()
        if delays is None:
            self._streams = []
        else:
            self._streams = [FakeStream(delays * 31 + rank * 7 + s) for s in range(3)]
        self.adds_plainly = False
        self.asked = {"copy": 0, "add": 0, "mark": 0}

    # -- streams ------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream current; 0 is current elsewhere."""
        before = self._current
        self._here.stream = stream
        yield
        self._here.stream = before

    @property
    def _current(self) -> int:
        return getattr(self._here, "stream", 0)

    def ask(self, function: Callable[[], Any]) -> None:
        """Let the current stream do something."""
        if self._streams:
            self._streams[self._current].ask(function)
        else:
            function()

    def stream(self) -> Hashable:
        return self._current

    @contextmanager
    def on_another_stream(self) -> Iterator[None]:
        with self.on(2):
            self.wait_for(0)
            yield

    def wait_for(self, stream: Hashable) -> None:
        assert isinstance(stream, int)
        if stream != self._current:
            self.ask(self._mark(stream).synchronize)

    def mark(self) -> Any:
        self.asked["mark"] += 1
        return self._mark(self._current)

    def _mark(self, stream: int) -> FakeMark:
        mark = FakeMark()
        with self.on(stream):
            self.ask(mark.passed.set)
        return mark

    def enter_thread(self) -> None:
        """Any thread can wait for a :class:`FakeMark`."""

    # -- work ---------------------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.asked["copy"] += 1
        half = target.numel() // 2
        self.ask(lambda: target[:half].copy_(source[:half]))
        self.ask(lambda: target[half:].copy_(source[half:]))

    def _add(self, target: Tensor, values: Tensor) -> None:
        self.asked["add"] += 1
        values = values.clone()  # `fully_shard` keeps them until the stream has gone by

        def atomically() -> None:
            lock = RangeLock(self._regions[self._owner_of(target)].fd, 0)
            while not lock.take():
                time.sleep(0)
            target.add_(values)
            lock.give()

        self.ask(atomically)

    def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
        begin = HEADER_BYTES + offset
        size = rows.size(1) * dtype.itemsize
        for owner, region in self._regions.items():
            self._add(region.memory[begin : begin + size].view(dtype), rows[owner])

    def _owner_of(self, view: Tensor) -> int:
        start = view.untyped_storage().data_ptr()
        return next(r for r, region in self._regions.items() if region.memory.data_ptr() == start)

    # -- windows ------------------------------------------------------------------------------------------

    def facts(self) -> DeviceFacts:
        return self._facts

    def why_not_atomic(self, units: Sequence[UnitSpec]) -> str:
        return self._why_not

    def add_plainly(self) -> None:
        self.adds_plainly = True

    def create(self, size: int) -> None:
        if size > self._facts.free:
            raise torch.OutOfMemoryError("CUDA out of memory")  # as the driver does
        self._regions[self._rank] = own = MappedWindow.create(HEADER_BYTES + size)
        own.write_header(_SECRET, self._rank)

    def attach(self) -> list[Tensor]:
        own = self._regions[self._rank]
        devices = self._rendezvous(self._facts.uuid)
        if len(set(devices)) < len(devices):
            raise RuntimeError("overlapping devices")  # as torch does
        rendezvous = self._rendezvous(Address(os.getpid(), own.fd))
        for peer, address in enumerate(rendezvous):
            if peer != self._rank:
                self._regions[peer] = MappedWindow.attach(peer, address, _SECRET, len(own.bytes))
        self._rendezvous(None)
        return [region.memory[HEADER_BYTES:] for _, region in sorted(self._regions.items())]

    def close(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.stop()
        for region in self._regions.values():
            region.close()
        self._regions.clear()


def fake_cuda(rank: int, world_size: int, rendezvous: Rendezvous, **options: Any) -> CudaTransport:
    """The CUDA transport on a :class:`FakeDevice`."""
    return CudaTransport(rank, world_size, rendezvous, FakeDevice(rank, rendezvous, **options))
