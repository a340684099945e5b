"""Every test must leave the process as it found it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail on threads, file descriptors to windows and environment variables that a test leaves behind."""
    threads, environment, windows = set(threading.enumerate()), dict(os.environ), _windows()
    yield
    leaked = [t.name for t in threading.enumerate() if t not in threads and not t.daemon and t.is_alive()]
    assert not leaked, f"threads left: {leaked}"
    if _windows() != windows:
        gc.collect()
    assert _windows() == windows, "windows left open"
    changed = {k for k in environment.keys() ^ os.environ.keys() if not k.startswith("PYTEST_")}
    assert not changed, f"environment variables left: {changed}"


def _windows() -> int:
    """Windows that are open or mapped in this process."""
    links = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links += "lightning-odc" in str(fd.readlink())
        except OSError:
            continue
    return links + Path("/proc/self/maps").read_text().count("memfd:lightning-odc")
