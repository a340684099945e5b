"""What this host can give: Linux, its identity, its free memory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from lightning_odc.errors import WindowError


def check_platform() -> None:
    """Refuse where there is no shared memory of our kind.

    Raises:
        WindowError: this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise WindowError(
            'the shared-memory transport needs Linux; elsewhere use ODCStrategy(communication="collective").'
        )


def check_memory(size: int, world_size: int) -> None:
    """Refuse before the kernel kills: memory that is promised here is used for sure.

    Args:
        size: bytes of one rank's window.
        world_size: number of windows.

    Raises:
        WindowError: all windows together need more than is free.
    """
    available = available_memory()
    needed = size * world_size
    if needed > available:
        raise WindowError(
            f"the windows need {gib(needed)} GiB ({world_size} ranks of {gib(size)} GiB: published shards and "
            f"gradient accumulators), but {gib(available)} GiB are free. Use fewer ranks per host, a smaller model, "
            'bf16 (Trainer(precision="bf16-mixed") halves the shards), or ODCStrategy(communication="collective").'
        )


def available_memory() -> int:
    """Bytes that processes here may still take: the host's, or the control group's if that is less."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free.append(max(limit - used + int(stat["inactive_file"]), 0))
    return min(free)


def boot_id() -> str:
    """The same for all processes that share this kernel, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f}"
