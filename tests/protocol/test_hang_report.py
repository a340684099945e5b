"""When ranks wait for long, every rank says where it is, the one that hangs included."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.protocol.waiting import HangReport
from tests.support.fits import before_step
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import on_ranks

SOON = timedelta(seconds=0.3)
STALL = 1.5


def _stalls(rank: int, root: Path, **options: Any) -> str:
    """Rank 1 sleeps in the second microbatch of its second share."""

    def act(own: Any, batch: Any) -> None:
        if rank == 1 and len(own.seen) == 3:
            time.sleep(STALL)

    options = {"hang_report_after": SOON, **options}
    shares = [Minibatch(token_batches([5, 9])) for _ in range(3)]
    with patch.object(sys, "stderr", io.StringIO()) as stderr:
        trainer(2, default_root_dir=root, **options).fit(
            before_step(TokenModule("items"), act), loader(shares)
        )
    assert not [thread for thread in threading.enumerate() if "hang report" in thread.name]
    return stderr.getvalue()


@on_ranks(2)
def test_every_rank_says_where_it_is(rank, tmp_path):
    err = _stalls(rank, tmp_path)
    file = tmp_path / "odc-hang-reports" / f"rank{rank}.txt"
    assert "lightning-odc: ranks have been waiting for 0." in err
    assert f"This is rank {rank}, in epoch 0 after 1 optimizer steps; it " in err
    assert f"Also in {file}, with the Python stack." in err
    # After 0.3, 0.6 and 1.2 seconds, or a little later; not every time it looks.
    assert 1 <= err.count("ranks have been waiting") <= 3
    written = file.read_text()
    assert written.count("ranks have been waiting") == err.count("ranks have been waiting")
    if rank == 0:
        assert "rank 1 (process " in err.split("it is waiting for rank 1 (process ")[1].split("\n", 1)[1]
        assert ", microbatch 2, computing (last communicated for unit " in err
        assert "waiting.py" in written
    else:
        assert "it does not wait" in err
        assert re.search(r"test_hang_report.py\", line \d+ in act", written)  # the function that hangs


@on_ranks(2)
def test_an_unwritable_place_is_said_once_and_hurts_nobody(rank, tmp_path):
    root = tmp_path / str(rank)
    root.write_text("in the way")
    err = _stalls(rank, root)
    assert err.count("could not be written") == 1
    assert "ranks have been waiting" in err


@on_ranks(2)
def test_it_can_be_switched_off(rank, tmp_path):
    assert "lightning-odc" not in _stalls(rank, tmp_path, hang_report_after=None)
    assert not list(tmp_path.iterdir())


def test_what_is_no_time():
    for after in (60, timedelta(0), "1 min"):
        with pytest.raises(ValueError, match=r"Write hang_report_after=datetime.timedelta\(minutes=30\)"):
            ODCStrategy(hang_report_after=after)  # type: ignore[arg-type]


def test_all_threads_are_told(tmp_path, capsys):
    """On GPUs a backward pass runs in a thread of its own, and that is where it hangs."""
    begun = threading.Event()
    end = threading.Event()

    def backward_pass() -> None:
        begun.set()
        end.wait(20)

    thread = threading.Thread(target=backward_pass, name="autograd")
    thread.start()
    begun.wait(20)
    report = HangReport(60.0, tmp_path / "new", 0)
    report.start(lambda: 0.0, str)
    report.tell("first")
    report.tell("second")
    report.stop()
    end.set()
    thread.join()
    written = (tmp_path / "new" / "rank0.txt").read_text()
    assert "in test_all_threads_are_told" in written
    assert "in backward_pass" in written
    assert written.index("first") < written.index("second"), "reports are appended"
    HangReport(1.0, None, 0).tell("something")
    assert capsys.readouterr().err.endswith("lightning-odc: something\n  (There is no file of it.)\n")


def watched(waits: Callable[[], float], is_done: Callable[[HangReport], bool]) -> HangReport:
    """A report that has looked at waits until this is done."""
    report = HangReport(0.1, None, 0)
    deadline = time.monotonic() + 10
    report.start(waits, lambda: "  here")
    while not is_done(report) and time.monotonic() < deadline:
        time.sleep(0.01)
    report.stop()
    report.stop()
    return report


def test_a_wait_that_was_reported_and_ended_well_makes_it_more_patient(capsys):
    began = time.monotonic()
    report = watched(
        lambda: max(time.monotonic() - began, 0) * (time.monotonic() < began + 0.5),
        lambda report: report.after > 0.1,
    )
    assert 0.2 <= report.after < 2.0
    err = capsys.readouterr().err
    assert "  here" in err
    assert err.count("the wait is over, training continues") == 1
    short = iter([0.05, 0.0, -1e-6, 0.01])
    looks = []
    watched(lambda: (looks.append(1), next(short, 0.0))[1], lambda _: len(looks) >= 5)  # type: ignore[func-returns-value]
    assert len(looks) >= 5
    assert capsys.readouterr().err == ""
