"""GPUs by way of torch's symmetric memory: the thin layer that only a machine with GPUs can run.

Windows are allocated by the driver's virtual-memory functions directly, not by torch's caching allocator, so they are
outside of expandable segments and of every memory pool.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.engine.transports import preflight
from lightning_odc.engine.transports.base import UnitSpec
from lightning_odc.engine.transports.preflight import DeviceFacts

_PROBED = 32
#: Seconds that mapping the windows may take. All ranks have met just before it, so it takes a few.
_PATIENCE = 300.0
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's interface

#: Windows of devices that have failed. torch waits for the device when it frees one, and ends the process if that
#: fails, before the error can be read. The memory lasts as long as the process.
_abandoned: list[tuple[Any, Any]] = []


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
        others = {  # numbers of the other devices that this process sees, by uuid
            str(torch.cuda.get_device_properties(index).uuid): index
            for index in range(torch.cuda.device_count())
            if index != self._device.index
        }
        settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        return DeviceFacts(
            name=properties.name,
            uuid=str(properties.uuid),
            free=free + cached,
            index=self._device.index or 0,
            stack=_stack(),
            backend=_compat.symmetric_backend(self._device),
            is_rocm=torch.version.hip is not None,
            shares_device=os.environ.get(preflight.OVERLAP_VARIABLE) == "1",
            expandable=any("expandable_segments:True" in setting for setting in settings),
            socket=_socket(),
            reaches={uuid: torch.cuda.can_device_access_peer(self._device, i) for uuid, i in others.items()},
            atomics={uuid: _adds_atomically(self._device.index or 0, i) for uuid, i in others.items()},
        )

    def why_not_atomic(self, units: Sequence[UnitSpec]) -> str:
        """Why several ranks cannot add into one accumulator of these units; empty if they can. Compiles `add_rows`."""
        if not self._has_kernel:
            return "atomic additions need Triton, pip install 'lightning-odc[gpu]'"
        try:
            from lightning_odc.engine.transports import kernels

            others = {unit.grad_dtype for unit in units} - kernels.ATOMIC_DTYPES
            if others:
                return f"there are no atomic additions for accumulators in {min(others, key=str)}"
            # By what tells compiled forms of the kernel apart, one unit of each: see `_add_rows`.
            forms = {
                (_gradients_in(u), u.grad_dtype, u.grad_numel % 16, u.grad_numel >> 31): u for u in units
            }
            for unit in forms.values():
                target = torch.ones(_PROBED, dtype=unit.grad_dtype, device=self._device)
                addresses = torch.tensor([target.data_ptr()], device=self._device)
                rows = torch.ones(_PROBED, dtype=_gradients_in(unit), device=self._device)
                # As if one owner's gradients were as many as this unit's.
                rows = rows.as_strided((1, _PROBED), (unit.grad_numel, 1))
                kernels.add_rows(addresses, 0, unit.grad_dtype, rows)
                if not bool((target == 2).all()):
                    raise RuntimeError(f"1 + 1 came out as {target[0].item()} in {unit.grad_dtype}")
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
        Path(_socket()).unlink(missing_ok=True)
        self._handle = _compat.symmetric_rendezvous(self._own, self._group, _PATIENCE)
        rank, size = self._handle.rank, self._own.numel()
        self._windows = [
            self._own if peer == rank else self._handle.get_buffer(peer, (size,), torch.uint8)
            for peer in range(self._handle.world_size)
        ]
        if self._has_kernel:
            addresses = [window.data_ptr() for window in self._windows]
            preflight.check_addresses(addresses, _stack())
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

    def stream(self) -> Hashable:
        return torch.cuda.current_stream(self._device)

    def wait_for(self, stream: Hashable) -> None:
        """Let the current stream wait for all work on ``stream`` so far."""
        torch.cuda.current_stream(self._device).wait_stream(cast(torch.cuda.Stream, stream))

    def mark(self) -> torch.cuda.Event:
        """A mark after all work on the current stream so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
        """Add to all windows at once: row ``r`` goes to byte ``offset`` of rank ``r``'s window, in ``dtype``."""
        # ``rows``: any floating dtype, ``[world_size, numel]``, each row contiguous. No addition is lost to other ranks
        # that add to the same place, unless `why_not_atomic` has a reason.
        own, world = self._handle.rank, len(self._windows)
        if self._addresses is not None and self._has_kernel:
            from lightning_odc.engine.transports import kernels

            if dtype in kernels.ATOMIC_DTYPES:
                kernels.add_rows(self._addresses, offset, dtype, rows, first=own)
                return
        size = rows.size(1) * dtype.itemsize
        for owner in ((own + step) % world for step in range(world)):
            self._windows[owner][offset : offset + size].view(dtype).add_(rows[owner])


def _gradients_in(unit: UnitSpec) -> torch.dtype:
    """The dtype of a unit's gradients as ``fully_shard`` passes them on, unless the user told it another one."""
    return unit.shard_dtype if unit.shard_dtype.is_floating_point else unit.grad_dtype


def _stack() -> str:
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {_compat.cuda_driver_version()}"


def _socket() -> str:
    """Path of the socket by which torch takes handles from other processes."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    folder = next((os.environ[name] for name in names if name in os.environ), tempfile.gettempdir())
    return f"{folder}/symm_mem-{os.getpid()}"


def _adds_atomically(source: int, target: int) -> bool:
    """Whether atomic additions of a device to another one's memory are atomic there: over NVLink, seldom over PCIe."""
    # torch has no name for it, so the driver is asked, which numbers devices as torch does.
    driver = _driver()
    if driver is None:
        return False
    devices, answer = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    for device, number in zip(devices, (source, target), strict=True):
        if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
            return False
    asked = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), _NATIVE_ATOMICS, *devices)
    return bool(asked == 0 and answer.value == 1)


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
