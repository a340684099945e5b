"""Memory of this host: how much a process may still take, what limits it, and which processes the kernel has ended.

Note [What limits memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
The first limit that is reached counts, and the kernel answers with SIGKILL and not with an error::

    limit                                        of                what is left
    the host                                     all processes     MemAvailable of /proc/meminfo
    each control group above this process        its processes     limit - use + what the kernel can take back

Control groups are those of version 2. Their use counts the page cache of files, which the kernel takes back before it
ends a process. Inactive pages count as free, and half of the active ones, which would be read again and again. If a
group allows 8 GiB and uses 6, with 1.5 inactive and 1 active, then 8 - 6 + 1.5 + 0.5 = 4 GiB are left. Above
``memory.high`` processes wait for memory that the kernel cannot find, so it is a limit, too.

Note [Whom the kernel ended]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that the kernel ends because memory has run out says nothing, but the kernel has counted it: in its own
control group, in those above, and for the host. A count further up may be that of another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class _Group(NamedTuple):
    """A control group that may limit the memory of this process."""

    folder: Path
    name: str
    is_own: bool


def rooms(root: Path | None = None) -> list[Room]:
    """What is left below every limit of this process, none where it is no Linux; see Note [What limits memory]."""
    root = root or ROOT
    found: list[Room] = []
    with contextlib.suppress(OSError):  # this is not Linux
        lines = (root / "proc/meminfo").read_text().splitlines()
        meminfo = dict(line.split(":") for line in lines)
        kib = int(meminfo["MemAvailable"].split()[0])
        limit = "this host has no more (MemAvailable of /proc/meminfo)"
        found.append(Room(kib * 1024, limit, "end what else runs on it"))
    for group in _control_groups(root):
        room = _room_of_group(group)
        if room is not None:
            found.append(room)
    return found


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
        f"{what} need {gib(needed)} GiB, but {gib(worst.size)} GiB are free: {worst.limit}. To go on, "
        f"{worst.remedy}, or {instead}."
    )


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f}"


class Kills:
    """Processes that the out-of-memory killer ended since this object was made; see Note [Whom the kernel ended]."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or ROOT
        self._before = dict(_kills(self._root))

    def verdict(self) -> str:
        """A sentence about a killed process; empty if the kernel ended none because memory ran out."""
        for (name, is_own), count in _kills(self._root):  # the closest to this process first
            ended = count - self._before.get((name, is_own), count)
            if ended > 0:
                processes = f"{ended} processes"
                if ended == 1:
                    processes = "1 process"
                sure = "it probably ran"
                if is_own:
                    sure = "it ran"
                return (
                    f"The kernel's out-of-memory killer has ended {processes} of {name} since this run began: {sure} "
                    "out of host memory (not of a GPU's). Use fewer data workers, smaller batches or a smaller "
                    f"model, or {_RAISE_GROUP}."
                )
        return ""


def _kills(root: Path) -> Iterator[tuple[tuple[str, bool], int]]:
    """Name and whether it is this process's own group, and processes ended in it; the host last."""
    for group in reversed(list(_control_groups(root))):
        count = _fields(group.folder / "memory.events").get("oom_kill")
        if count is not None:
            yield (group.name, group.is_own), count
    count = _fields(root / "proc/vmstat").get("oom_kill")
    if count is not None:
        yield ("this host", False), count


def _room_of_group(group: _Group) -> Room | None:
    limits = []
    for name in ("memory.max", "memory.high"):
        size = _number(group.folder / name)
        if size is not None:
            limits.append((size, name))
    used = _number(group.folder / "memory.current")
    if not limits or used is None:
        return None
    limit, name = min(limits)
    stat = _fields(group.folder / "memory.stat")
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0) // 2
    free = max(limit - used + reclaimable, 0)
    free = min(free, limit)
    return Room(free, f"{group.name} allows {gib(limit)} GiB ({name})", _RAISE_GROUP)


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` if there is no such file or another word in it, such as ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number; empty where there is no such file."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}


def _control_groups(root: Path) -> Iterator[_Group]:
    """Every control group that may limit the memory of this process, as far as mounted; from the top down."""
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
        if own is None:
            return
        top = root / "sys/fs/cgroup"
        if (top / "unified").is_dir():  # beside version 1
            top /= "unified"
        parts = [part for part in own.split("/") if part]
        if ".." in parts or not top.joinpath(*parts).is_dir():
            parts = []  # the group lies outside of what this container shows
        for depth in range(len(parts) + 1):
            above = parts[:depth]
            name = f"control group /{'/'.join(above)}"
            yield _Group(top.joinpath(*above), name, is_own=depth == len(parts))
