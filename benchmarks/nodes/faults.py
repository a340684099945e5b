"""Breaks a node of a running training on purpose: how long until the last of the other ranks has ended, and why.

``python -m benchmarks.nodes faults`` makes two hosts of network namespaces (it needs root and ``ip``), with two ranks
each, and prints a Markdown table. Rank 0 keeps the store of the job, and rank 2 leads the second node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import markdown, parser_of
from benchmarks.hosts import Hosts, several_hosts
from lightning_odc import Minibatch
from tests.support.fits import doing
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.nodes import as_nodes
from tests.support.ranks import try_ranks

_STEP = 2
_TIMEOUT = timedelta(minutes=4)
#: A wait for a rank that does not continue ends here.
_SHORT = timedelta(seconds=20)


class BrokenError(Exception):
    """What a rank raises on purpose."""


def _raise() -> None:
    raise BrokenError("a bad sample")


def _stop() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 40; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


#: What happens, to which rank, where.
FAULTS: dict[str, tuple[Any, int, str]] = {
    "rank 3 raises": (_raise, 3, "in a step"),
    "rank 0 raises": (_raise, 0, "in a step"),
    "rank 3 is killed": (None, 3, "in a step"),
    "rank 2 is killed": (None, 2, "in a step"),
    "rank 0 is killed": (None, 0, "in a step"),
    "rank 3 is stopped, timeout of 20 s": (_stop, 3, "in a step"),
    "rank 3 is killed in setup": (None, 3, "setup"),
    "rank 3 is killed between two runs": (None, 3, "between two runs"),
    "the second host is cut off": (1, 3, "in a step"),
    "the first host is cut off": (0, 3, "in a step"),
    "the link stalls": ("stall", 3, "in a step"),
}


def train(rank: int, hosts: Hosts, name: str, folder: str) -> None:
    """One rank of two fits, the second of which continues until something breaks it."""
    what, victim, where = FAULTS[name]
    hosts.enter(rank // 2)
    as_nodes(rank)
    os.environ |= {"MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def strike(here: str, own: Any = None) -> None:
        if rank != victim or here != where or (own is not None and own.global_step < _STEP):
            return
        Path(folder, "struck").write_text(str(time.time()))
        if what == "stall":
            hosts.limit(8e-6, queue="3kb")
        elif isinstance(what, int):
            hosts.cut_off(what)
        elif what is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            what()

    try:
        for steps in (1, 10_000):
            module = doing(TokenModule("items"), on_train_batch_start=partial(strike, "in a step"))
            if steps > 1:
                module.setup = lambda **_: strike("setup")
            timeout = _SHORT if what is _stop else _TIMEOUT
            fit = trainer(2, num_nodes=2, timeout=timeout, hang_report_after=None)
            fit.fit(module, loader([Minibatch(token_batches([5, 6]))] * steps))
            strike("between two runs")
    finally:
        Path(folder, f"{rank}").write_text(str(time.time()))


def attempt(name: str) -> list[str]:
    """A row: the fault, seconds until the last of the others had an error, and the first line that says why."""
    victim = FAULTS[name][1]
    with several_hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        outcomes = try_ranks(train, hosts, name, folder, world_size=4, timeout=200)
        assert Path(folder, "struck").exists(), [outcome.error for outcome in outcomes]
        struck = float(Path(folder, "struck").read_text())
        gone = isinstance(FAULTS[name][0], int | str)
        others = [rank for rank in range(4) if gone or rank != victim]
        seconds = [float(Path(folder, str(rank)).read_text()) - struck for rank in others]
    told = []
    for rank in others:
        lines = outcomes[rank].error.splitlines()
        why = [line for line in lines if "Error: " in line or "followed from" in line]
        told.append(f"{rank}: {(why or lines or [''])[-1][:160]}")
    return [name, f"{max(seconds):.1f} s", "; ".join(told)]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes faults``."""
    parser = parser_of("nodes faults", __doc__)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in options.faults:
        rows.append(attempt(name))
        print(*rows[-1], sep=" | ", flush=True)
    print(markdown(["what happens", "the last rank ends after", "ranks say"], rows))


if __name__ == "__main__":
    main()
