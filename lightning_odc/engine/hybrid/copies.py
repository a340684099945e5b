"""Full sharding over several nodes: every node has a copy of all published shards, and sums its own gradients.

Note [A copy per node]
~~~~~~~~~~~~~~~~~~~~~~
The model is sharded over all ranks of all nodes, yet ranks read and add inside their node only. Each byte goes over the
link between nodes once per minibatch: a published shard at publishing, the sum of a node's gradients at the end of a
version. So the window of a rank holds, for every unit, the shards and the sums of its whole *column*, one row per node.

Two nodes of two ranks, columns ``(0, 2)`` and ``(1, 3)``, and a unit of 8 numbers, 2 per rank, equal to 10 times the
rank. ``. .`` is a row that has not come yet::

    rank                          0                1                2                3
    its shard, shape [2]          [0, 0]           [10, 10]         [20, 20]         [30, 30]
    publishes, shape [2, 2]       0 0 | . .        10 10 | . .      . . | 20 20      . . | 30 30
    all-gather over the column    0 0 | 20 20      10 10 | 30 30    0 0 | 20 20      10 10 | 30 30
    gathers from both windows of its node          0 0 10 10 20 20 30 30 on every rank
    a backward pass makes         8 numbers, all 1 8 numbers, all 2 8 numbers, all 3 8 numbers, all 4
    windows add, shape [2, 2]     3 3 | 3 3        3 3 | 3 3        7 7 | 7 7        7 7 | 7 7
    reduce-scatter over column    [10, 10]         [10, 10]         [10, 10]         [10, 10]
    optimizer step on             numbers 0, 1     numbers 2, 3     numbers 4, 5     numbers 6, 7

A version word now says that all rows of its window are of this version. A thread (`Sharing`) stores it when the
all-gather has ended.

Appendix E of *Revisiting Parameter Server in LLM Post-Training* (arXiv 2601.19362); like secondary shards of ZeRO++
(arXiv 2306.10209).
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.hybrid.spanning import (
    ColumnGroup,
    Layout,
    SpanningEngine,
    SpanningProtocol,
    in_turn,
)
from lightning_odc.engine.peers import Activity, Word
from lightning_odc.engine.unit_window import RankState, UnitWindow
from lightning_odc.engine.waiting import CHECK_EVERY, Cause, Waiter
from lightning_odc.errors import PeerFailedError

_PATIENCE = 10.0  # seconds that the end waits for a collective that hangs


class _HaltedError(Exception):
    """The other ranks will not come any more."""


class Sharing:
    """Copies shards over the column and announces them; see Note [A copy per node]."""

    def __init__(self, link: ReplicaLink, group: ColumnGroup) -> None:
        self.trouble = ""  # what ended the thread, for the message of an error; empty as long as nothing did
        self._link = link
        self._group = group
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._halted = threading.Event()
        self._waiter = Waiter(math.inf, self._check, str)
        self._thread: threading.Thread | None = None
        self._state: RankState | None = None
        self._windows: Sequence[UnitWindow] = ()

    def open(self) -> None:
        """Connect. All ranks of the job together."""
        self._link.open()

    def start(self, state: RankState, windows: Sequence[UnitWindow]) -> None:
        """Start the thread."""
        self._state = state
        self._windows = windows
        self._thread = threading.Thread(target=self._run, name="lightning-odc sharing", daemon=True)
        self._thread.start()

    def begin(self, version: int, edited: list[int]) -> None:
        """This rank's own shards are written, or will be on the current stream: share and announce them."""
        # ``edited``: the units of which more than what is trained may have changed on this rank, by number.
        self._jobs.put(partial(self._share, version, edited, _after_this(self._group.device)))

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
            thread.join(2 * CHECK_EVERY)
        self._windows = ()  # they hold views of the window
        self._link.close()

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except _HaltedError:
            pass
        except PeerFailedError as error:
            self.trouble = str(error)
        except BaseException as error:  # of a backend or of a device: raised where the shards are awaited
            self.trouble = self._group.blame("Sharing of parameters", self._link.trouble(), error)

    def _share(self, version: int, own: list[int], after: Callable[[], AbstractContextManager[Any]]) -> None:
        # Ranks come out of the optimizer step at different times. So this waits at a connection until the whole column
        # has published. Only then do collectives begin, which may so give up early.
        self._link.begin(own)
        self._waiter.until(self._link.complete, None, str)
        # ``[[], [3]]``: the rank on the second node has edited unit 3
        edited: set[int] = set()
        for units in self._link.records():
            edited.update(units)
        begins = (partial(self._begin, window, version, window.index in edited) for window in self._windows)
        with after():  # the device has written all that is shared
            for _ in in_turn(begins):
                self._check()

    def _check(self) -> None:
        if self._halted.is_set():
            raise _HaltedError
        if trouble := self._link.trouble():
            raise PeerFailedError(trouble)

    def _begin(self, window: UnitWindow, version: int, edited: bool) -> Callable[[], None]:
        """Begin to share one unit; returns what waits for the end of it, and announces the unit."""
        announce = partial(window.announce, version, edited)
        own = window.own_shard
        heard = window.shards.view(-1)
        runs = window.spec.grad_ranges
        whole = edited or runs == ((0, window.spec.shard_numel),)
        if not whole:
            # ``a b c d e`` with the runs ``(0, 2), (4, 5)`` is sent as ``a b e``, and pasted there.
            parts = [own[start:end] for start, end in runs]
            own = torch.cat([own[:0], *parts])
            heard = own.new_empty(window.shards.size(0) * own.numel())
        if not own.numel():
            return announce
        arrived = self._group.begin_gather(own, heard)
        assert self._state is not None
        self._state.traffic.bytes_shared += heard.nbytes - own.nbytes

        def end() -> None:
            arrived()
            if not whole:
                sizes = [end - start for start, end in runs]
                pasted = heard.view(window.shards.size(0), -1).split(sizes, 1)
                for (start, end), part in zip(runs, pasted, strict=True):
                    window.shards[:, start:end] = part
            announce()

        return end


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


class CopiesProtocol(SpanningProtocol):
    """`SpanningProtocol` over a model that is sharded over all ranks; see Note [A copy per node]."""

    def __init__(
        self, *args: Any, layout: Layout, make_link: Callable[[], ReplicaLink], **options: Any
    ) -> None:
        assert [rank for row in layout.rows for rank in row] == list(range(layout.world_size))
        super().__init__(
            *args,
            layout=layout,
            make_link=make_link,
            nodes=len(layout.rows),
            node=layout.node,
            **options,
        )
        self._sharing = Sharing(make_link(), self._group)
        self.peers.beyond = lambda: self._link.trouble() or self._sharing.trouble
        self._edited: list[int] = []

    def open(self) -> None:
        self._sharing.open()
        try:
            super().open()
        except BaseException:
            self._sharing.stop()
            raise
        self._sharing.start(self, self.windows)

    def close(self) -> None:
        self._sharing.stop()
        super().close()

    def fail(self, message: str) -> None:
        super().fail(message)
        self._sharing.halt()

    def publish(self, window: UnitWindow, edited: bool) -> None:
        if edited:
            self._edited.append(window.index)
        if window is self.windows[-1]:  # so all own shards are written
            edited_units, self._edited = self._edited, []
            self._sharing.begin(self.version, edited_units)

    def meet(self, kind: str, item: Any = None) -> list[Any]:
        # A rank comes with the shards of its column, so that collectives of one version never meet those of another.
        # The last unit is announced last.
        last = len(self._units) - 1
        version = self.transport.watch(self.transport.rank, Word.COUNT + last)
        if version() != self.version:
            self.peers.begin(Activity.NETWORK, last)
            self.waiter.until(
                lambda: version() == self.version,
                Cause.NETWORK,
                lambda: f"waiting for the parameters of other nodes (version {self.version})",
            )
        return super().meet(kind, item)

    def _begin_total(self, sums: Tensor) -> Callable[[], Tensor]:
        end = self._group.begin_exchange(sums)  # [3, 3, 3, 3] on rank 0 of the example

        def add() -> Tensor:
            total, *others = end()  # [3, 3] and [7, 7]
            for other in others:
                total += other
            return total  # [10, 10]

        return add


class CopiesEngine(SpanningEngine):
    """`SpanningEngine` of a model that is sharded over all ranks; see Note [A copy per node]."""

    protocol_class = CopiesProtocol
