"""Memory barriers between processes, for machines whose processors need them.

Note [What orders memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
Data is announced by a word: its owner writes the data, then the word; a reader reads the word, then the data. x86-64
keeps the order of stores, and that of loads. Weaker processors do not, and taking and giving back a lock of Python's in
between does not help: what stands before it may move past the taking, and what stands behind it before the giving
back. So there both sides call ``membarrier`` in between: Linux documents that all accesses of every thread of a
registered process are ordered with respect to that system call.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

from lightning_odc.errors import WindowError

#: The barrier between two accesses to shared memory, or ``None`` where the machine needs none.
Fence = Callable[[], None]

_STRONGLY_ORDERED = ("x86_64", "AMD64")
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}  # the number of the system call
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


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
    return membarrier(machine)


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
