"""How much memory of the host is left, what limits it, whom the kernel has ended: read from trees of made-up files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_odc import host_memory
from lightning_odc.host_memory import Kills, Room, rooms

#: By case: /proc/self/cgroup, {group: (limit, used, reclaimable)}, and what is left of a host's 64 KiB.
GROUPS: dict[str, tuple[str, dict[str, tuple[Any, int, int]], int]] = {
    "none": ("", {}, 65536),
    "own group": ("0::/job", {"job": (9000, 5000, 1000)}, 5000),
    "a group above": (
        "0::/job/step/task",
        {"job": (9000, 8000, 0), "job/step": ("max", 7000, 0), "job/step/task": (30000, 7000, 0)},
        1000,
    ),
    "namespace": ("0::/", {"": (9000, 5000, 0)}, 4000),
    "outside of its namespace": ("0::/../job", {"": (9000, 5000, 0)}, 4000),
    "no limit": ("0::/job", {"job": ("max", 5000, 0)}, 65536),
    "over its limit": ("0::/job", {"job": (9000, 9500, 0)}, 0),
    "beside others": ("4:memory:/other\n0::/job", {"job": (9000, 5000, 0)}, 4000),
}


def tree(root: Path, own: str = "", available_kib: int = 64) -> Path:
    """The files of a host and of this process."""
    process = root / "proc/self"
    process.mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable:      {available_kib} kB\n")
    if own:
        (process / "cgroup").write_text(f"{own}\n")
    return root


def group(folder: Path, stat: str = "", **numbers: Any) -> None:
    """The files of a control group: ``max=9000`` is ``memory.max``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.stat").write_text(f"anon 1\n{stat}")
    for name, number in numbers.items():
        (folder / f"memory.{name}").write_text(f"{number}\n")


def least() -> Room:
    return min(rooms(), key=lambda room: room.size)


@pytest.mark.parametrize("case", GROUPS)
def test_what_is_left_is_the_least_that_the_host_and_all_groups_above_have(tmp_path, case, monkeypatch):
    own, groups, left = GROUPS[case]
    for name, (limit, used, reclaimable) in groups.items():
        group(tmp_path / "sys/fs/cgroup" / name, f"inactive_file {reclaimable}\n", max=limit, current=used)
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, own))
    room = least()
    assert room.size == left
    assert ("control group /" in room.limit) == (left != 65536)
    assert ("MemAvailable" in room.limit) == (left == 65536)


def test_of_the_page_cache_in_use_half_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, "0::/job"))
    for stat, left in (("active_file 1000\nfile 9000\nshmem 3000\n", 4500), ("active_file 90000\n", 9000)):
        group(tmp_path / "sys/fs/cgroup/job", stat, max=9000, current=5000)
        assert least().size == left
        assert least().limit == "control group /job allows 0.00 GiB (memory.max)"


def test_the_message_says_how_much_is_needed_and_left_who_limits_it_and_what_to_do(tmp_path, monkeypatch):
    group(tmp_path / "sys/fs/cgroup/job", max=3 * 2**30, current=2**30)
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, "0::/job", 2**30))
    assert host_memory.available(4) == 2**29, "they share it"
    assert host_memory.shortage("the windows", 2 * 2**30, "use less") == ""
    found = host_memory.shortage("the windows", 5 * 2**29, "use less")
    assert found == (
        "the windows need 2.50 GiB, but 2.00 GiB are free: control group /job allows 3.00 GiB (memory.max). To "
        "continue, raise that limit (SLURM: --mem=..., Docker: --memory=..., Kubernetes: resources.limits.memory, "
        "systemd: MemoryMax=...), or use less."
    )


def test_elsewhere_than_on_linux_nothing_is_known_and_nothing_refused(tmp_path, monkeypatch):
    here = host_memory.available()
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    assert 0 < here < 2**60
    assert rooms() == []
    assert host_memory.shortage("windows", 2**60, "") == ""
    assert host_memory.available(2) > 2**50
    assert Kills().verdict() == ""


def count_kill(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\nmax 7\noom {number}\noom_kill {number}\noom_group_kill 0\n")


def test_kills_of_the_closest_group_are_said(tmp_path, monkeypatch):
    groups = tmp_path / "sys/fs/cgroup"
    files = {"own": groups / "job/task/memory.events", "above": groups / "job/memory.events"}
    files["host"] = tmp_path / "proc/vmstat"
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, "0::/job/task"))
    for path in files.values():
        count_kill(path, 3)
    kills = Kills()
    assert kills.verdict() == "", "they were before"
    count_kill(files["host"], 4)
    assert "ran out in this host: " in kills.verdict()
    count_kill(files["above"], 5)
    assert "ran out in control group /job: " in kills.verdict()
    assert "since this run began (2)" in kills.verdict()
    count_kill(files["own"], 4)
    assert "ran out in control group /job/task: " in kills.verdict()
    assert "Kubernetes: resources.limits.memory" in kills.verdict()
