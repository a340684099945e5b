"""Run a function on several real processes, fast: they are forked from a server that has imported everything."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
#: What ranks need; what is not installed is passed over. A module less costs every rank of the suite its import.
_PRELOAD = [
    "pytest",
    "hypothesis",
    "functorch.compile",
    "jsonargparse",
    "lightning.pytorch",
    "lightning_odc",
    "lightning_odc.metrics",
    "lightning_odc.bench.training",
    "transformers.models.llama.modeling_llama",
    "peft",
    "tests.support.models",
    "tests.support.modules",
    "tests.support.process_state",  # the last: it looks for what all of them remember
]


def start_server() -> None:
    """Start what ranks are forked from, before a benchmark starts one that has imported less. It imports on its own."""
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


@dataclass
class Outcome:
    """How one rank ended: its result or its error text, exit code, and seconds from start to end."""

    rank: int
    result: Any
    error: str
    exitcode: int | None
    seconds: float


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120, fresh: bool = False
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank; returns the results by rank. Any failure fails the test.

    A process in which nothing is left of the function runs the next one, too (see :mod:`tests.support.process_state`).
    Those of a call that is ``fresh`` have run none before and run none after it.
    """
    outcomes = try_ranks(function, *args, world_size=world_size, timeout=timeout, fresh=fresh)
    errors = [
        f"rank {o.rank} (exit code {o.exitcode}):\n{o.error}" for o in outcomes if o.error or o.exitcode != 0
    ]
    assert not errors, "\n".join(errors)
    assert len(outcomes) == world_size
    return [outcome.result for outcome in outcomes]


def try_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120, fresh: bool = False
) -> list[Outcome]:
    """Like ``run_ranks``, for ranks that may fail. A rank that outlives ``timeout`` is killed and fails the test."""
    start_server()
    # As `torchrun` does it: ranks that look for each other at one of them wait for its store, and then some more.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [_Rank() if fresh else _next_rank() for _ in range(world_size)]
    begin = time.monotonic()  # what they are forked from may have had to import everything first
    for number, rank in enumerate(ranks):
        rank.call(function, args, torchrun_environment(number, world_size, store.port))
    # All of them first: a rank whose result does not fit into the pipe keeps the others waiting until it is read.
    results = [rank.receive(begin + timeout) or (None, "ended without a result") for rank in ranks]
    outcomes, served, late = [], [], []
    for number, (rank, (result, error)) in enumerate(zip(ranks, results, strict=True)):
        exitcode: int | None = 0
        if rank.receive(begin + timeout) and not fresh:
            served.append(rank)
        elif (exitcode := rank.end(begin + timeout)) is None:
            late.append(number)
        outcomes.append(Outcome(number, result, error, exitcode, time.monotonic() - begin))
    _IDLE[:0] = served
    assert not late, f"ranks {late} did not end within {timeout} s: {[o.error for o in outcomes]}"
    return outcomes


def end_ranks() -> None:
    """End the ranks that wait for their next function."""
    while _IDLE:
        _IDLE.pop().end(time.monotonic() + 10)


@contextmanager
def forked(function: Callable[..., Any], *args: Any) -> Iterator[ForkServerProcess]:
    """Call ``function(*args)`` in one process that is no rank and may start others. It does not outlive the context."""
    start_server()
    process = _CONTEXT.Process(target=function, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


class _Rank:
    """A process that runs one function after another, until one leaves something behind or there is no next one."""

    def __init__(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
        self._pipe.send_bytes(pickle.dumps((function, args, environment)))

    def receive(self, deadline: float) -> Any:
        """After a call: first its result and error, then True if the process can serve again. None if it ended."""
        try:
            if self._pipe.poll(max(deadline - time.monotonic(), 0)):
                return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            pass
        return None

    def end(self, deadline: float) -> int | None:
        """End it; returns its exit code, or None if it had to be killed."""
        self._pipe.close()
        self._process.join(max(deadline - time.monotonic(), 0.1))
        late = self._process.is_alive()
        self._process.kill()
        self._process.join()
        return None if late else self._process.exitcode


#: Those that wait for their next function.
_IDLE: list[_Rank] = []


def _next_rank() -> _Rank:
    while _IDLE:
        if (rank := _IDLE.pop(0)).is_alive:
            return rank
    return _Rank()


def _serve(pipe: Connection) -> None:
    from tests.support.process_state import ProcessState

    gc.freeze()  # a full collection would copy the memory that all processes share: 0.4 s
    faulthandler.enable()
    # A daemon, so that it does not outlive the tests; but daemons may not start processes that load data.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # The benchmarks' ranks come from the same server, which they start with Ctrl-C blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    state = ProcessState()
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)
        if _run(pipe, call):
            os._exit(1)
        if state.put_back():
            os._exit(0)
        pipe.send_bytes(pickle.dumps(True))


def _run(pipe: Connection, call: bytes) -> str:
    """Call the function, send its result and leave the process group; returns the error."""
    result, error = None, ""
    try:
        function, args, environment = pickle.loads(call)
        os.environ.update(environment)
        result = function(int(environment["RANK"]), *args)
    except BaseException as exception:
        error = "".join(traceback.format_exception(exception))
    pipe.send_bytes(pickle.dumps((result, error)))
    if dist.is_initialized() and not error:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    return error


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that ``torchrun`` sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
