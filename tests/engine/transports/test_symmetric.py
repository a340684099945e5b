"""The thin layer above torch.cuda asks for the right things; what only a machine with a GPU has is stood in for."""

from __future__ import annotations

import os
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_odc import _compat
from lightning_odc.engine.transports import symmetric
from lightning_odc.engine.transports.symmetric import SymmetricDevice

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Handle:
    """What a rendezvous returns to rank 1 of 2."""

    rank, world_size = 1, 2

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
    monkeypatch.setattr(_compat, "symmetric_rendezvous", lambda own, group: Handle())
    return calls


def test_facts(cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("TMPDIR", "/somewhere")
    facts = SymmetricDevice(GPU, None).facts()
    assert (facts.name, facts.uuid, facts.free, facts.backend) == ("NVIDIA H200", "a", 1030, "CUDA")
    assert (facts.shares_device, facts.expandable, facts.reaches) == (True, True, {"b": True})
    assert facts.atomics == {"b": False}  # there is no driver to ask
    assert facts.socket.startswith("/somewhere/symm_mem-")
    assert facts.stack.startswith(f"torch {torch.__version__}, CUDA ")


def test_windows_are_zeroed_before_others_can_look_and_given_back(cuda):
    device = SymmetricDevice(GPU, "group")
    device.create(64)
    assert cuda == ["empty_cache", "synchronize"]
    other, own = device.attach()
    assert (other.unique().tolist(), own.unique().tolist(), own.numel()) == ([7], [0], 64)
    device.close()
    device.close()
    assert cuda == ["empty_cache", "synchronize", "synchronize"]
    assert device._own is None and device._handle is None


class Driver:
    """Two GPUs of which the first adds atomically to the second's memory, but not the other way round."""

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0 if number < 2 else 101

    def cuDeviceGetP2PAttribute(self, answer: Any, attribute: int, source: Any, target: Any) -> int:
        assert attribute == 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED in cuda.h
        answer._obj.value = (source.value, target.value) == (10, 11)
        return 0


def test_the_driver_says_whose_additions_are_atomic(monkeypatch):
    monkeypatch.setattr(symmetric, "_driver", Driver)
    assert [symmetric._adds_atomically(*pair) for pair in ((0, 1), (1, 0), (0, 2))] == [True, False, False]
    monkeypatch.setattr(symmetric, "_driver", lambda: None)
    assert not symmetric._adds_atomically(0, 1)


def test_windows_of_a_device_that_failed_are_not_freed(cuda, monkeypatch):
    """torch waits for the device when it frees them, and ends the process if that fails."""

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = SymmetricDevice(GPU, "group")
    device.create(64)
    device.attach()
    freed = weakref.ref(device._handle)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr(symmetric, "_abandoned", [])
    device.close()
    device.close()
    assert freed() is not None and len(symmetric._abandoned) == 1
    assert device._own is None and device._handle is None


def test_no_multicast_object_is_made(monkeypatch):
    seen: list[str | None] = []
    memory = SimpleNamespace(rendezvous=lambda own, group: seen.append(os.environ.get(MULTICAST)))
    monkeypatch.setattr(_compat, "_symmetric_memory", lambda: memory)
    _compat.symmetric_rendezvous(torch.zeros(1), "group")
    assert MULTICAST not in os.environ
    monkeypatch.setenv(MULTICAST, "0")
    _compat.symmetric_rendezvous(torch.zeros(1), "group")
    assert (seen, os.environ[MULTICAST]) == (["1", "1"], "0")


def test_streams_marks_and_work(cuda):
    device = SymmetricDevice(GPU, None)
    stream: Any = device.stream()
    device.wait_for(SimpleNamespace(name="gather"))  # type: ignore[arg-type]
    device.mark()
    assert (stream.name, cuda) == ("current", [("wait", "gather"), ("record", "current")])
    device.enter_thread()
    assert cuda[-1] == ("device", GPU)
    target = torch.zeros(3)
    device.copy(target, torch.ones(3))
    assert target.tolist() == [1, 1, 1]
    device._has_kernel = False
    device.add(target, torch.ones(3, dtype=torch.bfloat16))
    assert target.tolist() == [2, 2, 2]


def kernels(monkeypatch: pytest.MonkeyPatch, add: Any) -> SymmetricDevice:
    module = ModuleType("lightning_odc.engine.transports.kernels")
    vars(module).update(ATOMIC_DTYPES={torch.float32}, atomic_add=add)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["lightning_odc.engine.transports"], "kernels", module, raising=False)
    device = SymmetricDevice(CPU, None)
    device._has_kernel = True
    return device


def test_a_kernel_that_works_is_used(monkeypatch):
    device = kernels(monkeypatch, lambda target, values: target.add_(values))
    assert device.why_not_atomic({torch.float32}) == ""
    assert "accumulators in torch.float64" in device.why_not_atomic({torch.float64, torch.float32})
    used = kernels(monkeypatch, lambda target, values: target.fill_(5))
    sums, wide = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    used.add(sums, torch.ones(2))
    used.add(wide, torch.ones(2))
    assert (sums.tolist(), wide.tolist()) == ([5, 5], [1, 1])


def test_a_kernel_that_does_not_is_left_alone(monkeypatch):
    def fails(target: Any, values: Any) -> None:
        raise ImportError("no compiler")

    device = kernels(monkeypatch, fails)
    assert device.why_not_atomic({torch.float32}) == (
        "the kernel for atomic additions does not run: ImportError: no compiler"
    )
    target = torch.zeros(2)
    device.add(target, torch.ones(2))
    assert target.tolist() == [1, 1]
    wrong = kernels(monkeypatch, lambda target, values: None)
    assert "1 + 1 came out as 1.0" in wrong.why_not_atomic({torch.float32})
    assert "Triton" in wrong.why_not_atomic({torch.float32})  # from then on it is not even tried
