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

A version word now says that all rows of its window are of this version. A thread (that of `Leaders`) stores it when
the all-gather has ended.

Note [Two levels]
~~~~~~~~~~~~~~~~~
A meeting has three stages. The ranks of a node meet in their windows. The first of them, which *leads* the node, meets
the leaders of the other nodes (`Leaders`). Then it tells its node what it heard, in a second meeting there. So then
every rank has the records of all ranks, and no rank is still at work on the minibatch, on any node. Rank ``r`` of the
example comes with the record ``R_r``::

    rank                   0            1            2            3
    after the node         R0 R1        R0 R1        R2 R3        R2 R3
    after the leaders      R0 R1 R2 R3  R0 R1        R0 R1 R2 R3  R2 R3
    after the node again   R0 R1 R2 R3 on every rank, in this order

Appendix E of *Revisiting Parameter Server in LLM Post-Training* (arXiv 2601.19362); like secondary shards of ZeRO++
(arXiv 2306.10209).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_odc.protocol.nodes.column import ColumnGroup, Layout, in_turn
from lightning_odc.protocol.nodes.leaders import MOST_BYTES, Leaders
from lightning_odc.protocol.peers import Activity
from lightning_odc.protocol.protocol import Protocol, exchange
from lightning_odc.protocol.unit_window import UnitWindow
from lightning_odc.protocol.waiting import Cause


class CopiesProtocol(Protocol):
    """`Protocol` within a node, over a model that is sharded over all ranks of all nodes.

    See Note [A copy per node] and Note [Two levels].
    """

    def __init__(
        self,
        *args: Any,
        layout: Layout,
        column: ColumnGroup,
        make_leaders: Callable[[], Leaders],  # fresh, unopened ones
        **options: Any,
    ) -> None:
        super().__init__(*args, nodes=layout.nodes, node=layout.node, **options)
        self._layout = layout
        self._column = column
        self._leaders = make_leaders()
        self._edited = False
        self._totals: Iterator[Tensor] = iter(())
        self.peers.beyond = self._leaders.trouble

    def open(self) -> None:
        self._column.open()
        self._leaders.open()
        super().open()
        self._leaders.of_node = self.peers.trouble_here

    def close(self) -> None:
        self._totals = iter(())  # it holds views of the window
        self._leaders.close()
        super().close()
        self._column.close()

    def fail(self, message: str) -> None:
        super().fail(message)
        # A leader may leave before others of its node have told why.
        reason = f"Rank {self._layout.rank} failed, so all ranks stop. Its error was:\n{message[: MOST_BYTES // 4]}"
        self._leaders.of_node = lambda: reason
        if self._layout.rank == 0:  # it may keep the store: others hear of it before that ends
            time.sleep(4 * self._leaders.look_every)

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self._layout.world_size)

    def publish(self, window: UnitWindow, edited: bool) -> None:
        self._edited |= edited
        if window is self.windows[-1]:  # so all own shards are written, or will be on the current stream
            stream = None
            if self._column.device.type == "cuda":
                stream = torch.cuda.current_stream(self._column.device)
            self._leaders.begin(partial(self._share, self.version, self._edited, stream))
            self._edited = False

    def _share(self, version: int, edited: bool, stream: torch.cuda.Stream | None) -> None:
        """Copy the shards over the column, and announce them; in the thread of `Leaders`."""
        # Ranks come out of the optimizer step at different times. So this waits until all have published, and can give
        # up before collectives begin.
        edited = self._leaders.all_have_published(version, edited)
        begins = (partial(self._begin_sharing, window, version, edited) for window in self.windows)
        try:
            # Behind what writes the shards.
            with torch.cuda.stream(stream), self.transport.on_another_stream():
                list(in_turn(begins))
        except Exception as error:  # of a backend or of a device: raised where the shards are awaited
            self._leaders.broke("Sharing of parameters", error)

    def _begin_sharing(self, window: UnitWindow, version: int, edited: bool) -> Callable[[], None]:
        """Begin to share one unit; returns what waits for the end of it, and announces the unit."""
        announce = partial(window.announce, version, edited)
        whole = window.spec.shard_numel
        runs = window.spec.grad_ranges
        own = window.own_shard
        heard = window.shards
        if not edited and runs != ((0, whole),):
            # ``a b c d e`` with the runs ``(0, 2), (4, 5)`` is sent as ``a b e``, and pasted there.
            own = torch.cat([own[:0], *[own[start:end] for start, end in runs]])
            heard = own.new_empty(len(heard), own.numel())
        if not own.numel():
            return announce
        work = self._column.begin_gather(own, heard.view(-1))
        self.traffic.bytes_shared += heard.nbytes - own.nbytes

        def end() -> None:
            self._leaders.until(work.is_completed)
            work.wait()
            if heard is not window.shards:
                place = 0
                for start, end in runs:
                    window.shards[:, start:end] = heard[:, place : place + end - start]
                    place += end - start
            announce()

        return end

    def meet(self, kind: str, item: Any = None) -> list[Any]:
        # A rank comes with the shards of its column, so that collectives of one version never meet those of another,
        # nor meetings of leaders. The last unit is announced last.
        last = self.windows[-1]
        version = self.transport.watch(self.transport.rank, last.word)
        self.peers.begin(Activity.NETWORK, last.index)
        self.waiter.until(
            lambda: version() == self.version,
            Cause.NETWORK,
            lambda: f"waiting for the parameters of other nodes (version {self.version})",
        )
        return super().meet(kind, item)

    def _exchange(self, kind: str, record: Any) -> list[Any]:
        told = super()._exchange(kind, record)  # on ranks 0 and 1 of the example [R0, R1]
        if self._layout.leads:
            by_node = exchange(told, MOST_BYTES, partial(self._meet_leaders, kind))
            told = [record for of_node in by_node for record in of_node]  # of [[R0, R1], [R2, R3]]
        heard = super()._exchange(kind, told if self._layout.leads else None)
        return list(heard[0])  # [R0, R1, R2, R3]

    def _meet_leaders(self, kind: str, message: bytes) -> list[bytes]:
        heard = self._leaders.meet(message)
        self.peers.begin(Activity.MEET)
        self.waiter.until(
            lambda: bool(heard),
            Cause.SETTLE,
            lambda: f"waiting for {self._leaders.missing} at synchronization {self._meetings} ({kind})",
            check=self.peers.check_not_past,
        )
        return heard

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        items = super().end_version(kind, item)
        self._totals = in_turn(partial(self._sum_over_nodes, window) for window in self.windows)
        return items

    def total(self, unit: int) -> Tensor:
        try:
            return next(self._totals)  # in the order of the units
        except RuntimeError as error:
            self._leaders.broke("A sum of gradients", error)
            self.waiter.until(lambda: False, None, lambda: "waiting for the reason")  # raises it
            raise

    def _sum_over_nodes(self, window: UnitWindow) -> Callable[[], Tensor]:
        """Begin to sum a unit's gradients over the column. On GPUs the host only asks, and does not wait."""
        name = window.spec.name
        what = f"waiting for the gradients of unit {name!r} from other nodes"
        if not window.spec.grad_numel:
            return window.summed
        sums = window.summed()
        self.traffic.bytes_reduced += sums.nbytes
        end = self._column.begin_exchange(sums)  # [3, 3, 3, 3] on rank 0 of the example

        def wait() -> Tensor:
            self.peers.begin(Activity.NETWORK, window.index)
            with self.traced("sum_over_nodes", unit=name), self.waiter.during(Cause.NETWORK, lambda: what):
                total, *others = end()  # [3, 3] and [7, 7]
                for other in others:
                    total += other
            self.peers.begin(Activity.COMPUTE, window.index)
            return total  # [10, 10]

        return wait
