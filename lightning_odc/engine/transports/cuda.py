"""The CUDA body of the transport contract: GPUs of one host that map each other's memory.

The data plane is one block of device memory per rank, mapped by all. The control plane is that of the shared-memory
transport, in host memory. Reads are plain copies between mapped addresses, done by copy engines. Additions are a
kernel with atomic additions, which needs no lock. Both run on the stream that ``fully_shard`` has made current, so its
prefetching and overlapping work as usual. Note [When the host waits for its device] says when the host waits, and for
what.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_odc.engine.transports import preflight
from lightning_odc.engine.transports.base import Rendezvous, UnitSpec, WindowSpec
from lightning_odc.engine.transports.preflight import DeviceFacts
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport
from lightning_odc.engine.transports.symmetric import SymmetricDevice
from lightning_odc.errors import WindowError

_Answer = TypeVar("_Answer")
_PATIENCE = 10.0  # seconds that the end waits for a device that hangs
#: Additions by which every opening sees that none is lost, and the bytes of every window that they go to.
_TRIES, _TRIED_BYTES = 16, 4096


# ``rows``: any floating dtype, ``[world_size, numel]``, each row contiguous. No addition is lost to other ranks
# that add to the same place, unless `why_not_atomic` has a reason.


class CudaTransport(SharedMemoryTransport):
    """One rank's view of all windows in device memory; their control plane is in host memory."""

    runs_ahead = True
    needs_locks = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous,
        device: SymmetricDevice,
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, world_size, rendezvous, job_ranks)
        self._device = device
        self._layout = WindowSpec(units=(), words=0)
        self._announcer: Announcer | None = None
        self._facts: list[DeviceFacts] = []
        self._shards: list[list[Tensor]] = []
        self._accumulators: list[list[list[Tensor]]] = []
        self._first_sums: list[int] = []  # by unit, the byte of every window at which its accumulators begin
        self._tried: Tensor | None = None  # the end of the own window
        self._streams: set[Hashable] = set()

    # -- opening ------------------------------------------------------------------------------------------

    def why_not_shared(self, units: Sequence[UnitSpec]) -> str:
        summed = [unit for unit in units if unit.grad_numel]
        answers = self._together(lambda: (self._device.why_not_atomic(summed), self._device.facts()))
        found = [
            f"{reason} (rank {rank})"
            for rank, (reason, _) in zip(self._job_ranks, answers, strict=True)
            if reason
        ]
        over_links = preflight.why_not_atomic([facts for _, facts in answers])
        if over_links:
            self._device.add_plainly()
        return found[0] if found else over_links

    def open(self, spec: WindowSpec) -> None:
        super().open(replace(spec, units=(), sources=1))
        self._layout = spec
        self._first_sums = [sums - spec.control_bytes for _, sums in spec.offsets()]
        self._facts = self._together(self._device.facts)
        self._together(lambda: preflight.check(self._facts, spec))
        self._together(lambda: self._explained(lambda: self._device.create(spec.data_bytes + _TRIED_BYTES)))
        self._together(self._attach_on_device)
        if spec.sources == 1 and any(unit.grad_numel for unit in spec.units):
            self._together(self._add_ones)
            self._together(self._check_ones)
        self._announcer = Announcer(self.store, self._device.enter_thread)

    def _explained(self, stage: Callable[[], _Answer]) -> _Answer:
        try:
            return stage()
        except WindowError:
            raise
        except RuntimeError as error:
            raise WindowError(preflight.explain(error, self._facts[self.rank])) from error

    def _attach_on_device(self) -> None:
        windows = self._explained(self._device.attach)
        for window in windows:  # without the control plane
            shards, accumulators = self._layout.views(window, begin=self._layout.control_bytes)
            self._shards.append(shards)
            self._accumulators.append(accumulators)
        self._tried = windows[self.rank][self._layout.data_bytes :].view(torch.float32)

    def _add_ones(self) -> None:
        """Add 1 to the end of all windows, which training does not use, while the other ranks do the same."""
        assert self._tried is not None, "the windows are not attached"
        rows = torch.ones(self.world_size, self._tried.numel(), device=self._tried.device)
        for _ in range(_TRIES):
            self._device.add_rows(self._layout.data_bytes, torch.float32, rows)
        self._device.mark().synchronize()

    def _check_ones(self) -> None:
        assert self._tried is not None, "the windows are not attached"
        sums = self._tried.unique().tolist()
        preflight.check_sums(sums, _TRIES * self.world_size, self._facts[self.rank])

    def close(self) -> None:
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        self._streams.clear()
        self._shards.clear()
        self._accumulators.clear()
        self._tried = None
        try:
            self._device.close()
        finally:
            super().close()

    # -- data plane ---------------------------------------------------------------------------------------

    def shard(self, owner: int, unit: int) -> Tensor:
        return self._shards[owner][unit]

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        return self._accumulators[owner][unit][source]

    def read(self, shards: Sequence[Tensor], out: Tensor) -> None:
        for target, shard in zip(out.split([shard.numel() for shard in shards]), shards, strict=True):
            self._device.copy(target, shard)
        self._streams.add(self._device.stream())

    def add_rows(self, unit: int, source: int, start: int, rows: Tensor) -> None:
        dtype = self._layout.units[unit].grad_dtype
        first = self._first_sums[unit] + source * self._layout.grad_stride(unit)
        self._device.add_rows(first + start * dtype.itemsize, dtype, rows)
        self._streams.add(self._device.stream())

    def drain(self) -> Callable[[], bool]:
        if self._announcer is not None:
            self._announcer.check()
        while self._streams:
            self._device.wait_for(self._streams.pop())
        return self._device.mark().query

    def announce(self, word: int, value: int) -> None:
        assert self._announcer is not None, "the transport is not open"
        self._announcer.announce(self._device.mark(), word, value)


class Announcer:
    """A thread that writes words, in order, when the device has done what they announce; see the Note above."""

    def __init__(self, store: Callable[[int, int], None], enter_thread: Callable[[], None]) -> None:
        self._store = store
        self._enter_thread = enter_thread
        self._waiting: queue.SimpleQueue[tuple[torch.cuda.Event, int, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lightning-odc announcer", daemon=True)
        self._thread.start()

    def announce(self, mark: torch.cuda.Event, word: int, value: int) -> None:
        """Write a word when ``mark`` has been passed."""
        self.check()
        self._waiting.put((mark, word, value))

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise RuntimeError("The device failed while parameters were published.") from self._error

    def stop(self) -> None:
        """Write what is left, and end. A device that hangs is not waited for any longer than 10 s. Idempotent."""
        self._waiting.put(None)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            self._enter_thread()
            while (item := self._waiting.get()) is not None:
                mark, word, value = item
                mark.synchronize()  # without the interpreter's lock
                self._store(word, value)
        except BaseException as error:  # of the device or of the driver: raised at the next call
            self._error = error
