"""The ranks of a benchmark: processes on this machine that outlive a job, and the device of each.

No process outlives its parent. If there are fewer GPUs than ranks, ranks share them.
"""

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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command import OptionError
from benchmarks.harness.options import available_cores
from lightning_odc import host_memory
from lightning_odc.protocol.transports.preflight import OVERLAP_VARIABLE

PROCESS_BYTES = 150 * 2**20
"""Private memory of a rank that has imported everything and made nothing yet, about."""
_GRACE_SECONDS = 10.0

Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Placement:
    """The devices of all ranks."""

    # With 3 ranks and 2 GPUs, ranks 0 and 2 share ``cuda:0``, and rank 1 has ``cuda:1``.

    ranks: int
    gpus: int = 0  # the number of GPUs that they use, at most one per rank; 0 on processors

    @property
    def devices(self) -> list[torch.device]:
        """The device of every rank, by rank."""
        if not self.gpus:
            return [torch.device("cpu")] * self.ranks
        return [torch.device("cuda", rank % self.gpus) for rank in range(self.ranks)]

    @property
    def accelerator(self) -> str:
        """What ``Trainer(accelerator=...)`` calls them."""
        if self.gpus:
            return "gpu"
        return "cpu"

    @property
    def shares(self) -> bool:
        """Whether several ranks have the same GPU."""
        return 0 < self.gpus < self.ranks

    @property
    def backend(self) -> str:
        """The backend of the process group. NCCL refuses ranks that share a GPU; gloo moves their bytes by the host."""
        if not self.gpus:
            return "gloo"
        if self.shares:
            return "cpu:gloo,cuda:gloo"
        return "cpu:gloo,cuda:nccl"

    @property
    def caption(self) -> str:
        """What tables and pictures have to say about times of ranks that share a GPU; else empty."""
        if not self.shares:
            return ""
        where = f"{self.gpus} GPUs"
        if self.gpus == 1:
            where = "one GPU"
        return f"{self.ranks} ranks on {where}: shows that it works, not how fast"

    def enter(self, rank: int) -> None:
        """Take the device of a rank. Call it in the rank's process, before that makes its process group."""
        # The variable that lets ranks share a GPU is set here and not by the parent: the server from which
        # ranks are forked may be older, with another environment.
        if self.shares:
            os.environ[OVERLAP_VARIABLE] = "1"
        if self.gpus:
            torch.cuda.set_device(self.devices[rank])


def place(device: str, ranks: int) -> Placement:
    """Where this many ranks run on this machine: one GPU each if there are enough, else several on one."""
    if device == "cpu":
        return Placement(ranks)
    if torch.version.cuda is None:
        raise OptionError(
            f'There is no GPU for device "cuda": this torch ({torch.__version__}) is built without CUDA. Write "cpu" '
            "instead, or install a build with CUDA."
        )
    found = torch.cuda.device_count()
    if not found:
        raise OptionError(
            'There is no GPU for device "cuda": torch finds none (`nvidia-smi` and CUDA_VISIBLE_DEVICES show why). '
            'Write "cpu" instead.'
        )
    return Placement(ranks, min(found, ranks))


class RankFailedError(RuntimeError):
    """A rank raised or ended; the message is one line."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details  # the traceback of the rank, if it had time for one


class CutShort(AbstractContextManager["CutShort"]):
    """A context that may end early, when a rank fails or at Ctrl-C: its traceback and one line on stderr."""

    def __init__(self) -> None:
        self.code = 0  # the exit code
        self.failure = ""  # what went wrong, in one line

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, RankFailedError):
            self.code = 1
            self.failure = str(error)
            print(error.details, end="", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            self.code = 130
            self.failure = "interrupted"
        if self.code:
            print(f"lightning-odc: {self.failure}; what was measured before is kept", file=sys.stderr)
        return bool(self.code)


def check_memory(needed: int, what: str, instead: str) -> None:
    """Refuse what does not fit into memory."""
    shortage = host_memory.shortage(what, needed, f"use {instead}")
    if shortage:
        raise OptionError(shortage)


class RankProcesses:
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
        self._preload = ["torch.distributed", __name__, *preload]
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._kills = host_memory.Kills()

    def __enter__(self) -> RankProcesses:
        try:
            self._start()
        except BaseException:  # Ctrl-C while they start
            self.kill()
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
        store = f"file://{self._scratch.name}/store"
        for rank in range(self.world_size):
            pipe, theirs = context.Pipe()
            group = {
                "backend": self._backend,
                "init_method": store,
                "rank": rank,
                "world_size": self.world_size,
            }
            process = context.Process(target=_rank_main, args=(theirs, group, self._prepare), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, pipe))

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            for _, pipe in self._ranks:
                with suppress(OSError):  # it ended by itself
                    pipe.send(None)
            for process, _ in self._ranks:
                process.join(_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all of them now. Idempotent."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [process.pid or 0 for process, _ in self._ranks]

    def call(
        self, function: Callable[..., Any], *arguments: Any, heard: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Call ``function(rank, world_size, *arguments)`` on every rank; returns what they returned, by rank."""
        # A function of a module, not a closure, since it is pickled. ``heard(rank, item)`` is called here for
        # every ``tell(item)`` there. After a `RankFailedError` no rank can be used.
        pipes: list[Any] = [pipe for _, pipe in self._ranks]
        for pipe in pipes:
            with suppress(OSError):  # its end is found below
                pipe.send((function, arguments, heard is not None))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            for ready in wait(waiting):
                rank = pipes.index(ready)
                kind, item = self._receive(rank)
                if kind == "done":
                    results[rank] = item
                elif heard is not None:
                    heard(rank, item)
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, number: int) -> tuple[str, Any]:
        process, pipe = self._ranks[number]
        try:
            kind, item = pipe.recv()
        except (EOFError, OSError):
            process.join(_GRACE_SECONDS)
            code = process.exitcode
            message = f"rank {number} ended with exit code {code}"
            if (code or 0) < 0:
                message += " (a signal; -9 often means that memory was used up)"
            if code == -signal.SIGKILL:
                message += f". {self._kills.verdict()}"
            raise RankFailedError(message.rstrip(". ")) from None
        if kind == "failed":
            line, details = item
            # A rank that ended has broken the one that failed: then it is the cause.
            for other, (peer, _) in enumerate(self._ranks):
                if other != number and peer.exitcode is not None:
                    raise RankFailedError(f"rank {other} ended with exit code {peer.exitcode}")
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
        with RankProcesses(world_size, preload=[function.__module__], prepare=prepare) as ranks:
            return ranks.call(function, *arguments)
    except RankFailedError as error:
        raise SystemExit(str(error)) from None


def _rank_main(pipe: Connection, group: dict[str, Any], prepare: Callable[[int], None] | None) -> None:
    """Run jobs until there is none; ``group`` are the arguments of `torch.distributed.init_process_group`."""
    rank = group["rank"]
    world_size = group["world_size"]
    gc.freeze()  # a full collection would copy the memory that the server shares with all ranks: 0.4 s for each
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(rank)
    torch.set_num_threads(max(available_cores() // world_size, 1))
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)})
    dist.init_process_group(**group)
    for function, arguments, telling in iter(pipe.recv, None):
        options: dict[str, Tell] = {}
        if telling:
            options["tell"] = lambda item: pipe.send(("told", item))
        # Lightning's hints are for the reader of a training script, which a benchmark is not.
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        try:
            result = function(rank, world_size, *arguments, **options)
            pipe.send(("done", result))
        except BaseException as error:
            words = f"{type(error).__name__}: {error}".split()
            details = traceback.format_exception(error)
            pipe.send(("failed", (" ".join(words), "".join(details))))
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
