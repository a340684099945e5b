"""What this host can give: Linux, its identity, how a process ended, an order of accesses to memory.

Note [What orders memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
A word announces data: its owner writes the data, then the word; a reader reads the word, then the data. x86-64
keeps the order of stores, and that of loads. Weaker processors (Arm, as in NVIDIA's Grace) do not, and a Python lock in
between does not help. So both sides need a full barrier there: the C function ``atomic_thread_fence``, a few
nanoseconds long, which libatomic exports.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_odc.errors import WindowError

#: The barrier between two accesses to shared memory, or ``None`` where the machine needs none.
Fence = Callable[[], None]

_STRONGLY_ORDERED = ("x86_64", "AMD64")
_SEQUENTIALLY_CONSISTENT = 5  # memory_order_seq_cst of <stdatomic.h>, in GCC and Clang
_STATUS_FIELD = 52  # of /proc/<pid>/stat, counted from 1; see proc(5)
_PIDFD_INFO = struct.Struct("<Q52xi")  # what is asked for and given; 64 bytes, as in the first version
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC0400000 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, 64 bytes)


def boot_id() -> str:
    """An id that all processes of this kernel share, and no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def how_ended(pid: int, pidfd: int | None = None) -> str:
    """How a process ended that is no child of this one: ``"SIGKILL"``, ``"exit code 1"``; empty if Linux hides it."""
    # Linux tells the parent alone. Until the parent has asked, the number stands in ``/proc``. Since Linux 6.15 a
    # descriptor that was opened while the process lived has it afterwards.
    for look in (_status_of_reaped, _status_of_zombie, _status_of_reaped):  # it may be reaped in between
        status = look(pid, pidfd)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            if code >= 0:
                return f"exit code {code}"
            names = {int(number): number.name for number in signal.Signals}
            return names.get(-code, f"signal {-code}")
    return ""


def _status_of_zombie(pid: int, _: int | None) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        fields = after_name.split()  # from the third one on
        if fields[0] == "Z":
            return int(fields[_STATUS_FIELD - 3])
    return None


def _status_of_reaped(_: int, pidfd: int | None) -> int | None:
    """By ``PIDFD_GET_INFO`` of <linux/pidfd.h>: what is wanted, some ids, and the status at the end."""
    if pidfd is None:
        return None
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        found, status = _PIDFD_INFO.unpack(info)
        if found & _PIDFD_INFO_EXIT:
            return int(status)
    return None


def make_fence(machine: str = "") -> Fence | None:
    """A full barrier of the thread that calls it; ``None`` where the machine needs none."""
    machine = machine or platform.machine()
    if machine in _STRONGLY_ORDERED:
        return None
    try:
        # So short that it keeps the interpreter's lock: ``PyDLL``.
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise WindowError(
            f"sharing memory on {machine} processors needs libatomic: apt-get install libatomic1. Or use "
            'ODCStrategy(communication="collective").'
        ) from error
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    return partial(fence, _SEQUENTIALLY_CONSISTENT)
