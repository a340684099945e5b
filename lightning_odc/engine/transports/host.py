"""What this host can give: Linux, its identity, its free memory, an order of accesses to memory.

Note [What orders memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
Data is announced by a word: its owner writes the data, then the word; a reader reads the word, then the data. x86-64
keeps the order of stores, and that of loads. Weaker processors (Arm, as in NVIDIA's Grace) do not, and taking and
giving back a lock of Python's in between does not help: what stands before it may move past the taking, and what stands
behind it before the giving back. So there both sides need a full barrier in between.

Python has none. The C function ``atomic_thread_fence`` is one, a few nanoseconds long, and exported by libatomic. Where
that is missing, the system call ``membarrier`` does the same and more: Linux documents that all accesses of every
thread of a registered process are ordered with respect to it. Each orders the accesses of the rank that calls it, so
ranks may use either.

A reader needs its barrier only when a word is another one than the same thread read last: what an old value announces
was ordered when it was new. A rank that waits for a word reads it thousands of times and has one barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from lightning_odc.errors import WindowError

#: The barrier between two accesses to shared memory, or ``None`` where the machine needs none.
Fence = Callable[[], None]

_STRONGLY_ORDERED = ("x86_64", "AMD64")
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}  # the number of the system call
_SEQUENTIALLY_CONSISTENT = 5  # memory_order_seq_cst of <stdatomic.h>, in GCC and Clang
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2

#: The limit and the use of a control group, and what the kernel can take back of it, by the group's controller
#: (none in version 2).
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def check_platform() -> None:
    """Refuse where there is no shared memory of our kind.

    Raises:
        WindowError: this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise WindowError(
            'the shared-memory transport needs Linux; elsewhere use ODCStrategy(communication="collective").'
        )


def check_memory(size: int, world_size: int, holds: str) -> None:
    """Refuse before the kernel kills: memory that is promised here is used for sure.

    Args:
        size: bytes of one rank's window.
        world_size: number of windows.
        holds: what windows hold, for the message.

    Raises:
        WindowError: all windows together need more than is free.
    """
    available = available_memory()
    needed = size * world_size
    if needed > available:
        raise WindowError(
            f"the windows need {gib(needed)} GiB ({world_size} ranks of {gib(size)} GiB: {holds}), but "
            f'{gib(available)} GiB are free. Use a smaller model, bf16 (Trainer(precision="bf16-mixed") halves the '
            "shards, ODCStrategy(accumulator_dtype=torch.bfloat16) the accumulators), or "
            'ODCStrategy(communication="collective").'
        )


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least that the host and all control groups above it have left.

    Args:
        root: The folder of ``proc`` and ``sys``.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for controller, group in _control_groups(root):
        limit_file, use_file, reclaimable = _GROUP_FILES[controller]
        with contextlib.suppress(OSError, ValueError):  # no limit, or no access
            limit, used = (int((group / name).read_text()) for name in (limit_file, use_file))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free.append(max(limit - used + int(stat.get(reclaimable, 0)), 0))
    return min(free)


def _control_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Controller and folder of every control group that may limit the memory of this process, as far as mounted."""
    own: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
    for controller, top, mount in _group_mounts(root):
        if controller in own:
            parts = _below(own[controller], top)
            yield from ((controller, mount.joinpath(*parts[:depth])) for depth in range(len(parts) + 1))


def _group_mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Controller, uppermost group and place of every mounted tree of control groups that limits memory."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            top, place = mount.split()[3:5]
            kind, *_, options = system.split()
            if kind == "cgroup2":
                yield "", top, root / place.lstrip("/")
            elif kind == "cgroup" and "memory" in options.split(","):
                yield "memory", top, root / place.lstrip("/")


def _below(path: str, top: str) -> tuple[str, ...]:
    """The groups on the way from ``top`` down to ``path``; none if it lies elsewhere, as seen from a namespace."""
    try:
        parts = PurePosixPath(path).relative_to(top).parts
    except ValueError:
        return ()
    return () if ".." in parts else parts


def boot_id() -> str:
    """The same for all processes that share this kernel, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f}"


def make_fence(machine: str = "") -> Fence | None:
    """The fence of this machine. Every process that shares memory must make one before any of them uses it.

    Args:
        machine: as ``platform.machine()`` says, which is the default.

    Raises:
        WindowError: nothing is known to order memory here.
    """
    machine = machine or platform.machine()
    if machine in _STRONGLY_ORDERED:
        return None
    return thread_fence() or membarrier(machine)


def thread_fence() -> Fence | None:
    """A full barrier of the thread that calls it; ``None`` where there is no libatomic."""
    try:
        fence = ctypes.PyDLL(
            "libatomic.so.1"
        ).atomic_thread_fence  # so short that it keeps the interpreter's lock
    except (OSError, AttributeError):
        return None
    fence.argtypes, fence.restype = [ctypes.c_int], None
    return partial(fence, _SEQUENTIALLY_CONSISTENT)


def membarrier(machine: str) -> Fence:
    """A full barrier between this process and all others that have registered by a call of this function.

    Raises:
        WindowError: the kernel has no such system call, or something does not let it through.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number = _MEMBARRIER.get(machine)

    def call(command: int) -> None:
        if number is None or libc.syscall(number, command, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno()) if number is not None else "its number is not known"
            raise WindowError(
                f"on {machine} processors sharing memory needs the system call membarrier, which failed ({reason}). "
                'Use ODCStrategy(communication="collective"), or let it through (seccomp profile of the container).'
            )

    call(_REGISTER_GLOBAL_EXPEDITED)

    def fence() -> None:
        call(_GLOBAL_EXPEDITED)

    fence()
    return fence
