"""The ranks of a benchmark: processes on this machine that outlive a job, and none of which outlives its parent."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_odc import host_memory
from lightning_odc.bench.options import available_cores
from lightning_odc.console import OptionError

PROCESS_BYTES = 150 * 2**20
"""Private memory of a rank that has imported everything and made nothing yet, about."""
_GRACE_SECONDS = 10.0

Tell = Callable[[Any], None]


class RankFailedError(RuntimeError):
    """A rank raised or ended; the message is one line."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details  # the traceback of the rank, if it had time for one


class CutShort:
    """A context that may end early, when a rank fails or at Ctrl-C: one line on stderr, and no exception."""

    def __init__(self) -> None:
        # The exit code; one line; the traceback of the rank that failed.
        self.code, self.failure, self.details = 0, "", ""

    def __enter__(self) -> CutShort:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, RankFailedError):
            self.code, self.failure, self.details = 1, str(error), error.details
        elif isinstance(error, KeyboardInterrupt):
            self.code, self.failure = 130, "interrupted"
        if self.code:
            print(f"lightning-odc: {self.failure}; what was measured before is kept", file=sys.stderr)
        return bool(self.code)


def check_memory(needed: int, what: str, instead: str) -> None:
    """Refuse what does not fit into memory."""
    short = host_memory.shortage(what, needed, f"use {instead}", each=0)
    if short:
        raise OptionError(short)


def threads_per_rank(world_size: int) -> int:
    """The cores divided among the ranks."""
    return max(available_cores() // world_size, 1)


class _Rank(NamedTuple):
    """A process, the pipe to talk with it, and one whose end it takes for ours."""

    process: BaseProcess
    pipe: Connection
    lifeline: Connection


class Ranks:
    """Processes with a process group that run one function after another, all ranks together."""

    # They are forked from a server that has imported everything once, so that many of them start in seconds.
    # They ignore Ctrl-C, which is for the parent, and end when it does, however that ends.

    def __init__(
        self,
        world_size: int,
        preload: Sequence[str] = (),  # modules that the server imports before it forks
        # a function that is called with the rank in its process before the group is made
        prepare: Callable[[int], None] | None = None,
        backend: str = "gloo",  # the backend of the process group
    ) -> None:
        self.world_size = world_size
        self._prepare = prepare
        self._backend = backend
        self._preload = ["torch.distributed", "lightning_odc.bench.processes", *preload]
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[_Rank] = []
        self._kills = host_memory.Kills()

    def __enter__(self) -> Ranks:
        try:
            self._start()
        except BaseException as error:  # Ctrl-C while they start
            self.__exit__(type(error), error, None)
            raise
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        # Ctrl-C is blocked where the server begins: it would die of it, with a traceback, while it imports for seconds.
        resource_tracker.ensure_running()  # the server would start it, and that unblocks Ctrl-C
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._scratch = tempfile.TemporaryDirectory(prefix="lightning-odc-")
        store = str(Path(self._scratch.name) / "store")
        for rank in range(self.world_size):
            pipe, theirs = context.Pipe()
            watched, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, watched, rank, self.world_size, store, self._prepare, self._backend),
                daemon=True,
            )
            process.start()
            theirs.close()
            watched.close()
            self._ranks.append(_Rank(process, pipe, lifeline))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for rank in self._ranks:
                with suppress(OSError):  # it ended by itself
                    rank.pipe.send(None)
            for rank in self._ranks:
                rank.process.join(_GRACE_SECONDS)
        self.kill()
        if self._scratch is not None:
            self._scratch.cleanup()

    def kill(self) -> None:
        """End all of them now. Idempotent."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
            rank.lifeline.close()
        self._ranks.clear()

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def call(
        self, function: Callable[..., Any], *arguments: Any, heard: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Call ``function(rank, world_size, *arguments)`` on every rank; returns what they returned, by rank."""
        # A function of a module, not a closure, since it is pickled. ``heard(rank, item)`` is called here for
        # every ``tell(item)`` there. After a `RankFailedError` no rank can be used.
        for rank in self._ranks:
            with suppress(OSError):  # its end is found below
                rank.pipe.send((function, arguments, heard is not None))
        results: dict[int, Any] = {}
        by_pipe = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while by_pipe:
            ready: list[Any] = wait(list(by_pipe))
            for pipe in ready:
                number = by_pipe[pipe]
                kind, item = self._receive(number)
                if kind == "told" and heard is not None:
                    heard(number, item)
                elif kind == "done":
                    results[number] = item
                    del by_pipe[pipe]
        return [results[number] for number in range(self.world_size)]

    def _receive(self, number: int) -> tuple[str, Any]:
        rank = self._ranks[number]
        try:
            kind, item = rank.pipe.recv()
        except (EOFError, OSError):
            rank.process.join(_GRACE_SECONDS)
            code = rank.process.exitcode
            hint = " (a signal; -9 often means that memory was used up)" if (code or 0) < 0 else ""
            verdict = self._kills.verdict() if code == -signal.SIGKILL else ""
            raise RankFailedError(
                f"rank {number} ended with exit code {code}{hint}. {verdict}".rstrip(". ")
            ) from None
        if kind == "failed":
            line, details = item
            # A rank that ended has broken the one that failed: then it is the cause.
            for other, rank in enumerate(self._ranks):
                if other != number and rank.process.exitcode is not None:
                    line = f"rank {other} ended with exit code {rank.process.exitcode}"
                    raise RankFailedError(line, details)
            raise RankFailedError(f"rank {number} failed: {line}", details)
        return kind, item


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in new processes with a gloo group; returns results by rank."""
    # ``prepare(rank)``, if given, is called before the group is made.
    try:
        with Ranks(world_size, preload=[function.__module__], prepare=prepare) as ranks:
            return ranks.call(function, *arguments)
    except RankFailedError as error:
        raise SystemExit(str(error)) from None


def _rank_main(
    pipe: Connection,
    lifeline: Connection,
    rank: int,
    world_size: int,
    store: str,
    prepare: Callable[[int], None] | None,
    backend: str,
) -> None:
    gc.freeze()  # a full collection would copy the memory that the server shares with all ranks: 0.4 s for each
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if prepare is not None:
        prepare(rank)
    torch.set_num_threads(threads_per_rank(world_size))
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    while (job := pipe.recv()) is not None:
        function, arguments, telling = job
        options = {"tell": partial(_tell, pipe)} if telling else {}
        # Lightning's hints are for the reader of a training script, which a benchmark is not.
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        try:
            pipe.send(("done", function(rank, world_size, *arguments, **options)))
        except BaseException as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            pipe.send(("failed", (line, "".join(traceback.format_exception(error)))))
    dist.barrier()
    dist.destroy_process_group()


def _tell(pipe: Connection, item: Any) -> None:
    pipe.send(("told", item))


def _end_with(lifeline: Connection) -> None:
    """End this process when the parent, which holds the other end and never writes, is gone."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)
