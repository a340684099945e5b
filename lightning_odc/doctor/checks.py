"""Turn facts about a machine into findings: one small function per topic, all of them in one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_odc.doctor.machine import Machine
from lightning_odc.host_memory import gib

if TYPE_CHECKING:
    from lightning_odc.engine.transports.preflight import DeviceFacts

Level = Literal["ok", "warning", "error"]


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
        return f"{line}\n         -> {self.remedy}" if self.remedy else line


Check = Callable[[Machine], Iterable[Finding]]

OLDEST_PYTHON = (3, 11)
BOUNDS = {"torch": "2.9", "lightning": "2.5", "transformers": "5"}
"""The oldest version of each package that works, as in ``pyproject.toml``."""
MALICIOUS = {"lightning": ("2.6.2", "2.6.3")}
"""Releases that must never be installed, as in ``pyproject.toml``."""
LITTLE_MEMORY = 2 * 2**30
LITTLE_SHM = 2**30
FEW_FILES = 1024
_COLLECTIVE = 'or write ODCStrategy(communication="collective")'
_ONE_CONTAINER = (
    "run all ranks as one user in one container; docker run --security-opt seccomp=unconfined shows whether a "
    f"profile forbids it; {_COLLECTIVE}"
)
_KERNEL_REMEDIES = {
    "shared memory": f"windows need memfd_create with seals (Linux 3.17); {_ONE_CONTAINER}",
    "memory of others": "ranks open each other's windows in /proc/<pid>/fd: mount /proc without hidepid, and "
    + _ONE_CONTAINER,
    "locks": f"gradients are added under locks of file descriptions (Linux 3.15); {_ONE_CONTAINER}",
    "watching peers": f"dead ranks are found by pidfd_open (Linux 5.3); {_ONE_CONTAINER}",
    "host identity": f"ranks compare /proc/sys/kernel/random/boot_id: mount /proc; {_COLLECTIVE}",
    "order of memory": f"install libatomic (apt-get install libatomic1); {_COLLECTIVE}",
}
_NETWORK_REMEDIES = {
    "free ports": "ranks meet at a port of 127.0.0.1: bring the loopback up (ip link set lo up)",
    "MASTER_PORT": "another program listens there: export MASTER_PORT=29501, or unset it on one node",
    "host name": "gloo looks the host name up: add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=eth0 (one node: lo)",
}


def examine(machine: Machine) -> list[Finding]:
    """All findings on a machine."""
    return [finding for check in CHECKS for finding in check(machine)]


def summary(findings: Sequence[Finding]) -> str:
    """One line over all findings."""
    counts = {level: sum(one.level == level for one in findings) for level in ("error", "warning")}
    said = [f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count]
    if not said:
        return f"Everything is fine: {len(findings)} checks."
    return f"{' and '.join(said)} in {len(findings)} checks."


def check_system(machine: Machine) -> Iterable[Finding]:
    """Linux, and a Python that is new enough."""
    if machine.system != "Linux":
        remedy = 'use ODCStrategy(communication="collective") here, and Linux for the rest'
        yield Finding(
            "system", "error", f"{machine.system} has no shared memory of the kind that is needed", remedy
        )
    else:
        yield Finding("system", "ok", f"Linux {machine.kernel} on {machine.processor}")
    if _release(machine.python) < OLDEST_PYTHON:
        yield Finding(
            "Python",
            "error",
            f"{machine.python} is too old",
            "install Python 3.11 or newer: uv python install 3.13",
        )
    else:
        yield Finding("Python", "ok", machine.python)


def check_versions(machine: Machine) -> Iterable[Finding]:
    """Packages that are there, and new enough."""
    for package, oldest in BOUNDS.items():
        yield _version(package, machine.versions.get(package), oldest)
    if machine.import_trouble:
        yield Finding(
            "import",
            "error",
            f"the package cannot be imported: {machine.import_trouble}",
            "pip install --upgrade lightning-odc torch lightning, and look at the first line above",
        )


def _version(package: str, found: str | None, oldest: str) -> Finding:
    is_extra = package == "transformers"
    if found is None:
        remedy = 'pip install "lightning-odc[demo]"' if is_extra else f"pip install --upgrade {package}"
        what = (
            "is not installed: no packing of Hugging Face models, no demo, no bench"
            if is_extra
            else "is not installed"
        )
        return Finding(package, "warning" if is_extra else "error", what, remedy)
    if found.partition("+")[0] in MALICIOUS.get(package, ()):
        remedy = f"pip uninstall {package} now, change every password that this machine knew, install another release"
        return Finding(package, "error", f"{found} was a malicious release", remedy)
    if _release(found) < _release(oldest):
        level: Level = "warning" if is_extra else "error"
        return Finding(
            package, level, f"{found} is older than {oldest}", f'pip install --upgrade "{package}>={oldest}"'
        )
    return Finding(package, "ok", f"{found} ({oldest} or newer works)")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``"2.13.0+cu130"`` is ``(2, 13, 0)``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_kernel(machine: Machine) -> Iterable[Finding]:
    """Check what the shared-memory transport needs of the kernel. GPUs need it, too, for control words."""
    yield from _of_probes("kernel", machine.kernel_trouble, _KERNEL_REMEDIES, fatal=_KERNEL_REMEDIES)


def check_network(machine: Machine) -> Iterable[Finding]:
    """Check what process groups need of the network."""
    yield from _of_probes("network", machine.network_trouble, _NETWORK_REMEDIES, fatal=("free ports",))


def _of_probes(
    topic: str, trouble: Mapping[str, str], remedies: Mapping[str, str], fatal: Container[str]
) -> Iterable[Finding]:
    """A finding for each probe that failed; one for all of them where none did."""
    wrong = {name: said for name, said in trouble.items() if said}
    for name, said in wrong.items():
        yield Finding(name, "error" if name in fatal else "warning", said, remedies[name])
    if trouble and not wrong:
        yield Finding(topic, "ok", ", ".join(trouble))


def check_memory(machine: Machine) -> Iterable[Finding]:
    """Host memory below the limit that is reached first."""
    room = min(machine.memory, key=lambda room: room.size, default=None)
    if room is None:
        return
    if room.size < LITTLE_MEMORY:
        said = f"{gib(room.size)} GiB are left: {room.limit}"
        yield Finding("memory", "warning", said, f"{room.remedy}: a rank alone takes about 0.5 GiB")
    else:
        yield Finding("memory", "ok", f"{gib(room.size)} GiB are left: {room.limit}")


def check_shm(machine: Machine) -> Iterable[Finding]:
    """``/dev/shm``, which windows do not use, but data workers do."""
    if machine.shm is None or machine.shm < LITTLE_SHM:
        size = "does not exist" if machine.shm is None else f"has {gib(machine.shm)} GiB left"
        yield Finding(
            "/dev/shm",
            "warning",
            f"it {size}; windows do not need it, but DataLoader workers pass batches through it",
            "docker run --shm-size=8g or --ipc=host, or DataLoader(num_workers=0)",
        )


def check_files(machine: Machine) -> Iterable[Finding]:
    """Descriptors: two per peer, and those of data workers."""
    if machine.open_files < FEW_FILES:
        said = (
            f"a process may open {machine.open_files} files; a rank opens two per peer, and its workers more"
        )
        yield Finding("open files", "warning", said, "ulimit -n 65536")


def check_gpus(machine: Machine) -> Iterable[Finding]:
    """GPUs that can reach each other, and whose additions are atomic."""
    if machine.import_trouble:
        return
    if not machine.devices:
        yield _no_gpus(machine)
        return
    names = sorted({one.name for one in machine.devices})
    yield Finding("GPUs", "ok", f"{len(machine.devices)} ({', '.join(names)}); {machine.devices[0].stack}")
    yield from check_reach(machine.devices)
    if not machine.nccl:
        yield Finding(
            "NCCL",
            "error",
            "this torch has none, and process groups of GPUs need it",
            "install a CUDA build of torch",
        )
    if machine.versions.get("triton") is None:
        yield Finding(
            "Triton",
            "warning",
            "is not installed: gradients get an accumulator per source rank, which takes more memory",
            "pip install 'lightning-odc[gpu]'",
        )


def _no_gpus(machine: Machine) -> Finding:
    if machine.gpu_without_torch:
        return Finding(
            "GPUs",
            "warning",
            "there is an NVIDIA GPU, and torch cannot use it",
            "install a CUDA build of torch (https://pytorch.org/get-started), and look at nvidia-smi",
        )
    return Finding("GPUs", "ok", "none: ranks are processes on the CPU")


def check_reach(devices: Sequence[DeviceFacts]) -> Iterable[Finding]:
    """Check what the CUDA transport would refuse, with its messages; each GPU stands for a rank of the same number."""
    from lightning_odc.engine.transports import preflight
    from lightning_odc.engine.transports.base import WindowSpec
    from lightning_odc.errors import WindowError

    try:
        preflight.check(devices, WindowSpec(units=(), words=0))
    except WindowError as error:
        yield Finding(
            "GPU memory of others", "error", str(error), "choose GPUs that can: CUDA_VISIBLE_DEVICES=..."
        )
        return
    reason = preflight.why_not_atomic(devices)
    if reason:
        said = f"{reason}: gradients get an accumulator per source rank, which takes more memory"
        yield Finding("GPU atomics", "warning", said, "nothing to do; GPUs joined by NVLink would need less")
    elif len(devices) > 1:
        yield Finding(
            "GPU links", "ok", "every GPU reads the memory of every other one and adds to it atomically"
        )


CHECKS: Sequence[Check] = (
    check_system,
    check_versions,
    check_kernel,
    check_memory,
    check_shm,
    check_files,
    check_network,
    check_gpus,
)
"""Everything that is judged, in the order in which it is said."""
