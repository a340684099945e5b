"""Shared memory between real processes: opening, attaching, closing, dying, and the order of accesses."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import platform
import re
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_odc import host_memory
from lightning_odc.errors import WindowError
from lightning_odc.host_memory import Room
from lightning_odc.protocol.transports import host, shared_memory
from lightning_odc.protocol.transports.base import UnitSpec, WindowSpec, process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import HEADER_BYTES, MappedWindow, SharedMemoryTransport
from tests.protocol.transports.test_contract import (
    SPEC,
    data_is_there_when_its_word_is,
    in_one_process,
)
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks, try_ranks

LINUX = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])

# -- dying ------------------------------------------------------------------------------------------------


def _forked_worker() -> int:
    """A process that does nothing, as a ``DataLoader`` worker between two batches; ends by itself after a minute."""
    worker = os.fork()
    if worker == 0:
        signal.alarm(60)
        signal.pause()
    return worker


def _dies_with_the_lock(rank: int, forks: bool, crowd: int) -> list[Any]:
    """Rank 1 dies, which may have a worker; so many other files are open meanwhile."""
    init_gloo(rank)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(crowd)]
    transport = SharedMemoryTransport(rank, 2, rendezvous)
    transport.open(SPEC)
    if rank == 1:
        assert transport.lock(0, 0).take()
    forked = None
    if forks and rank == 1:
        forked = _forked_worker()
    worker = rendezvous(forked)[1]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not transport.dead_peers():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    if forks:
        assert not transport.lock(0, 0).take(), "the worker has inherited it"
        os.kill(worker, signal.SIGKILL)
    while not transport.lock(0, 0).take():
        assert time.monotonic() < deadline
    still_readable = transport.shard(1, 2).sum().item()
    name = transport.describe(1)
    ending = transport.how_ended(1)
    assert min(transport._pidfds.values()) > crowd
    transport.close()
    for fd in others:
        os.close(fd)
    dist.destroy_process_group()
    return [transport.rank, still_readable, "process" in name, ending]


@pytest.mark.parametrize(
    ("forks", "crowd"),
    [(False, 0), (True, 1100)],
    ids=["alone", "with a forked worker, and more files than `select` can take"],
)
def test_a_killed_rank_is_known_dead_and_its_lock_is_freed(forks, crowd):
    survivor, killed = try_ranks(_dies_with_the_lock, forks, crowd, timeout=30)
    assert survivor.result[:3] == [0, 0.0, True]
    assert survivor.error == ""
    assert survivor.exitcode == 0
    # Before Linux 6.15 its parent may have taken it away.
    if LINUX >= (6, 15):
        expected = ["SIGKILL"]
    else:
        expected = ["SIGKILL", ""]
    assert survivor.result[3] in expected
    assert killed.exitcode == -signal.SIGKILL


# -- opening ----------------------------------------------------------------------------------------------


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@contextmanager
def little_address_space() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + 2**27):
        yield


def sees(rooms: list[Room]) -> Any:
    return patch.object(host_memory, "rooms", lambda: rooms)


def signs(sign: Callable[[MappedWindow, bytes, int], None]) -> Any:
    return patch.object(MappedWindow, "write_header", sign)


def sabotage(what: str, stack: ExitStack) -> None:
    """Do to this rank what is wrong with it, until the stack ends."""
    header = MappedWindow.write_header
    addressed = SharedMemoryTransport._create
    nowhere = lambda *args: replace(addressed(*args), fd=999)  # noqa: E731
    rooms = [Room(1000, "a test allows 1000 bytes", "allow more")]
    contexts: dict[str, list[Any]] = {
        "little memory": [sees(rooms)],
        "RLIMIT_FSIZE": [limited(resource.RLIMIT_FSIZE, 4096)],
        "RLIMIT_AS": [little_address_space()],
        "signs with another secret": [signs(lambda own, _, rank: header(own, bytes(32), rank))],
        "signs as another rank": [signs(lambda own, secret, _: header(own, secret, 0))],
        "another descriptor": [patch.object(SharedMemoryTransport, "_create", nowhere)],
    }
    for context in contexts[what]:
        stack.enter_context(context)


LARGE = WindowSpec(units=(UnitSpec("large", 2**26, torch.float32, 0, torch.float32),), words=1)

#: By what is wrong with rank 1: what all ranks say after "could not share memory with its peers", as patterns.
REFUSED = {
    "little memory": [
        r"Rank 1 .*: the windows \(2 ranks of 0\.00 GiB: ",
        "need 0.00 GiB, but 0.00 GiB are free: a test allows 1000 bytes. To continue, allow more, or use",
        "bf16-mixed",
    ],
    "RLIMIT_FSIZE": [
        r"Rank 1 .*: a window of 0\.25 GiB could not be allocated: File too large\. Look at the limits of",
    ],
    "RLIMIT_AS": [
        r"Rank 1 .*: a window of 0\.25 GiB could not be mapped: Cannot allocate memory\. Look at the limits of",
    ],
    "signs with another secret": ["Rank 0 .*: the window of rank 1 does not belong to this job"],
    "signs as another rank": ["Rank 0 .*: the window of rank 1 does not belong to this job"],
    "another descriptor": [
        r"Rank 0 .*: the window of rank 1 \(process \d+\) cannot be opened: No such file",
        "--distribution=block",
    ],
}


def made(rank: int) -> tuple[SharedMemoryTransport, Any]:
    """A transport, and the rendezvous of its ranks."""
    gc.collect()  # errors of tests before have kept windows
    init_gloo(rank)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    return SharedMemoryTransport(rank, 2, rendezvous), rendezvous


@on_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_with_one_rank_is_refused_on_every_rank(rank, what):
    """No rank may survive, or leak."""
    transport, rendezvous = made(rank)
    before = len(_window_links()), _window_maps()
    rendezvous(None)  # starts threads, which some limits would prevent
    with ExitStack() as stack:
        if rank == 1:
            sabotage(what, stack)
        with pytest.raises(WindowError) as error:
            transport.open(LARGE if "limit" in what or "RLIMIT" in what else SPEC)
    assert (len(_window_links()), _window_maps()) == before
    first, second = rendezvous(str(error.value))
    assert first == second
    begin, *others = REFUSED[what]
    assert re.match(begin.replace(".*", "could not share memory with its peers"), first), first
    for other in others:
        assert re.search(other, first), first


def _window_bytes(pid: int) -> int:
    windows = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            if "lightning-odc" in os.readlink(path):
                windows[path.stat().st_ino] = path.stat().st_size
    return sum(windows.values())


@on_ranks(2)
def test_a_rank_that_looks_late_does_not_count_windows_twice(rank):
    """Windows that exist count as used; rank 1 looks a second after rank 0 did."""
    transport, rendezvous = made(rank)
    pids = rendezvous(os.getpid())
    size = HEADER_BYTES + SPEC.total_bytes
    kept = sum(_window_bytes(pid) for pid in pids)  # by tests before

    def what_is_left() -> int:
        time.sleep(rank)
        return 2 * size + kept - sum(_window_bytes(pid) for pid in pids)

    with patch.object(host_memory, "rooms", lambda: [Room(what_is_left(), "a test", "")]):
        transport.open(SPEC)
        assert what_is_left() <= 0
    rendezvous(None)
    transport.close()


# -- closing ----------------------------------------------------------------------------------------------


def _window_links() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [link for link in links if "lightning-odc" in link]


def _window_maps() -> int:
    return Path("/proc/self/maps").read_text().count("lightning-odc")


@on_ranks(2, alone=True)
def test_memory_lives_as_long_as_its_last_view(rank):
    """Views outlive the transport, descriptors and locks do not, and the memory goes with the last view."""
    transport, rendezvous = made(rank)
    transport.open(SPEC)
    assert len(_window_links()) == 2
    assert Path("/proc/self/maps").read_text().count("/dev/shm/") == 0, "windows have no name"
    transport.shard(rank, 2).fill_(1 + rank)
    rendezvous(None)
    views = [transport.shard(owner, 2)[3:].view(torch.int32) for owner in range(2)]
    if rank == 1:
        assert transport.lock(0, 0).take()
        transport.close()
    rendezvous(None)
    if rank == 0:
        assert transport.lock(0, 0).take(), "a closed transport holds no lock"
        transport.close()
    rendezvous(None)
    assert len(_window_links()) == 0
    assert _window_maps() == 2
    assert [view.view(torch.float32).unique().tolist() for view in views] == [[1.0], [2.0]]
    rendezvous(None)
    views[rank].view(torch.float32).fill_(3 + rank)
    rendezvous(None)
    assert [view.view(torch.float32).unique().tolist() for view in views] == [[3.0], [4.0]]
    views.pop()
    assert _window_maps() == 1
    views.clear()
    assert _window_maps() == 0


# -- ordering memory --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_fenced_transport_works_and_fences_every_word(rank):
    """As weakly ordered machines do it."""
    fences: list[int] = []
    with patch.object(host, "make_fence", lambda: lambda: fences.append(1)):
        seen = 0
        if rank:
            seen = 399
        assert in_one_process(rank, data_is_there_when_its_word_is) == [seen]
    assert len(fences) >= 2 * 399  # a store of one's own word and a new value of the other's per version


def test_stores_are_fenced_before_and_loads_after(monkeypatch):
    events: list[str] = []

    class Words:
        def __getitem__(self, word: int) -> int:
            events.append("load")
            return 0

        def __setitem__(self, word: int, value: int) -> None:
            events.append("store")

    class Window:
        words = Words()
        fd = -1

    def lock(_fd: int, _command: int, flock: bytes) -> None:
        event = "unlock"
        if struct.unpack_from("h", flock)[0] == fcntl.F_WRLCK:
            event = "lock"
        events.append(event)

    monkeypatch.setattr(shared_memory.fcntl, "fcntl", lock)
    transport = SharedMemoryTransport(0, 1, lambda item: [item])
    transport._windows[0] = Window()  # type: ignore[assignment]
    transport._fence = lambda: events.append("fence")
    operations: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: transport.load(0, 0), ["load", "fence"]),
        (lambda: transport.store(0, 1), ["fence", "store"]),
        (lambda: transport.watch(0, 2)(), ["load", "fence"]),
        (lambda: transport.lock(0, 0).take(), ["lock", "fence"]),
        (lambda: transport.lock(0, 0).give(), ["fence", "unlock"]),
    ]
    for operation, expected in operations:
        events.clear()
        operation()
        assert events == expected


def test_which_fence_a_machine_takes(monkeypatch):
    """None where memory is strongly ordered; else that of libatomic, which not every machine has."""
    make = ctypes.PyDLL
    assert host.make_fence("x86_64") is None
    for library in ("no such library", "libc.so.6"):
        monkeypatch.setattr(ctypes, "PyDLL", lambda name, library=library: make(library))
        says = (
            r"on aarch64 processors needs libatomic: apt-get install libatomic1.*communication=\"collective\""
        )
        with pytest.raises(WindowError, match=says):
            host.make_fence("aarch64")
    fence = SimpleNamespace(atomic_thread_fence=lambda order: order)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: fence)
    made: Any = host.make_fence("aarch64")
    assert made() == 5  # memory_order_seq_cst


ENDS: dict[str, Callable[[], None]] = {
    "exit code 7": lambda: os._exit(7),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    f"signal {signal.SIGRTMIN + 3}": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3),
}


@pytest.mark.parametrize("expected", ENDS)
def test_how_a_process_ended_is_found_in_proc_and_later_by_its_descriptor(expected):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ENDS[expected]()
        os._exit(99)
    pidfd = os.pidfd_open(pid)
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert host.how_ended(pid, pidfd) == expected
    finally:
        os.waitpid(pid, 0)
    found = host.how_ended(pid, pidfd)
    wanted = ""
    if LINUX >= (6, 15):
        wanted = expected
    assert found == wanted
    os.close(pidfd)
