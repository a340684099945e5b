"""Run threads one operation at a time, in an order that a seed decides: interleavings, not timings, are explored."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from lightning_odc.protocol import waiting
from lightning_odc.protocol.transports.base import Lock, Transport
from notebooks.support.threads import ThreadHub


def interleave(count: int, seed: int, work: Callable[[int, Scheduler], None]) -> Scheduler:
    """Run ``work(rank, scheduler)`` for every rank in a thread of its own; the same seed gives the same order."""
    scheduler = Scheduler(count, seed)

    def run(rank: int) -> None:
        try:
            work(rank, scheduler)
        finally:
            scheduler.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    with patch.object(waiting, "time", scheduler):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"seed {seed} hangs"
    return scheduler


def together(*functions: Callable[[], Any]) -> list[BaseException | None]:
    """Call all functions at once, in a thread each; returns their errors."""
    errors: list[BaseException | None] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            functions[index]()
        except Exception as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def on_threads(world_size: int, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Call ``function(rank, rendezvous)`` in a thread for each rank; returns results or errors by rank."""
    hub = ThreadHub(world_size, timeout=20)
    results = [None] * world_size

    def run(rank: int) -> None:
        results[rank] = function(rank, lambda item: hub.rendezvous(rank, item))

    errors = together(*(partial(run, rank) for rank in range(world_size)))
    return [error or result for error, result in zip(errors, results, strict=True)]


class Scheduler:
    """Lets exactly one of ``count`` threads run between two of its operations.

    It is also the clock of their waits: an operation of any thread takes a millisecond, a sleep takes nothing. So a
    wait without an end gives up after the same operations on every machine, within a second.

    Args:
        count: number of threads.
        seed: decides who goes next.
        burst: how many operations a thread may run in a row at most.
    """

    def __init__(self, count: int, seed: int, burst: int = 4) -> None:
        self._random = random.Random(seed)
        self._burst = burst
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._waiting: set[int] = set()
        self._active = count
        self._left = 0
        self._lock = threading.Lock()
        self.operations = 0

    def step(self, me: int) -> None:
        """Called by a thread before each operation: gives the turn away and waits for the next one."""
        with self._lock:
            self.operations += 1
            if self._left > 0:  # only the running thread gets here: the others wait
                self._left -= 1
                return
            self._waiting.add(me)
            self._hand_over()
        self._take_turn(me)

    def leave(self, me: int) -> None:
        """Called by a thread that is done."""
        with self._lock:
            self._active -= 1
            self._left = 0
            self._hand_over()

    def monotonic(self) -> float:
        return self.operations / 1000

    def monotonic_ns(self) -> int:
        return self.operations * 1_000_000

    def sleep(self, seconds: float) -> None:
        pass

    def _hand_over(self) -> None:
        if self._active and len(self._waiting) == self._active:
            chosen = self._random.choice(sorted(self._waiting))
            self._waiting.discard(chosen)
            self._left = self._random.randrange(self._burst)
            self._turns[chosen].release()

    def _take_turn(self, me: int) -> None:
        assert self._turns[me].acquire(timeout=30), f"thread {me} was never scheduled"


class SteppedLock:
    """A lock of which every operation is one step of a `Scheduler`."""

    def __init__(self, inner: Lock, step: Callable[[], None]) -> None:
        self._inner = inner
        self._step = step

    def take(self) -> bool:
        self._step()
        return self._inner.take()

    def give(self) -> None:
        self._step()
        self._inner.give()


class Interleaved(Transport):
    """A transport of which every operation is one step of a `Scheduler`.

    Reading and adding are split in halves, so that others can come in between: a torn read would be seen.
    """

    def __init__(self, inner: Transport, scheduler: Scheduler) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._scheduler = scheduler
        self._scheduled = False

    def open(self, spec: Any) -> None:
        self.inner.open(spec)
        self._scheduled = True

    def close(self) -> None:
        self._scheduled = False
        self.inner.close()

    def _step(self) -> None:
        if self._scheduled:
            self._scheduler.step(self.rank)

    def shard(self, owner: int, unit: int) -> Any:
        return self.inner.shard(owner, unit)

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Any:
        self._step()
        return self.inner.accumulator(owner, unit, source)

    def lock(self, owner: int, unit: int) -> Any:
        return SteppedLock(self.inner.lock(owner, unit), self._step)

    def read(self, shards: Any, out: Any) -> None:
        for part, shard in zip(out.chunk(len(shards)), shards, strict=True):
            half = part.numel() // 2
            self._step()
            part[:half].copy_(shard[:half])
            self._step()
            part[half:].copy_(shard[half:])

    def add(self, accumulator: Any, values: Any) -> None:
        self._step()
        before = accumulator.clone()  # a lost add would be seen: read here, write one step later
        self._step()
        accumulator.copy_(before + values)

    def load(self, owner: int, word: int) -> int:
        self._step()
        return self.inner.load(owner, word)

    def store(self, word: int, value: int, owner: int | None = None) -> None:
        self._step()
        self.inner.store(word, value, owner)

    def post(self, box: int, message: bytes) -> None:
        self._step()
        self.inner.post(box, message)

    def fetch(self, owner: int, box: int) -> bytes:
        self._step()
        return self.inner.fetch(owner, box)

    def dead_peers(self) -> list[int]:
        return self.inner.dead_peers()
