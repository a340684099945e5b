"""A thread that gives every node a copy of what this rank has published, while training goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_odc.engine.hybrid.column import ColumnGroup, in_turn
from lightning_odc.engine.hybrid.replica_link import ReplicaLink
from lightning_odc.engine.unit_window import RankState, UnitWindow
from lightning_odc.errors import PeerFailedError

#: Begins and ends of the parts of a shard that every optimizer step changes.
Trained = Sequence[tuple[int, int]]

_PATIENCE = 10.0  # seconds that the end waits for a collective that hangs
_FIRST_SLEEP, _LONGEST_SLEEP, _SLEEP_FRACTION = 20e-6, 1e-3, 1 / 16


class _Job(NamedTuple):
    """One version to share.

    Attributes:
        version: the version.
        edited: the units of which more than what is trained may have changed on this rank, by number.
        after: a context in which the device works after everything that was asked of it before.
    """

    version: int
    edited: list[int]
    after: Callable[[], AbstractContextManager[Any]]


class _HaltedError(Exception):
    """The other ranks will not come any more."""


class Sharing:
    """Copies shards over the column and announces them; see Note [A copy per node].

    Ranks come out of the optimizer step at different times. So the thread first waits at a connection until the whole
    column has published, as ranks do at meetings. Only then does it begin collectives, which may so give up early.

    Args:
        link: Link to this rank's column, not yet opened. This thread alone uses it.
        group: Process group of the column.

    Attributes:
        trouble: What ended the thread, for the message of an error; empty as long as nothing did.
    """

    def __init__(self, link: ReplicaLink, group: ColumnGroup) -> None:
        self.trouble = ""
        self._link = link
        self._group = group
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._halted = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: RankState | None = None
        self._units: list[tuple[UnitWindow, Trained]] = []

    def open(self) -> None:
        """Connect. All ranks of the job together.

        Raises:
            WindowError: on every rank if any rank could not.
        """
        self._link.open()

    def start(self, state: RankState, windows: Sequence[UnitWindow], trained: Sequence[Trained]) -> None:
        """Start the thread.

        Args:
            state: State of this rank; it counts what was moved.
            windows: Contents of this rank's window, by unit.
            trained: Parts that are shared in every version, by unit. The rest of a shard is shared after an edit.
        """
        self._state = state
        self._units = list(zip(windows, trained, strict=True))
        self._thread = threading.Thread(target=self._run, name="lightning-odc sharing", daemon=True)
        self._thread.start()

    def begin(self, version: int, edited: list[int]) -> None:
        """This rank's own shards are written, or will be on the current stream: share and announce them.

        Args:
            version: What they are.
            edited: The units of which more than what is trained may have changed on this rank, by number.
        """
        self._jobs.put(_Job(version, edited, _after_this(self._group.device)))

    def halt(self) -> None:
        """Wait for no other rank any longer: this one, or another, has failed."""
        self._halted.set()

    def stop(self) -> None:
        """Share what is left, and end. A column that hangs is not waited for any longer than 10 s. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_PATIENCE)
            self.halt()
            thread.join(_LONGEST_SLEEP)
        self._units = []  # views of the window
        self._link.close()

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                with job.after():
                    self._share(job)
        except _HaltedError:
            pass
        except PeerFailedError as error:
            self.trouble = str(error)
        except BaseException as error:  # of a backend or of a device: raised where the shards are awaited
            self.trouble = self._group.blame("Sharing of parameters", self._link.trouble(), error)

    def _share(self, job: _Job) -> None:
        told = self._await_column(job.edited)  # [[], [3]]: the rank on the second node has edited unit 3
        edited = {index for one in told for index in one}
        begins = (
            partial(self._begin, window, trained, job.version, window.index in edited)
            for window, trained in self._units
        )
        for _ in in_turn(begins):
            self._check_halted()

    def _await_column(self, record: Any) -> list[Any]:
        """The records of all ranks, once all ranks of the column have published this version."""
        begin = time.monotonic()
        self._link.begin(record)
        while not self._link.complete():
            self._check_halted()
            if trouble := self._link.trouble():
                raise PeerFailedError(trouble)
            time.sleep(min(max((time.monotonic() - begin) * _SLEEP_FRACTION, _FIRST_SLEEP), _LONGEST_SLEEP))
        return self._link.records()

    def _check_halted(self) -> None:
        if self._halted.is_set():
            raise _HaltedError

    def _begin(self, window: UnitWindow, trained: Trained, version: int, edited: bool) -> Callable[[], None]:
        """Begin to share one unit; returns what waits for the end of it, and announces the unit."""
        announce = partial(window.announce, version, edited)
        everything = [(0, window.spec.shard_numel)]
        runs = everything if edited else list(trained)
        whole = runs == everything
        own = window.own_shard if whole else _cut(window.own_shard, runs)
        if not own.numel():
            return announce
        heard = window.shards.view(-1) if whole else own.new_empty(window.shards.size(0) * own.numel())
        arrived = self._group.begin_gather(own, heard)
        assert self._state is not None
        self._state.traffic.bytes_shared += heard.nbytes - own.nbytes

        def end() -> None:
            arrived()
            if not whole:
                _paste(heard.view(window.shards.size(0), -1), window.shards, runs)
            announce()

        return end


def _cut(shard: Tensor, runs: Trained) -> Tensor:
    """Cut runs out and join them: ``a b c d e`` with the runs ``(0, 2), (4, 5)`` gives ``a b e``."""
    return torch.cat([shard[:0], *(shard[start:end] for start, end in runs)])


def _paste(cut: Tensor, shards: Tensor, runs: Trained) -> None:
    """The reverse of `_cut` for several shards: one per row of ``cut`` and of ``shards``."""
    begin = 0
    for start, end in runs:
        shards[:, start:end] = cut[:, begin : begin + end - start]
        begin += end - start


def _after_this(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A context for another thread, in which the device works after everything that was asked of it so far."""
    if device.type != "cuda":
        return nullcontext
    asked = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def after() -> Iterator[None]:
        stream = torch.cuda.Stream(device)
        stream.wait_event(asked)
        with torch.cuda.stream(stream):
            yield

    return after
