"""Memory of this host: how much a process may still take, what limits it, and which processes the kernel has ended.

Note [What limits memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
The first limit that is reached counts, and the kernel answers with SIGKILL and not with an error::

    limit                                        of                what is left
    the host                                     all processes     MemAvailable of /proc/meminfo
    each control group above this process        its processes     limit - use + what the kernel can take back

Control groups are those of version 2. Their use counts the page cache of files, which the kernel takes back before it
ends a process. Inactive pages count as free, and half of the active ones, which would be read again and again. If a
group allows 8 GiB and uses 6, with 1.5 inactive and 1 active, then 8 - 6 + 1.5 + 0.5 = 4 GiB are left.

Note [Whom the kernel ended]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that the kernel ends because memory has run out says nothing, but the kernel has counted it: in its own
control group, in those above, and for the host. A count further up may be that of another program.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: The folder of ``proc`` and ``sys``.
ROOT = Path("/")

_UNLIMITED = 2**60
_RAISE_GROUP = (
    "raise that limit (SLURM: --mem=..., Docker: --memory=..., Kubernetes: resources.limits.memory, systemd: "
    "MemoryMax=...)"
)


@dataclass(frozen=True)
class Room:
    """What is left below one limit."""

    size: int  # bytes
    limit: str  # the limit, as the subject of a message
    remedy: str  # how to raise it


def rooms() -> list[Room]:
    """What is left below every limit of this process, none where it is no Linux; see Note [What limits memory]."""
    left = []
    kib = _fields(ROOT / "proc/meminfo").get("MemAvailable:")
    if kib is not None:
        limit = "this host has no more (MemAvailable of /proc/meminfo)"
        left.append(Room(kib * 1024, limit, "end what else runs on it"))
    for name, folder in _control_groups().items():
        try:
            most = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
        except (OSError, ValueError):  # there is no such file, or the limit is "max"
            continue
        stat = _fields(folder / "memory.stat")
        reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0) // 2
        free = max(most - used + reclaimable, 0)
        left.append(Room(min(free, most), f"{name} allows {gib(most)} GiB (memory.max)", _RAISE_GROUP))
    return left


def total(processes: int = 1) -> int:
    """Bytes that the limits leave to each of so many processes, whatever is free of them now."""
    kib = _fields(ROOT / "proc/meminfo").get("MemTotal:", _UNLIMITED)
    limits = [_UNLIMITED, kib * 1024]
    for folder in _control_groups().values():
        with suppress(OSError, ValueError):  # there is no such file, or the limit is "max"
            limits.append(int((folder / "memory.max").read_text()))
    return min(limits) // processes


def available(processes: int = 1) -> int:
    """Bytes that each of the processes may still take, if all of them take as much."""
    return min((room.size for room in rooms()), default=_UNLIMITED) // processes


def shortage(what: str, needed: int, instead: str) -> str:
    """The message if memory does not suffice; empty if it does."""
    # ``what`` is the plural subject of the sentence, ``needed`` all processes' bytes together, and ``instead`` what
    # else to do, behind "or".
    worst = min(rooms(), key=lambda room: room.size, default=None)
    if worst is None or needed <= worst.size:
        return ""
    return (
        f"{what} need {gib(needed)} GiB, but {gib(worst.size)} GiB are free: {worst.limit}. To continue, "
        f"{worst.remedy}, or {instead}."
    )


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f}"


class Kills:
    """Processes that the out-of-memory killer ended since this object was made; see Note [Whom the kernel ended]."""

    def __init__(self) -> None:
        self._before = _kills()

    def verdict(self) -> str:
        """A sentence about a killed process; empty if the kernel ended none because memory ran out."""
        for name, count in _kills().items():
            ended = count - self._before.get(name, count)
            if ended > 0:
                return (
                    f"Host memory (not that of a GPU) ran out in {name}: the kernel's out-of-memory killer has ended "
                    f"processes there since this run began ({ended}). Use fewer data workers, smaller batches or a "
                    f"smaller model, or {_RAISE_GROUP}."
                )
        return ""


def _kills() -> dict[str, int]:
    """Processes ended so far, by where they ran; the closest to this process first."""
    ended = {}
    for name, folder in _control_groups().items():
        ended[name] = _fields(folder / "memory.events").get("oom_kill", 0)
    ended["this host"] = _fields(ROOT / "proc/vmstat").get("oom_kill", 0)
    return ended


def _fields(path: Path) -> dict[str, int]:
    """The names and numbers with which lines begin; empty where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines}


def _control_groups() -> dict[str, Path]:
    """Folders of the control groups that may limit the memory of this process, as far as mounted; its own first."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    top = ROOT / "sys/fs/cgroup"
    groups = {}
    for line in lines:
        if not line.startswith("0::/"):
            continue
        folder = top / line.removeprefix("0::/")
        if ".." in folder.parts or not folder.is_dir():
            folder = top  # the group lies outside of what this container shows
        while folder.is_relative_to(top):
            name = str(folder).removeprefix(str(top))
            groups[f"control group {name or '/'}"] = folder
            folder = folder.parent
    return groups
