"""Ranks that this process has started and that outlive the job: stopped, or stuck where nothing reaches them."""

from __future__ import annotations

import atexit
import subprocess
import time
from typing import Any

#: Seconds that they have to end by themselves after somebody gave up waiting for them.
GRACE = 10.0

_LOOK_EVERY = 0.05


def end_at_exit(launcher: Any) -> None:
    """Let no process of Lightning's script launcher outlive this one.

    ``torchrun`` and schedulers kill what stays; Lightning's own launcher does so only when a rank ends with an error,
    which a stopped or stuck one never does.

    Args:
        launcher: the strategy's; one that has started no scripts is left alone.
    """
    children = [
        child for child in getattr(launcher, "procs", None) or () if isinstance(child, subprocess.Popen)
    ]
    if children:
        atexit.register(end, children, time.monotonic() + GRACE)


def end(children: list[subprocess.Popen[Any]], deadline: float) -> None:
    """Wait until ``deadline`` (of the monotonic clock) for processes to end, then kill those that did not."""
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
