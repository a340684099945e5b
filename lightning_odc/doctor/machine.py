"""Facts about the machine, collected once for all checks. Works if torch is missing or broken."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_odc.engine.transports import host
from lightning_odc.host_memory import Room, rooms

if TYPE_CHECKING:
    from lightning_odc.engine.transports.preflight import DeviceFacts

PACKAGES = ("torch", "lightning", "torchmetrics", "numpy", "transformers", "triton")
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
_PATIENCE = 60


@dataclass(frozen=True)
class Machine:
    """Facts. The defaults are those of a machine on which everything works, without GPUs."""

    system: str = "Linux"  # ``"Linux"``, and other names that Python has for systems
    kernel: str = "6.8"  # the release of the kernel
    processor: str = "x86_64"  # ``"x86_64"``, for example
    python: str = "3.11.9"
    # what went wrong when a kernel feature was tried, by the name of the probe; empty where it works
    kernel_trouble: Mapping[str, str] = field(default_factory=dict)
    memory: Sequence[Room] = ()  # what is left below every limit of host memory
    shm: int | None = 2**34  # bytes that are free in ``/dev/shm``; ``None`` without it
    open_files: int = 2**16  # the most files that a process may open
    # what went wrong with the network, by the name of the probe
    network_trouble: Mapping[str, str] = field(default_factory=dict)
    # versions of the installed packages; ``None`` if one is missing
    versions: Mapping[str, str | None] = field(default_factory=dict)
    import_trouble: str = ""  # why this package cannot be imported; empty if it can
    devices: Sequence[DeviceFacts] = ()
    gpu_without_torch: bool = False  # there is an NVIDIA GPU that this torch cannot use
    nccl: bool = True  # whether torch has NCCL


def look() -> Machine:
    """The facts of this machine. Imports torch and Lightning, which takes some seconds."""
    # This module imports all of torch and Lightning that the package needs.
    import_trouble = _trouble(lambda: import_module("lightning_odc.strategy.odc"))
    devices, nccl = ((), False) if import_trouble else _gpus()
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        processor=platform.machine(),
        python=platform.python_version(),
        kernel_trouble={name: _trouble(probe) for name, probe in KERNEL_PROBES.items()},
        memory=rooms(),
        shm=_free_shm(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        network_trouble={name: _trouble(probe) for name, probe in NETWORK_PROBES.items()},
        versions={name: _version(name) for name in PACKAGES},
        import_trouble=import_trouble,
        devices=devices,
        gpu_without_torch=Path("/dev/nvidia0").exists() and not devices,
        nccl=nccl,
    )


def _trouble(probe: Callable[[], Any]) -> str:
    """What goes wrong in a probe, in one line; empty if nothing does."""
    try:
        probe()
    except Exception as error:  # whatever it is, it is what the user wants to know
        said = " ".join(str(error).split())
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- kernel -----------------------------------------------------------------------------------------------------------


def _make_window() -> int:
    """Anonymous memory of a page, allocated, sealed and mapped, as a window is; its descriptor."""
    fd = os.memfd_create("lightning-odc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mmap.mmap(fd, mmap.PAGESIZE).close()
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_window_of_other() -> None:
    """Another process opens a window by way of ``/proc``, as peers do."""
    fd = _make_window()
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _OPEN, path],
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    finally:
        os.close(fd)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])


def _try_lock() -> None:
    fd = _make_window()
    try:
        for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, 0, 1, 0))
    finally:
        os.close(fd)


KERNEL_PROBES: Mapping[str, Callable[[], Any]] = {
    "shared memory": lambda: os.close(_make_window()),
    "memory of others": _try_window_of_other,
    "locks": _try_lock,
    "watching peers": lambda: os.close(os.pidfd_open(os.getpid())),
    "host identity": host.boot_id,
    "order of memory": host.make_fence,
}
"""What the shared-memory transport asks of the kernel; see `lightning_odc.engine.transports.shared_memory`."""


def _free_shm() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


# -- network ----------------------------------------------------------------------------------------------------------


def _try_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen(1)
        with socket.create_connection(free.getsockname(), timeout=5):
            pass


def _try_master_port() -> None:
    """The port that the environment asks for; on the host of rank 0 it must be free before the ranks start."""
    port = os.environ.get("MASTER_PORT", "")
    if port and os.environ.get("MASTER_ADDR", "localhost") in (
        "localhost",
        "127.0.0.1",
        socket.gethostname(),
    ):
        with socket.socket() as wanted:
            wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wanted.bind(("", int(port)))


NETWORK_PROBES: Mapping[str, Callable[[], Any]] = {
    "free ports": _try_port,
    "MASTER_PORT": _try_master_port,
    "host name": lambda: socket.getaddrinfo(socket.gethostname(), None),
}
"""What process groups ask of the network."""


# -- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus() -> tuple[Sequence[DeviceFacts], bool]:
    """What the CUDA transport would know of each GPU, and whether torch has NCCL."""
    import torch

    from lightning_odc.engine.transports.symmetric import SymmetricDevice

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = [SymmetricDevice(torch.device("cuda", index), None).facts() for index in range(count)]
    return facts, torch.distributed.is_nccl_available()
