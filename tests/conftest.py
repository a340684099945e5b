"""Every test must leave the process as it found it."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECOND_TIER = ("benchmarks", "gpu")
#: Who has one of these has tests that need ranks.
RANKS = {"tests.support.ranks", "benchmarks.harness.processes"}


def pytest_configure() -> None:
    """Undo that a shell lets background jobs ignore Ctrl-C, which is tested, and let torch compute with one thread.

    Processes that tests start inherit both. Tests run side by side, and threads of OpenMP that wait on a busy core
    spin: a reference of one process took ten times as long as two ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # With it, asking whether there is a GPU does not start its driver, which would not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms of the second tier: experiments, and rehearsals of tests for GPUs. Other tests are marked one by one."""
    for item in items:
        parts = item.path.relative_to(Path(__file__).parent).parts
        if parts[0] in SECOND_TIER:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail on threads, file descriptors to windows and environment variables that a test leaves behind."""
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    windows = _windows()
    yield
    # One of tqdm's stays until the interpreter ends, for all bars of the process.
    others = [t for t in threading.enumerate() if t not in threads and t.name != "tqdm_monitor"]
    if others:
        gc.collect()
    for thread in others:
        thread.join(30)  # that of a queue to workers ends with its loader, and torch does not wait for it
    leaked = [thread.name for thread in others if thread.is_alive()]
    assert not leaked, f"threads left: {leaked}"
    if _windows() != windows:
        gc.collect()
    assert _windows() == windows, "windows left open"
    changed = {k for k in environment.keys() ^ os.environ.keys() if not k.startswith("PYTEST_")}
    assert not changed, f"environment variables left: {changed}"


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail on processes, windows and temporary files that the whole run leaves behind."""
    mark = f"LIGHTNING_ODC_TEST_RUN={secrets.token_hex(8)}"
    name, _, value = mark.partition("=")
    os.environ[name] = value  # every process that is started from here on inherits it
    before = os.environ.get("TMPDIR")
    folder = tmp_path_factory.mktemp("run")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if RANKS & sys.modules.keys():
        from tests.support.ranks import start_server

        start_server()
    yield
    deadline = time.monotonic() + 10
    while (processes := _descendants(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    del os.environ[name], os.environ["TMPDIR"]
    if before is not None:
        os.environ["TMPDIR"] = before
    tempfile.tempdir = None
    left = [path.name for path in folder.glob("lightning-odc*")]  # what libraries leave is theirs
    assert not processes, f"processes left: {processes}"
    assert _windows() == 0, "windows left open"
    assert not left, f"temporary files left: {left}"


@pytest.fixture(scope="session")
def teams(_nothing_is_left: None) -> Iterator[Any]:
    """The ranks of tests that are marked `on_ranks`."""
    from tests.support.ranks import Teams

    started = Teams()
    yield started
    started.end()


def _descendants(mark: str) -> dict[int, str]:
    """Command lines of processes of this run, but for itself and its servers that fork ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (path / "environ").read_bytes().split(b"\0"):
                continue
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended, or is not ours
        is_server = parent == os.getpid() and "multiprocessing" in line
        if line and int(path.name) != os.getpid() and not is_server:
            found[int(path.name)] = line
    return found


def _windows() -> int:
    """Windows that are open or mapped in this process."""
    links = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links += "lightning-odc" in str(fd.readlink())
        except OSError:
            continue
    return links + Path("/proc/self/maps").read_text().count("memfd:lightning-odc")
