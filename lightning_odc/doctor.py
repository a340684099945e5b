"""``lightning-odc doctor``: facts about the machine, and what they mean. Works where torch is broken."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_odc.host_memory import Room, gib, rooms

if TYPE_CHECKING:
    from lightning_odc.engine.transports.preflight import DeviceFacts

Level = Literal["ok", "warning", "error"]

BOUNDS = {"torch": "2.9", "lightning": "2.5", "transformers": "5"}
"""The oldest version of each package that works, as in ``pyproject.toml``."""
LITTLE_MEMORY = 2 * 2**30
LITTLE_SHM = 2**30
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    topic: str  # the thing that was looked at, in one or two words
    # ``"ok"``, ``"warning"`` (it works, with a restriction), or ``"error"`` (the strategy cannot run so)
    level: Level
    message: str  # the finding, in one sentence
    remedy: str = ""  # what to do; empty if there is nothing to do

    @property
    def text(self) -> str:
        """The text for people: a line, and below it what to do."""
        line = f"{self.level:<8} {self.topic}: {self.message}"
        if not self.remedy:
            return line
        return f"{line}\n         -> {self.remedy}"


@dataclass(frozen=True)
class Machine:
    """Facts. The defaults are those of a machine on which everything works, without GPUs."""

    system: str = "Linux"  # ``"Linux"``, and other names that Python has for systems
    kernel: str = "6.8"  # the release of the kernel
    processor: str = "x86_64"  # ``"x86_64"``, for example
    python: str = "3.11.9"
    trouble: Mapping[str, str] = field(default_factory=dict)  # what went wrong, by the names of `PROBES`
    memory: Sequence[Room] = ()  # what is left below every limit of host memory
    shm: int | None = 2**34  # bytes that are free in ``/dev/shm``; ``None`` without it
    # versions of the installed packages; without an entry if one is missing
    versions: Mapping[str, str] = field(default_factory=dict)
    import_trouble: str = ""  # why this package cannot be imported; empty if it can
    devices: Sequence[DeviceFacts] = ()  # what the CUDA transport would know of each GPU
    gpu_without_torch: bool = False  # there is an NVIDIA GPU that this torch cannot use
    nccl: bool = True  # whether torch has NCCL


# -- facts ------------------------------------------------------------------------------------------------------------


def look() -> Machine:
    """The facts of this machine. Imports torch and Lightning, which takes some seconds."""
    # This module imports all of torch and Lightning that the package needs.
    import_trouble = trouble_of(lambda: import_module("lightning_odc.strategy.odc"))
    devices: Sequence[DeviceFacts] = ()
    nccl = False
    if not import_trouble:
        devices, nccl = _find_gpus()
    trouble = {}
    for name, probe in PROBES.items():
        said = trouble_of(probe.run)
        if said:
            trouble[name] = said
    versions = {}
    for package in (*BOUNDS, "triton"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    shm = None
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm").free
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        processor=platform.machine(),
        python=platform.python_version(),
        trouble=trouble,
        memory=rooms(),
        shm=shm,
        versions=versions,
        import_trouble=import_trouble,
        devices=devices,
        gpu_without_torch=Path("/dev/nvidia0").exists() and not devices,
        nccl=nccl,
    )


def trouble_of(probe: Callable[[], Any]) -> str:
    """What goes wrong in a probe, in one line; empty if nothing does."""
    try:
        probe()
    except Exception as error:  # whatever it is, it is what the user wants to know
        kind = type(error).__name__
        said = " ".join(str(error).split())
        if said:
            return f"{kind}: {said}"
        return kind
    return ""


def _find_gpus() -> tuple[Sequence[DeviceFacts], bool]:
    """What the CUDA transport would know of each GPU, and whether torch has NCCL."""
    import torch

    from lightning_odc.engine.transports.cuda import SymmetricDevice

    facts = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = SymmetricDevice(torch.device("cuda", index), None)
            facts.append(device.facts())
    return facts, torch.distributed.is_nccl_available()


@contextmanager
def _window() -> Iterator[int]:
    """Anonymous memory of a page, allocated, sealed and mapped, as a window is; its descriptor."""
    fd = os.memfd_create("lightning-odc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mmap.mmap(fd, mmap.PAGESIZE).close()
        yield fd
    finally:
        os.close(fd)


def _try_window() -> None:
    with _window():
        pass


def _try_window_of_other() -> None:
    """Another process opens a window by way of ``/proc``, as peers do."""
    with _window() as fd:
        command = [sys.executable, "-I", "-S", "-c", _OPEN, f"/proc/{os.getpid()}/fd/{fd}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise OSError(lines[-1])


def _try_lock() -> None:
    with _window() as fd:
        for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, 0, 1, 0))


class Probe(NamedTuple):
    """A feature that is tried: by what, what to do if it fails, and how bad that is."""

    run: Callable[[], Any]
    remedy: str
    level: Level = "error"


_HOST = "lightning_odc.engine.transports.host"  # imported when it is tried, since its room imports torch
_COLLECTIVE = 'or write ODCStrategy(communication="collective")'
_ONE_CONTAINER = (
    "run all ranks as one user in one container; docker run --security-opt seccomp=unconfined shows whether a "
    f"profile forbids it; {_COLLECTIVE}"
)
KERNEL_PROBES = {
    "shared memory": Probe(
        _try_window, f"windows need memfd_create with seals (Linux 3.17); {_ONE_CONTAINER}"
    ),
    "memory of others": Probe(
        _try_window_of_other,
        f"ranks open each other's windows in /proc/<pid>/fd: mount /proc without hidepid, and {_ONE_CONTAINER}",
    ),
    "locks": Probe(
        _try_lock, f"gradients are added under locks of file descriptions (Linux 3.15); {_ONE_CONTAINER}"
    ),
    "watching peers": Probe(
        lambda: os.close(os.pidfd_open(os.getpid())),
        f"dead ranks are found by pidfd_open (Linux 5.3); {_ONE_CONTAINER}",
    ),
    "host identity": Probe(
        lambda: import_module(_HOST).boot_id(),
        f"ranks compare /proc/sys/kernel/random/boot_id: mount /proc; {_COLLECTIVE}",
    ),
    "order of memory": Probe(
        lambda: import_module(_HOST).make_fence(),
        f"install libatomic (apt-get install libatomic1); {_COLLECTIVE}",
    ),
}
"""What the shared-memory transport asks of the kernel. GPUs need it, too, for control words."""
NETWORK_PROBES = {
    "host name": Probe(
        lambda: socket.getaddrinfo(socket.gethostname(), None),
        "gloo looks the host name up: add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=eth0 (one node: lo)",
        "warning",
    ),
}
"""What process groups ask of the network."""
PROBES = KERNEL_PROBES | NETWORK_PROBES


# -- findings ---------------------------------------------------------------------------------------------------------


def examine(machine: Machine) -> list[Finding]:
    """All findings on a machine, in the order in which they are said."""
    found = [Finding("system", "ok", f"Linux {machine.kernel} on {machine.processor}")]
    if machine.system != "Linux":
        said = f"{machine.system} has no shared memory of the kind that is needed"
        remedy = 'use ODCStrategy(communication="collective") here, and Linux for the rest'
        found = [Finding("system", "error", said, remedy)]
    found.append(Finding("Python", "ok", machine.python))
    found += [_check_version(package, machine.versions.get(package)) for package in BOUNDS]
    if machine.import_trouble:
        said = f"the package cannot be imported: {machine.import_trouble}"
        remedy = "pip install --upgrade lightning-odc torch lightning, and look at the first line above"
        found.append(Finding("import", "error", said, remedy))
    found += _check_probes("kernel", KERNEL_PROBES, machine.trouble)
    found += _check_limits(machine)
    found += _check_probes("network", NETWORK_PROBES, machine.trouble)
    if not machine.import_trouble:
        found += _check_gpus(machine)
    return found


def summary(findings: Sequence[Finding]) -> str:
    """One line over all findings."""
    said = []
    for level in ("error", "warning"):
        count = sum(finding.level == level for finding in findings)
        if count == 1:
            said.append(f"1 {level}")
        elif count:
            said.append(f"{count} {level}s")
    if not said:
        return f"Everything is fine: {len(findings)} checks."
    return f"{' and '.join(said)} in {len(findings)} checks."


def _check_version(package: str, found: str | None) -> Finding:
    """A package that is there, and new enough."""
    oldest = BOUNDS[package]
    level: Level = "error"
    missing = "is not installed"
    remedy = f"pip install --upgrade {package}"
    if package == "transformers":  # an extra
        level = "warning"
        missing += ": no packing of Hugging Face models, no demo, no bench"
        remedy = 'pip install "lightning-odc[demo]"'
    if found is None:
        return Finding(package, level, missing, remedy)
    if _release(found) < _release(oldest):
        remedy = f'pip install --upgrade "{package}>={oldest}"'
        return Finding(package, level, f"{found} is older than {oldest}", remedy)
    return Finding(package, "ok", f"{found} ({oldest} or newer works)")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``"2.13.0+cu130"`` is ``(2, 13, 0)``."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        return ()
    return tuple(map(int, found[0].split(".")))


def _check_probes(topic: str, probes: Mapping[str, Probe], trouble: Mapping[str, str]) -> list[Finding]:
    """A finding for each probe that failed; one for all of them where none did."""
    found = []
    for name, probe in probes.items():
        if name in trouble:
            found.append(Finding(name, probe.level, trouble[name], probe.remedy))
    return found or [Finding(topic, "ok", ", ".join(probes))]


def _check_limits(machine: Machine) -> Iterator[Finding]:
    """Host memory below the limit that is reached first; shared memory."""
    if machine.memory:
        room = min(machine.memory, key=lambda room: room.size)
        said = f"{gib(room.size)} GiB are left: {room.limit}"
        if room.size < LITTLE_MEMORY:
            remedy = f"{room.remedy}: a rank alone takes about 0.5 GiB"
            yield Finding("memory", "warning", said, remedy)
        else:
            yield Finding("memory", "ok", said)
    if machine.shm is None or machine.shm < LITTLE_SHM:
        size = "does not exist"
        if machine.shm is not None:
            size = f"has {gib(machine.shm)} GiB left"
        said = f"it {size}; windows do not need it, but DataLoader workers pass batches through it"
        remedy = "docker run --shm-size=8g or --ipc=host, or DataLoader(num_workers=0)"
        yield Finding("/dev/shm", "warning", said, remedy)


def _check_gpus(machine: Machine) -> Iterator[Finding]:
    """What the CUDA transport would refuse, with its messages; each GPU stands for a rank of the same number."""
    from lightning_odc.engine.transports import preflight
    from lightning_odc.errors import WindowError

    devices = machine.devices
    more_memory = "gradients get an accumulator per source rank, which takes more memory"
    if machine.gpu_without_torch:
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started), and look at nvidia-smi"
        yield Finding("GPUs", "warning", "there is an NVIDIA GPU, and torch cannot use it", remedy)
        return
    if not devices:
        yield Finding("GPUs", "ok", "none: ranks are processes on the CPU")
        return
    names = ", ".join(sorted({device.name for device in devices}))
    stack = devices[0].stack
    yield Finding("GPUs", "ok", f"{len(devices)} ({names}); {stack}; no GPU has run this code yet")
    try:
        preflight.check(devices)
        reason = preflight.why_not_atomic(devices)
        if reason:
            remedy = "nothing to do; GPUs joined by NVLink would need less"
            yield Finding("GPU atomics", "warning", f"{reason}: {more_memory}", remedy)
        elif len(devices) > 1:
            said = "every GPU reads the memory of every other one and adds to it atomically"
            yield Finding("GPU links", "ok", said)
    except WindowError as error:
        remedy = "choose GPUs that can: CUDA_VISIBLE_DEVICES=..."
        yield Finding("GPU memory of others", "error", str(error), remedy)
    if not machine.nccl:
        said = "this torch has none, and process groups of GPUs need it"
        yield Finding("NCCL", "error", said, "install a CUDA build of torch")
    if "triton" not in machine.versions:
        said = f"is not installed: {more_memory}"
        yield Finding("Triton", "warning", said, "pip install 'lightning-odc[gpu]'")
