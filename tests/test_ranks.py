"""The helper that runs ranks: it would be a poor judge if it could hang or lose an outcome."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.support.models import init_gloo
from tests.support.ranks import Team, Teams, on_ranks, run_ranks, try_ranks

MORE_THAN_A_PIPE_HOLDS = 1 << 20


def _returns_much(rank: int) -> bytes:
    init_gloo(rank)  # so that ranks wait for each other before they end
    return bytes(MORE_THAN_A_PIPE_HOLDS)


def test_results_may_be_large():
    assert [len(result) for result in run_ranks(_returns_much, timeout=30)] == [MORE_THAN_A_PIPE_HOLDS] * 2


def _ends_oddly(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    raise ValueError("no")


def test_every_end_is_told():
    dead, failed = try_ranks(_ends_oddly)
    assert dead.exitcode == 3
    assert dead.error == "ended without a result"
    assert failed.exitcode == 1
    assert "ValueError: no" in failed.error


def _crashes(rank: int) -> None:
    if rank == 0:
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def test_the_stacks_of_a_rank_that_crashes_are_told():
    crashed, other = try_ranks(_crashes)
    assert other.exitcode == 0
    assert crashed.exitcode == -signal.SIGSEGV
    assert crashed.error.startswith(
        f"ended without a result by SIGSEGV, see stderr. torch {torch.__version__}"
    )


def _sleeps(rank: int, seconds: float) -> None:
    time.sleep(rank * seconds)


def test_a_rank_that_does_not_end_is_killed_and_named():
    run_ranks(_sleeps, 0.0)  # so that what ranks are forked from is there
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not end within 3 s"):
        try_ranks(_sleeps, 60.0, timeout=3)


@pytest.mark.slow
def test_the_stacks_of_a_rank_that_does_not_end_are_told():
    team = Team(1)
    with pytest.raises(AssertionError, match="rank 0 did not end") as error:
        team.run(pickle.dumps((__name__, _waits.__name__, (), {})), timeout=1)
    team.kill()
    if shutil.which("gdb") is not None:
        assert "sleep" in str(error.value)


def _waits(rank: int) -> None:
    time.sleep(60)


SPY = """
import importlib
import torch

asked = []

def spy(owner, name, answer):
    def ask(*_, **__):
        asked.append(f"{owner.__name__}.{name}")
        return answer
    setattr(owner, name, ask)

torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")  # a build with CUDA
for owner in (torch.cuda, torch.accelerator):
    spy(owner, "is_available", True)
    spy(owner, "device_count", 1)
spy(torch.cuda, "_lazy_init", None)
from tests.support.ranks import PRELOADED
for module in PRELOADED:
    try:
        importlib.import_module(module)
    except ImportError:
        pass
    assert not asked, f"{module} asks {asked}"
"""


@pytest.mark.slow
def test_what_ranks_are_forked_from_does_not_touch_an_accelerator():
    """A driver that was asked before a fork cannot be used behind it: every rank would fail on a machine with a GPU."""
    done = subprocess.run([sys.executable, "-c", SPY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@on_ranks(2)
@pytest.mark.parametrize("number", [2, 4])
def test_a_body_on_ranks(rank, number):
    if number % 2 and rank:
        raise ValueError("odd")


def test_ranks_that_a_test_has_failed_on_are_not_used_again():
    teams = Teams()
    halves = test_a_body_on_ranks.__wrapped__
    teams.run(halves, number=2)
    first = teams.teams[2]
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*ValueError: odd.*number = 3"):
        teams.run(halves, number=3)
    for process, _ in first.ranks:
        assert process.exitcode is not None
    assert teams.run(_returns_much) == [bytes(MORE_THAN_A_PIPE_HOLDS)] * 2
    teams.end()
