"""A thread does jobs in order, and ends with its owner or with the interpreter."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_odc.background import Background
from tests.strategy.test_launcher import run

ALSO_AT_EXIT = """
import datetime
from torch.distributed import TCPStore
import pytest

from lightning_odc.background import Background

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))
is_over = False

def look():
    if is_over:
        raise SystemExit
    store.add("looks", 1)

def close():
    global is_over
    is_over = True
    thread.stop(5.0)
    print("closed")

thread = Background("looker", close, idle=look, every=0.0)
"""


def test_jobs_run_in_order_in_one_thread():
    done: list[object] = []
    thread = Background(
        "worker", lambda: None, begin=lambda: done.append("begin"), end=lambda: done.append("end")
    )
    for number in range(3):
        thread.do(lambda number=number: done.append((number, threading.current_thread().name)))
    thread.stop(5.0)
    name = "lightning-odc worker"
    assert done == ["begin", (0, name), (1, name), (2, name), "end"]
    thread.stop(5.0)
    assert thread.error is None


def test_it_looks_while_there_is_nothing_to_do_and_an_error_ends_it():
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise OSError("the store is gone")

    thread = Background("worker", lambda: None, idle=look, every=0.01)
    thread.do(lambda: None)
    deadline = time.monotonic() + 10
    while thread.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert str(thread.error) == "the store is gone"
    thread.stop(5.0)


@pytest.mark.slow
def test_one_that_nobody_closes_ends_before_the_interpreter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALSO_AT_EXIT)
    done = run(script, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed\n"
