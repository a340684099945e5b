"""The CUDA body of the transport contract: GPUs of one host that map each other's memory.

The data plane is one block of device memory per rank, mapped by all. The control plane is that of the shared-memory
transport, in host memory. Reads are plain copies between mapped addresses. Additions are a kernel with atomic
additions, which needs no lock. Both run on the stream that ``fully_shard`` has made current, so its prefetching and
overlapping work as usual. See Note [When the host waits for its device].

Windows (of torch's symmetric memory: `SymmetricDevice`) are allocated by the driver's virtual-memory functions,
not by torch's caching allocator. So they are outside of expandable segments and of every memory pool.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.background import Background, Job
from lightning_odc.errors import WindowError
from lightning_odc.protocol.transports import preflight
from lightning_odc.protocol.transports.base import Ready, Rendezvous, UnitSpec, WindowSpec
from lightning_odc.protocol.transports.preflight import DeviceFacts
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport

_Answer = TypeVar("_Answer")
_PATIENCE = 10.0  # seconds that the end waits for a device that hangs
_PROBED = 32
#: Seconds that mapping the windows may take. All ranks have met just before it, so it takes a few.
_MAPPING_PATIENCE = 300.0
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's interface

#: Windows of devices that have failed. torch waits for the device when it frees one, and ends the process if that
#: fails, before the error can be read. The memory lasts as long as the process.
_abandoned: list[tuple[Any, Any]] = []


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
        self._announcer: Announcer | None = None
        self._facts: list[DeviceFacts] = []
        self._first_sums: list[int] = []  # by unit, the byte of every window at which its accumulators begin
        self._streams: set[torch.cuda.Stream] = set()

    def why_not_shared(self, units: Sequence[UnitSpec]) -> str:
        summed = [unit for unit in units if unit.grad_numel]
        answers = self._together(lambda: (self._device.why_not_atomic(summed), self._device.facts()))
        over_links = preflight.why_not_atomic([facts for _, facts in answers])
        if over_links:
            self._device.add_plainly()
        for rank, (reason, _) in zip(self._job_ranks, answers, strict=True):
            if reason:
                return f"{reason} (rank {rank})"
        return over_links

    def open(self, spec: WindowSpec) -> None:
        super().open(replace(spec, units=(), sources=1))
        self._spec = spec
        self._first_sums = [sums for _, sums in spec.offsets()]
        self._facts = self._together(self._device.facts)
        self._together(lambda: preflight.check(self._facts))
        self._together(lambda: self._explained(lambda: self._device.create(spec.data_bytes)))
        self._together(self._attach_on_device)
        self._announcer = Announcer(self.store, self._device.enter_thread)

    def _explained(self, stage: Callable[[], _Answer]) -> _Answer:
        try:
            return stage()
        except RuntimeError as error:
            raise WindowError(preflight.explain(error, self._facts[self.rank], self._spec)) from error

    def _attach_on_device(self) -> None:
        windows = self._explained(self._device.attach)
        for owner, window in enumerate(windows):  # without the control plane
            mapped = self._windows[owner]
            mapped.shards, mapped.accumulators = self._spec.views(window)

    def close(self) -> None:
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        self._streams.clear()
        for window in self._windows.values():
            window.shards = []
            window.accumulators = []
        try:
            self._device.close()
        finally:
            super().close()

    def read(self, shards: Sequence[Tensor], out: Tensor) -> None:
        sizes = [shard.numel() for shard in shards]
        for target, shard in zip(out.split(sizes), shards, strict=True):
            self._device.copy(target, shard)
        self._streams.add(self._device.stream())

    def add_rows(self, unit: int, source: int, start: int, rows: Tensor) -> None:
        dtype = self._spec.units[unit].grad_dtype
        first = self._first_sums[unit] + source * self._spec.grad_stride(unit)
        offset = first + start * dtype.itemsize
        self._device.add_rows(offset, dtype, rows)
        self._streams.add(self._device.stream())

    def on_another_stream(self) -> AbstractContextManager[None]:
        return self._device.on_another_stream()

    def drain(self) -> Ready:
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

    def __init__(self, store: Callable[[int, int], None], enter_thread: Job) -> None:
        self._store = store
        self._thread = Background("announcer", self.stop, begin=enter_thread)

    def announce(self, mark: torch.cuda.Event, word: int, value: int) -> None:
        """Write a word when ``mark`` has been passed."""
        self.check()
        self._thread.do(partial(self._write, mark, word, value))

    def check(self) -> None:
        """Raise what ended the thread, if anything did: an error of the device or of the driver."""
        if self._thread.error is not None:
            raise RuntimeError("The device failed while parameters were published.") from self._thread.error

    def stop(self) -> None:
        """Write what is left, and end. A device that hangs is not waited for any longer than 10 s. Idempotent."""
        self._thread.stop(_PATIENCE)

    def _write(self, mark: torch.cuda.Event, word: int, value: int) -> None:
        mark.synchronize()  # without the interpreter's lock
        self._store(word, value)


# -- the device, which only a machine with GPUs has --------------------------------------------------------


class SymmetricDevice:
    """A GPU whose memory the others of the group map. All but `facts` and `close` only asks it for work."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self._device = device
        self._group = group
        self._own: Tensor | None = None
        self._handle: Any = None
        self._windows: list[Tensor] = []
        self._addresses: Tensor | None = None  # of the windows, for the kernel
        self._has_kernel = importlib.util.find_spec("triton") is not None

    def facts(self) -> DeviceFacts:
        """What there is."""
        properties = torch.cuda.get_device_properties(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        reaches = {}
        atomics = {}
        for index in range(torch.cuda.device_count()):
            if index != self._device.index:
                uuid = str(torch.cuda.get_device_properties(index).uuid)
                reaches[uuid] = torch.cuda.can_device_access_peer(self._device, index)
                atomics[uuid] = _adds_atomically(self._device.index or 0, index)
        return DeviceFacts(
            name=properties.name,
            uuid=str(properties.uuid),
            free=free + cached,
            stack=f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            backend="ROCm" if torch.version.hip else _compat.symmetric_backend(self._device),
            folder=_socket_folder(),
            reaches=reaches,
            atomics=atomics,
        )

    def why_not_atomic(self, units: Sequence[UnitSpec]) -> str:
        """Why several ranks cannot add into one accumulator of these units; empty if they can. Compiles `add_rows`."""
        if not self._has_kernel:
            return "atomic additions need Triton: pip install triton"
        try:
            from lightning_odc.protocol.transports import kernels

            others = {unit.grad_dtype for unit in units} - kernels.ATOMIC_DTYPES
            if others:
                return f"there are no atomic additions for accumulators in {min(others, key=str)}"
            pairs = [(unit.chunk_dtype, unit.grad_dtype) for unit in units]
            for dtype, summed_in in dict.fromkeys(pairs):
                target = torch.ones(_PROBED, dtype=summed_in, device=self._device)
                addresses = torch.tensor([target.data_ptr()], device=self._device)
                rows = torch.ones(1, _PROBED, dtype=dtype, device=self._device)
                kernels.add_rows(addresses, 0, summed_in, rows)
                if not bool((target == 2).all()):
                    raise RuntimeError(f"1 + 1 came out as {target[0].item()} in {summed_in}")
        except Exception as error:  # of Triton, of its compiler, or of the driver
            self._has_kernel = False
            return f"the kernel for atomic additions does not run: {type(error).__name__}: {error}"
        return ""

    def add_plainly(self) -> None:
        """Add by reading and writing from now on, because a link between the devices does not add atomically."""
        # What an atomic addition over such a link does is not defined, not even where nothing else adds to its place.
        self._has_kernel = False

    def create(self, size: int) -> None:
        """Make this rank's window of so many zero bytes."""
        torch.cuda.empty_cache()  # what is cached counts as free
        self._own = _compat.symmetric_empty(max(size, 16), self._device)
        self._own.zero_()
        torch.cuda.synchronize(self._device)  # before peers can look

    def attach(self) -> list[Tensor]:
        """All ranks' windows as bytes, in rank order; all ranks call it together after `create`."""
        assert self._own is not None, "there is no window yet"
        # A killed process leaves its socket. In a container, a later process may have the same number.
        Path(f"{_socket_folder()}/symm_mem-{os.getpid()}").unlink(missing_ok=True)
        self._handle = _compat.symmetric_rendezvous(self._own, self._group, _MAPPING_PATIENCE)
        size = self._own.numel()
        self._windows = []
        for peer in range(self._handle.world_size):
            window = self._own
            if peer != self._handle.rank:
                window = self._handle.get_buffer(peer, (size,), torch.uint8)
            self._windows.append(window)
        if self._has_kernel:
            addresses = [
                window.data_ptr() for window in self._windows
            ]  # the driver maps at multiples of 2 MiB
            self._addresses = torch.tensor(addresses, device=self._own.device)
        return list(self._windows)

    def close(self) -> None:
        """Release the windows, of which no view may be left. Idempotent."""
        if self._own is not None:
            try:
                torch.cuda.synchronize(self._device)  # views of peers' memory end here
            except RuntimeError:
                _abandoned.append((self._own, self._handle))
        self._windows.clear()
        self._handle = self._own = self._addresses = None

    def enter_thread(self) -> None:
        """Called first in every thread that waits for marks."""
        # Else a new thread may make a context on the first GPU, with its memory.
        torch.cuda.set_device(self._device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    @contextmanager
    def on_another_stream(self) -> Iterator[None]:
        """A context with a stream of high priority, as those of ``fully_shard``, behind the current one."""
        stream = torch.cuda.Stream(self._device, priority=-1)
        stream.wait_stream(self.stream())
        with torch.cuda.stream(stream):
            yield

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for all work on ``stream`` so far."""
        self.stream().wait_stream(stream)

    def mark(self) -> torch.cuda.Event:
        """A mark after all work on the current stream so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream())
        return event

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
        """Add to all windows at once: row ``r`` goes to rank ``r``'s window.

        No addition is lost to other ranks that add to the same place, unless `why_not_atomic` has a reason.

        Args:
            offset: The byte of each window at which its row is added.
            dtype: The dtype in which windows hold sums.
            rows: Numbers of any floating dtype, ``[world_size, numel]``, each row contiguous.
        """
        own: int = self._handle.rank
        if self._addresses is not None and self._has_kernel:
            from lightning_odc.protocol.transports import kernels

            if dtype in kernels.ATOMIC_DTYPES:
                kernels.add_rows(self._addresses, offset, dtype, rows, first=own)
                return
        end = offset + rows.size(1) * dtype.itemsize
        world = len(self._windows)
        for step in range(world):
            owner = (own + step) % world
            place = self._windows[owner][offset:end]
            place.view(dtype).add_(rows[owner])


def _socket_folder() -> str:
    """Where torch makes the socket by which it takes handles from other processes."""
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        if name in os.environ:
            return os.environ[name]
    return tempfile.gettempdir()


def _adds_atomically(source: int, target: int) -> bool:
    """Whether atomic additions of a device to another one's memory are atomic there: over NVLink, seldom over PCIe."""
    # torch has no name for it, so the driver is asked, which numbers devices as torch does.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    devices = []
    for number in (source, target):
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
            return False
        devices.append(device)
    answer = ctypes.c_int()
    asked = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), _NATIVE_ATOMICS, *devices)
    return bool(asked == 0 and answer.value == 1)
