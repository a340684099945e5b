"""A rank that fails where no engine watches is named, and the job fails with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_odc import Minibatch
from lightning_odc.protocol.peers import FOLLOWED
from lightning_odc.protocol.roll_call import _FOLLOWED, RollCall
from lightning_odc.protocol.transports.host import boot_id
from tests.strategy.test_failures import SilentError
from tests.strategy.test_launcher import run
from tests.support.fits import fit
from tests.support.modules import TokenModule, token_batches
from tests.support.ranks import try_ranks


def end(how: str) -> None:
    """The end of the rank that calls it."""
    if how == "raises":
        raise ValueError("no such file")
    if how == "raises without a text":
        raise SilentError
    os._exit(3)


#: How rank 1 ends, and what the others are told of it.
ENDS = {
    "raises": "ValueError: no such file",
    "raises without a text": "SilentError",
    "dies": "ended without an error message. How it ended: ",
}


def _ends(rank: int, how: str, where: str) -> None:
    module = TokenModule("items")
    if where == "between two fits":
        fit(module, [Minibatch(token_batches([5]))], 3)
        if rank == 1:
            end(how)
        fit(TokenModule("items"), [Minibatch(token_batches([5]))], 3)
        return
    setattr(module, where, lambda **_: end(how) if rank == 1 else None)
    fit(module, [Minibatch([])], 3)


@pytest.mark.parametrize(
    ("where", "how"),
    [("setup", how) for how in ENDS] + [("configure_model", "raises"), ("between two fits", "dies")],
)
def test_a_rank_that_ends_where_no_engine_is_is_named_with_its_error(where, how):
    outcomes = try_ranks(_ends, how, where, world_size=3, timeout=60)
    for survivor in (outcomes[0], outcomes[2]):
        assert "This followed from something else. Rank 1 " in survivor.error, survivor.error
        assert ENDS[how] in survivor.error
        assert survivor.exitcode == 1


class Late:
    """A store in which rank 0 tells its error when it has been read once, and has ended by then."""

    def __init__(self, error: str) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        self.said = {0: [json.dumps([boot_id(), ended.pid, entry]) for entry in ["", error]]}
        self.said[1] = [json.dumps([boot_id(), os.getpid(), "SilentError"])]

    def get(self, key: str) -> str:
        return self.said[int(key.rpartition("/")[2])].pop(0)


@pytest.mark.parametrize("error", ["ValueError", FOLLOWED + "of rank 1"])
def test_what_a_rank_tells_just_before_it_ends_is_heard(error):
    calls = object.__new__(RollCall)
    calls.others = [0, 1]
    calls._store = Late(error)
    blamed = 1 if error.startswith(FOLLOWED) else 0
    assert calls.look().startswith(f"Rank {blamed} failed. Its error was:")


def _ends_on_another_host(rank: int, hosts: list[str]) -> None:
    with patch("lightning_odc.protocol.roll_call.boot_id", lambda: hosts[rank]):
        _ends(rank, "dies", "between two fits")


@pytest.mark.parametrize(
    ("hosts", "named_on"),
    [
        (
            ["here", "there", "there"],
            [2],
        ),  # rank 0 sees that the connection broke, and rank 2 when rank 0 has ended
        (["there", "there", "here"], [0, 2]),  # rank 0 sees both that it broke and why
    ],
)
def test_a_rank_that_dies_is_named_on_its_host_and_from_there_on_others(hosts, named_on):
    outcomes = try_ranks(_ends_on_another_host, hosts, world_size=3, timeout=60)
    assert outcomes[0].exitcode == outcomes[2].exitcode == 1
    ended = r"Rank 1 \(process \d+ on \S+\) ended without an error message. How it ended: \S+"
    for survivor in named_on:
        error = outcomes[survivor].error
        assert re.search(f"This followed from something else. {ended}", error), error


def test_what_others_know_of_a_failure_is_heard_before_that_they_failed_too():
    calls = object.__new__(RollCall)
    calls.others = [0, 1, 2]
    entries = ["connection closed", f"connection closed{_FOLLOWED} Rank 3 ended.", "connection closed"]
    said = {
        f"odc/ranks/{rank}": json.dumps([boot_id(), os.getpid(), FOLLOWED + entry])
        for rank, entry in enumerate(entries)
    }
    calls._store = said
    assert calls.look() == "Rank 3 ended."
    del said["odc/ranks/1"]
    calls.others = [0, 2]
    assert calls.look() == "Rank 0 failed, too."


DIES = """
import os
from lightning_odc import Minibatch
from tests.support.modules import TokenModule, loader, token_batches, trainer

def die(*_, **__):
    if module.trainer.global_rank == 1:
        os._exit(3)

module = TokenModule("items")
setattr(module, {where!r}, die)
trainer(2).fit(module, loader([Minibatch(token_batches([5, 3]))]))
if {where!r} == "afterwards":
    die()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["on_fit_end", "teardown", "afterwards"])
def test_a_rank_that_dies_when_all_is_done_fails_the_job(where, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DIES.format(where=where))
    done = run(script, check=False)
    # Lightning, too, looks at its processes while this one runs, and may be first.
    told = {3: "Other ranks of this node ended with exit codes [3]", -9: "terminated with code 3"}
    assert told[done.returncode] in done.stderr


LATE = """
import os, sys, time
from datetime import timedelta
from lightning_odc.strategy.setup import launcher
from tests.support.modules import TokenModule, loader, token_batches, trainer

launcher.GRACE = 0.5
if os.environ.get("LOCAL_RANK") == "1":
    print(f"late: {{os.getpid()}}", flush=True)
    time.sleep(600)
trainer(2, timeout=timedelta(seconds=15)).fit(TokenModule(), loader(token_batches([5])))
"""


@pytest.mark.slow
def test_ranks_that_do_not_find_each_other_in_time_end_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LATE.format())
    done = run(script, check=False)
    assert done.returncode == 1
    assert "DistStoreError" in done.stderr
    late = int(done.stdout.partition("late: ")[2].split()[0])
    assert not Path(f"/proc/{late}").exists()
