"""Run a function on several real processes, fast: they are forked from a server that has imported everything."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
#: What ranks need; what is not installed is passed over. A module less costs every rank of the suite its import.
PRELOADED = [
    "pytest",
    "hypothesis",
    "functorch.compile",
    "jsonargparse",
    "lightning.pytorch",
    "torch.distributed.tensor.parallel",
    "lightning_odc",
    "benchmarks.harness.training",
    "transformers.models.llama.modeling_llama",
    "peft",
    "tests.support.models",
    "tests.support.fits",
    "tests.support.first_step",
]


def start_server() -> None:
    """Start what ranks are forked from, before a benchmark starts one that has imported less. It imports on its own."""
    _CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@dataclass
class Outcome:
    """How one rank ended: its result or its error text, exit code, and seconds from start to end."""

    rank: int
    result: Any
    error: str
    exitcode: int | None
    seconds: float


def on_ranks(world_size: int, alone: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on every rank, as ``test(rank, ...)``. What fails on any rank fails the test.

    Tests share their ranks, and the process group of all ranks, but for one that is ``alone`` on new ones. A test that
    kills, hangs or must fail uses `try_ranks`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(teams: Teams, **arguments: Any) -> None:
            if alone:
                teams = Teams()
            teams.run(test, world_size=world_size, **arguments)
            if alone:
                teams.end()

        first, *others = inspect.signature(test).parameters.values()
        assert first.name == "rank"
        fixture = inspect.Parameter("teams", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        start.__signature__ = inspect.Signature([fixture, *others])  # type: ignore[attr-defined]
        return start

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """What every rank gives, by rank. All of them call it together."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


#: Tests that ranks run before others take their place: process groups and caches of torch's stay until a rank ends.
MOST_TESTS = 60


class Teams:
    """The ranks that tests share, by their number. They start with the first test that needs them.

    A new rank imports what a test imports, and PyTorch prepares the first sharding of each operation: seconds.
    """

    def __init__(self) -> None:
        self.teams: dict[int, Team] = {}

    def run(self, function: Callable[..., Any], *args: Any, world_size: int = 2, **options: Any) -> list[Any]:
        """Call ``function(rank, *args, **options)`` on every rank; returns the results by rank."""
        order = pickle.dumps((function.__module__, function.__name__, args, options))
        team = self.teams.pop(world_size, None)
        if team is not None and team.count == MOST_TESTS:
            team.end()
            team = None
        team = team or Team(world_size)
        try:
            results = team.run(order)
        except AssertionError:  # its ranks may be at different places now: the next test has new ones
            team.kill()
            raise
        self.teams[world_size] = team
        return results

    def end(self) -> None:
        for team in self.teams.values():
            team.end()


class Team:
    """Ranks that wait for tests to run."""

    def __init__(self, world_size: int) -> None:
        start_server()
        self.count = 0  # of tests
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pairs = [_CONTEXT.Pipe() for _ in range(world_size)]
        self.connections = [ours for ours, _ in pairs]
        self.ranks = [
            _start(_serve, (theirs,), rank, world_size, self.store.port)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for _, theirs in pairs:
            theirs.close()

    def run(self, order: bytes, timeout: float = 150) -> list[Any]:
        """The results by rank. When one has failed, the others have ten seconds to say what they make of it."""
        self.count += 1
        results: list[Any] = [None] * len(self.ranks)
        for connection in self.connections:
            connection.send_bytes(order)
        errors = []
        waiting = list(self.connections)
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(waiting, max(deadline - time.monotonic(), 0))):
            for connection in (one for one in waiting[:] if one in ready):
                waiting.remove(connection)
                rank = self.connections.index(connection)
                try:
                    error, results[rank] = connection.recv()
                except EOFError:
                    self.ranks[rank][0].join(30)
                    error = f"ended without an error message{_crash(self.ranks[rank][0])}"
                if error:
                    errors.append(f"rank {rank}: {error}")
                    deadline = min(deadline, time.monotonic() + 10)
        for late in waiting:
            rank = self.connections.index(late)
            errors.append(f"rank {rank} did not end{_stacks(self.ranks[rank][0])}")
        assert not errors, "\n".join(errors)
        return results

    def end(self) -> None:
        for connection in self.connections:
            connection.send_bytes(pickle.dumps(None))
        for process, _ in self.ranks:
            process.join(60)
        codes = [process.exitcode for process, _ in self.ranks]
        self.kill()
        assert codes == [0] * len(codes), f"exit codes of ranks: {codes}"

    def kill(self) -> None:
        for process, receiver in self.ranks:
            process.kill()
            process.join()
            receiver.close()
        for connection in self.connections:
            connection.close()


def _serve(rank: int, orders: Connection) -> None:
    environment = dict(os.environ)
    while (order := pickle.loads(orders.recv_bytes())) is not None:
        module, name, args, options = order
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        report_crashes()
        try:
            function = getattr(importlib.import_module(module), name)
            result = getattr(function, "__wrapped__", function)(rank, *args, **options)
        except BaseException as error:
            orders.send((_report(error, name), None))
            raise
        finally:
            for fixture in options.values():
                if isinstance(fixture, pytest.MonkeyPatch):  # pytest undoes that of its own process
                    fixture.undo()
        orders.send_bytes(pickle.dumps(("", result)))


def _report(error: BaseException, test: str) -> str:
    """The error, and the variables of the test where it was raised, since pytest does not see them."""
    lines = traceback.format_exception(error)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == test:
            for name, value in frame.f_locals.items():
                text = " ".join(repr(value).split())
                if (
                    len(text) > 800
                ):  # an error in a variable begins with a traceback, and ends with what it says
                    text = f"{text[:150]} ... {text[-600:]}"
                lines.append(f"    {name} = {text}\n")
    return "".join(lines)


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank; returns the results by rank. Any failure fails the test."""
    outcomes = try_ranks(function, *args, world_size=world_size, timeout=timeout)
    failed = [o for o in outcomes if o.error or o.exitcode != 0]
    # First how each error ends, which says what it is: the end of a long report may be cut off.
    ends = [f"rank {o.rank} (exit code {o.exitcode}): ... {o.error[-400:]}" for o in failed]
    assert not failed, "\n".join([*ends, *(f"All of rank {o.rank}:\n{o.error}" for o in failed)])
    assert len(outcomes) == world_size
    return [outcome.result for outcome in outcomes]


def try_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120
) -> list[Outcome]:
    """Like ``run_ranks``, for ranks that may fail. A rank that outlives ``timeout`` is killed and fails the test."""
    start_server()
    # As `torchrun` does it: ranks that look for each other at one of them wait for its store, and then some more.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [_start(function, args, rank, world_size, store.port) for rank in range(world_size)]
    begin = time.monotonic()  # what they are forked from may have had to import everything first
    outcomes = []
    late = []
    # All of them first: a rank whose result does not fit into the pipe keeps the others waiting until it is read.
    payloads = [_receive(receiver, begin + timeout - time.monotonic()) for _, receiver in started]
    for rank, ((process, _), payload) in enumerate(zip(started, payloads, strict=True)):
        process.join(max(begin + timeout - time.monotonic(), 0.1))
        if process.is_alive():
            late.append(rank)
            process.kill()
            process.join()
        if payload is not None:
            result, error = payload
        else:
            result = None
            error = f"ended without a result{_crash(process)}"
        outcomes.append(Outcome(rank, result, error, process.exitcode, time.monotonic() - begin))
    assert not late, f"ranks {late} did not end within {timeout} s: {[o.error for o in outcomes]}"
    return outcomes


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


def _start(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int
) -> tuple[ForkServerProcess, Connection]:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(
        target=_child, args=(sender, function, args, rank, world_size, port), daemon=True
    )
    process.start()
    sender.close()
    return process, receiver


def _receive(receiver: Connection, timeout: float) -> tuple[Any, str] | None:
    try:
        if receiver.poll(max(timeout, 0)):
            return pickle.loads(receiver.recv_bytes())
        return None
    except EOFError:
        return None


def _child(
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
) -> None:
    gc.freeze()  # a full collection would copy the memory that all processes share: 0.4 s
    report_crashes()
    # A daemon, so that it does not outlive the tests; but daemons may not start processes that load data.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # The benchmarks' ranks come from the same server, which they start with Ctrl-C blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(torchrun_environment(rank, world_size, port))
    torch.set_num_threads(1)
    result = None
    error = ""
    try:
        result = function(rank, *args)
    except BaseException as exception:
        error = "".join(traceback.format_exception(exception))
    sender.send_bytes(pickle.dumps((result, error)))
    if dist.is_initialized() and not error:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(1 if error else 0)


def report_crashes() -> None:
    """Print the stacks of a process that crashes: Python its own, then torch those of all threads in C.

    Python's needs no memory. Where the heap is broken, torch's may wait for its lock for ever: see `_stacks`.
    Lightning's `fit` takes the handlers away at its end.
    """
    torch._C._set_print_stack_traces_on_fatal_signal(False)
    faulthandler.disable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable(sys.__stderr__)


def _stacks(process: ForkServerProcess) -> str:
    """Those of all threads of a process that does not end, in C, where there is gdb."""
    if shutil.which("gdb") is None:
        return ""
    command = ["gdb", "-p", str(process.pid), "-batch", "-ex", "thread apply all backtrace 60"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except subprocess.TimeoutExpired:  # the test still says who did not end
        return ", and gdb did not end within 60 s"
    return f"\n{done.stdout[-20_000:]}"


def _crash(process: ForkServerProcess) -> str:
    """The signal that has ended a process, and the processor, whose flags decide which kernels ran; or nothing."""
    code = process.exitcode or 0
    if -code not in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        return ""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    versions = f"torch {torch.__version__}, {' '.join(platform.libc_ver())}, {platform.platform()}"
    return f" by {signal.Signals(-code).name}, see stderr. {versions}, {flags[:1]}"


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
