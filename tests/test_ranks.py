"""The helper that runs ranks: it would be a poor judge if it could hang or lose an outcome."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import lightning_odc
from tests.support.models import init_gloo
from tests.support.ranks import run_ranks, try_ranks

MORE_THAN_A_PIPE_HOLDS = 1 << 20


def _returns_much(rank: int) -> bytes:
    init_gloo(rank)  # so that ranks wait for each other before they end
    return bytes(MORE_THAN_A_PIPE_HOLDS)


def test_results_may_be_large():
    assert [len(result) for result in run_ranks(_returns_much)] == [MORE_THAN_A_PIPE_HOLDS] * 2


def _ends_oddly(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    raise ValueError("no")


def test_every_end_is_told():
    dead, failed = try_ranks(_ends_oddly)
    assert (dead.exitcode, dead.error) == (3, "ended without a result")
    assert failed.exitcode == 1 and "ValueError: no" in failed.error


def _sleeps(rank: int, seconds: float) -> None:
    time.sleep(rank * seconds)


def test_a_rank_that_does_not_end_is_killed_and_named():
    run_ranks(_sleeps, 0.0)  # so that what ranks are forked from is there
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not end within 3 s"):
        try_ranks(_sleeps, 60.0, timeout=3)


def _pid(rank: int) -> int:
    return os.getpid()


def test_ranks_serve_again_unless_they_are_fresh():
    first = set(run_ranks(_pid))
    assert set(run_ranks(_pid)) == first
    assert not set(run_ranks(_pid, fresh=True)) & first
    assert set(run_ranks(_pid)) == first


def _leaves(rank: int, what: str) -> int:
    if what == "a thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "a child" and os.fork() == 0:
        os._exit(0)
    elif what == "a descriptor":
        os.open("/dev/null", os.O_RDONLY)
    elif what == "a window":
        os.memfd_create("lightning-odc-window")
    assert what != "an error"
    return os.getpid()


@pytest.mark.parametrize("what", ["a thread", "a child", "a descriptor", "a window", "an error"])
def test_a_rank_that_leaves_something_behind_serves_no_more(what):
    before = run_ranks(_pid)
    try_ranks(_leaves, what)
    assert not set(run_ranks(_pid)) & set(before)


SAID: list[int] = []


def _state(rank: int) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("said once", stacklevel=1)
    logger = logging.getLogger("lightning.pytorch")
    return [
        {name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
        os.getcwd(),
        [random.random(), np.random.rand(), torch.rand(()).item()],
        [torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()],
        [logger.level, len(logger.handlers), len(caught), len(warnings.filters), SAID],
        [callable(lightning_odc.Minibatch), callable(lightning_odc.ODCStrategy.setup)],
        torch.distributed.is_initialized(),
    ]


def _changes_everything(rank: int) -> int:
    init_gloo(rank)
    os.environ.update(RANK="7", NEW="1")
    os.chdir("/")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("lightning.pytorch").addHandler(logging.NullHandler())
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    lightning_odc.Minibatch = None
    lightning_odc.ODCStrategy.setup = None
    SAID.append(1)
    return os.getpid()


def test_what_a_function_changes_is_put_back():
    before, pids = run_ranks(_state), run_ranks(_changes_everything)
    assert run_ranks(_state) == before
    assert run_ranks(_pid) == pids
