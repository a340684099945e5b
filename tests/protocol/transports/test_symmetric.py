"""The thin layer above torch.cuda asks for the right things; what only a machine with a GPU has is stood in for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_odc import _compat
from lightning_odc.protocol.transports import cuda as transport
from lightning_odc.protocol.transports.base import UnitSpec
from lightning_odc.protocol.transports.cuda import SymmetricDevice

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Handle:
    """What a rendezvous returns to rank 1 of 2."""

    rank = 1
    world_size = 2

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert rank == 0
        return torch.full(sizes, 7, dtype=dtype)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were made of torch.cuda and symmetric memory, which work on host memory."""
    calls: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "a wait must not burn a core"

        def record(self, stream: Any) -> None:
            calls.append(("record", stream.name))

    current = SimpleNamespace(name="current", wait_stream=lambda other: calls.append(("wait", other.name)))
    two = {0: ("NVIDIA H200", "a"), 1: ("NVIDIA H200", "b")}
    replaced = {
        "get_device_properties": lambda d: SimpleNamespace(
            **dict(zip(("name", "uuid"), two[getattr(d, "index", d)], strict=True))
        ),
        "mem_get_info": lambda d: (1000, 2000),
        "memory_reserved": lambda d: 50,
        "memory_allocated": lambda d: 20,
        "device_count": lambda: 2,
        "can_device_access_peer": lambda d, peer: (d, peer) == (GPU, 1),
        "empty_cache": lambda: calls.append("empty_cache"),
        "synchronize": lambda d: calls.append("synchronize"),
        "current_stream": lambda d: current,
        "set_device": lambda d: calls.append(("device", d)),
        "Event": Event,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(_compat, "symmetric_backend", lambda d: "CUDA")
    monkeypatch.setattr(_compat, "symmetric_empty", lambda size, d: torch.full((size,), 9, dtype=torch.uint8))
    monkeypatch.setattr(_compat, "symmetric_rendezvous", lambda own, group, patience: Handle())
    return calls


def test_facts(cuda, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/somewhere")
    facts = SymmetricDevice(GPU, None).facts()
    assert facts.name == "NVIDIA H200"
    assert facts.uuid == "a"
    assert facts.free == 1030
    assert facts.backend == "CUDA"
    assert facts.reaches == {"b": True}
    assert facts.atomics == {"b": False}  # there is no driver to ask
    assert facts.folder == "/somewhere"
    assert facts.stack.startswith(f"torch {torch.__version__}, CUDA ")


def test_windows_are_zeroed_before_others_can_look_and_given_back(cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    device = SymmetricDevice(GPU, "group")
    left = tmp_path / f"symm_mem-{os.getpid()}"
    left.touch()  # by a killed process of this number: torch would say "Address already in use"
    device.create(64)
    assert cuda == ["empty_cache", "synchronize"]
    other, own = device.attach()
    assert not left.exists()
    assert other.unique().tolist() == [7]
    assert own.unique().tolist() == [0]
    assert own.numel() == 64
    device.close()
    device.close()
    assert cuda == ["empty_cache", "synchronize", "synchronize"]
    assert device._own is None
    assert device._handle is None


HANGS = """
import ctypes
from types import SimpleNamespace
from lightning_odc import _compat
sleeps_with_the_lock = ctypes.PyDLL(None).sleep
_compat._symmetric_memory = SimpleNamespace(rendezvous=lambda own, group: sleeps_with_the_lock(60))
_compat.symmetric_rendezvous(None, None, 0.5)
"""


@pytest.mark.slow
def test_a_rendezvous_that_hangs_ends_the_process():
    """torch holds the interpreter's lock there, so no Python code could."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "Timeout (0:00:00.5" in done.stderr
    assert "in symmetric_rendezvous" in done.stderr


def driver() -> Any:
    """Two GPUs of which the first adds atomically to the second's memory, but not the other way round."""

    def device_get(device: Any, number: int) -> int:
        device._obj.value = 10 + number
        if number < 2:
            return 0
        return 101

    def get_attribute(answer: Any, attribute: int, source: Any, target: Any) -> int:
        assert attribute == 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED in cuda.h
        answer._obj.value = (source.value, target.value) == (10, 11)
        return 0

    return SimpleNamespace(cuDeviceGet=device_get, cuDeviceGetP2PAttribute=get_attribute)


def test_the_driver_says_whose_additions_are_atomic(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver())
    assert [transport._adds_atomically(*pair) for pair in ((0, 1), (1, 0), (0, 2))] == [True, False, False]
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    assert not transport._adds_atomically(0, 1)


def test_windows_of_a_device_that_failed_are_not_freed(cuda, monkeypatch):
    """torch waits for the device when it frees them, and ends the process if that fails."""

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = SymmetricDevice(GPU, "group")
    device.create(64)
    device.attach()
    freed = weakref.ref(device._handle)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr(transport, "_abandoned", [])
    device.close()
    device.close()
    assert freed() is not None
    assert len(transport._abandoned) == 1
    assert device._own is None
    assert device._handle is None


def test_no_multicast_object_is_made(monkeypatch):
    seen: list[str | None] = []
    memory = SimpleNamespace(rendezvous=lambda own, group: seen.append(os.environ.get(MULTICAST)))
    monkeypatch.setattr(_compat, "_symmetric_memory", memory)
    _compat.symmetric_rendezvous(torch.zeros(1), "group", 60.0)
    assert MULTICAST not in os.environ
    monkeypatch.setenv(MULTICAST, "0")
    _compat.symmetric_rendezvous(torch.zeros(1), "group", 60.0)
    assert seen == ["1", "1"]
    assert os.environ[MULTICAST] == "0"


def unit(shard: torch.dtype, sums: torch.dtype, numel: int = 32) -> UnitSpec:
    return UnitSpec("unit", numel, shard, numel, sums)


FP32 = unit(torch.bfloat16, torch.float32)


def kernels(monkeypatch: pytest.MonkeyPatch, add: Any) -> SymmetricDevice:
    """A device that adds by ``add(windows, offset, dtype, rows, first)``."""
    module = ModuleType("lightning_odc.protocol.transports.kernels")
    vars(module).update(ATOMIC_DTYPES={torch.float32}, add_rows=add)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["lightning_odc.protocol.transports"], "kernels", module, raising=False)
    device = SymmetricDevice(CPU, None)
    device._has_kernel = True
    return device


def adds_in_host_memory(windows: Any, offset: int, dtype: Any, rows: Any, first: int = 0) -> None:
    """As the kernel does, through the addresses that it is given."""
    for owner in range(len(windows)):
        memory = (ctypes.c_uint8 * (rows.size(1) * dtype.itemsize)).from_address(int(windows[owner]) + offset)
        torch.frombuffer(memory, dtype=dtype).add_(rows[owner])


def with_windows(device: SymmetricDevice) -> list[torch.Tensor]:
    """Two windows of 16 sums in fp32, of which this rank has the second."""
    windows = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    device._windows = list(windows)
    device._handle = Handle()
    if device._has_kernel:
        device._addresses = torch.tensor([window.data_ptr() for window in windows])
    return [window.view(torch.float32) for window in windows]


@pytest.mark.parametrize("has_kernel", [True, False])
def test_rows_are_added_to_all_windows(monkeypatch, has_kernel):
    device = kernels(monkeypatch, adds_in_host_memory if has_kernel else lambda *_, **__: None)
    if not has_kernel:
        device.add_plainly()
    first, own = with_windows(device)
    device.add_rows(8, torch.float32, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16))
    assert first[:5].tolist() == [0, 0, 1, 2, 0]
    assert own[:5].tolist() == [0, 0, 3, 4, 0]


def test_a_kernel_that_works_is_compiled_for_all_dtypes_and_used(monkeypatch):
    forms: list[Any] = []

    def add(windows: Any, offset: int, dtype: torch.dtype, rows: torch.Tensor) -> None:
        forms.append((rows.dtype, dtype))
        adds_in_host_memory(windows, offset, dtype, rows)

    device = kernels(monkeypatch, add)
    assert device.why_not_atomic([FP32, FP32, unit(torch.uint8, torch.float32)]) == ""
    assert forms == [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    wide = unit(torch.float64, torch.float64)
    assert "accumulators in torch.float64" in device.why_not_atomic([wide, FP32])
    used = kernels(monkeypatch, lambda windows, offset, dtype, rows, first: rows.fill_(5))
    with_windows(used)
    rows = torch.ones(2, 2)
    used.add_rows(0, torch.float32, rows)
    assert rows.tolist() == [[5, 5], [5, 5]]
    used.add_rows(0, torch.float64, torch.ones(2, 2))  # which is not for the kernel
    assert used._windows[0].view(torch.float64)[:2].tolist() == [1, 1]


def test_a_kernel_that_does_not_is_left_alone(monkeypatch):
    def fails(*_: Any) -> None:
        raise ImportError("no compiler")

    device = kernels(monkeypatch, fails)
    assert device.why_not_atomic([FP32]) == (
        "the kernel for atomic additions does not run: ImportError: no compiler"
    )
    first, own = with_windows(device)
    device.add_rows(0, torch.float32, torch.ones(2, 1))
    assert first[:2].tolist() == [1, 0]
    assert own[:2].tolist() == [1, 0]
    wrong = kernels(monkeypatch, lambda *_: None)
    assert "1 + 1 came out as 1.0" in wrong.why_not_atomic([FP32])
    assert "Triton" in wrong.why_not_atomic([FP32])  # from then on it is not even tried
