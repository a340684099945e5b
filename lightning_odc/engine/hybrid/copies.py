"""Full sharding over several nodes: every node has a copy of all published shards, and sums its own gradients.

Note [A copy per node]
~~~~~~~~~~~~~~~~~~~~~~
The model is sharded over all ranks of all nodes. Yet ranks read and add inside their node only. Each byte goes over
the link between nodes once per minibatch, for any number of microbatches. Two facts allow that. A published shard
does not change inside a minibatch, so a node needs to receive it once. And a node can add up its own gradients, so it
needs to send them once. Both happen when all ranks are there: at publishing, and at the end of a version.

So the window of a rank holds, for every unit, the shards and the sums of its whole *column*, one row per node. An
example: two nodes of two ranks, columns ``(0, 2)`` and ``(1, 3)``, and a unit of 8 numbers, 2 per rank, all equal to 10
times the rank. ``. .`` is a row that has not come yet::

    rank                          0                1                2                3
    its shard, shape [2]          [0, 0]           [10, 10]         [20, 20]         [30, 30]
    publishes, shape [2, 2]       0 0 | . .        10 10 | . .      . . | 20 20      . . | 30 30
    all-gather over the column    0 0 | 20 20      10 10 | 30 30    0 0 | 20 20      10 10 | 30 30
    gathers from both windows of its node          0 0 10 10 20 20 30 30 on every rank
    a backward pass makes         8 numbers, all 1 8 numbers, all 2 8 numbers, all 3 8 numbers, all 4
    windows add, shape [2, 2]     3 3 | 3 3        3 3 | 3 3        7 7 | 7 7        7 7 | 7 7
    reduce-scatter over column    [10, 10]         [10, 10]         [10, 10]         [10, 10]
    optimizer step on             numbers 0, 1     numbers 2, 3     numbers 4, 5     numbers 6, 7

Why no further barrier is needed: the version word of a rank's unit now says that all rows of its window are of this
version, and is stored when the all-gather has ended (``sharing.py``). A row is overwritten only after all ranks of all
nodes have said that they are done with the version before, and a rank sends its shard only after that, too. Everything
else is as in Note [Versions instead of barriers], inside a row. A rank comes to a meeting only with the shards of its
column, so that collectives of one version never meet those of another.

This is appendix E of the paper (*Revisiting Parameter Server in LLM Post-Training*, arXiv 2601.19362), and close to the
secondary shards of ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_odc.engine.hybrid.column import ColumnGroup, in_turn
from lightning_odc.engine.hybrid.layout import Layout
from lightning_odc.engine.hybrid.sharing import Sharing, Trained
from lightning_odc.engine.hybrid.spanning import SpanningEngine, SpanningProtocol
from lightning_odc.engine.peers import Activity, Word
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Transport, UnitSpec
from lightning_odc.engine.unit_window import Column, UnitWindow
from lightning_odc.engine.waiting import Cause

_HOLDS = "a copy of the published model and of its gradient per node, over its ranks"


class CopiesProtocol(SpanningProtocol):
    """`SpanningProtocol` over a model that is sharded over all ranks; see Note [A copy per node].

    Args:
        transport: Transport, see `SpanningProtocol`.
        units: Units, see `Protocol`. Sizes are those of one rank of the job.
        layout: Layout of all ranks. Ranks ascend from row to row.
        group: Process group of this rank's column, opened.
        sharing: not yet opened.
        trained: Parts of a shard that every optimizer step changes, by unit.
        **options: Options of `SpanningProtocol`.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[UnitSpec],
        *,
        layout: Layout,
        group: ColumnGroup,
        sharing: Sharing,
        trained: Sequence[Trained],
        **options: Any,
    ) -> None:
        assert [rank for row in layout.rows for rank in row] == list(range(layout.world_size))
        column = Column(len(layout.rows), layout.node)
        super().__init__(transport, units, layout=layout, group=group, column=column, **options)
        self._spec = replace(self._spec, holds=_HOLDS)
        self.peers.beyond = self._trouble
        self._group = group
        self._sharing = sharing
        self._trained = trained
        self._edited: list[int] = []
        self._totals: Iterator[Tensor] = iter(())

    def open(self) -> None:
        self._sharing.open()
        try:
            super().open()
        except BaseException:
            self._sharing.stop()
            raise
        self._sharing.start(self, self.windows, self._trained)

    def close(self) -> None:
        self._sharing.stop()
        self._totals = iter(())  # it holds views of the window
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
        self._await_shards()
        return super().meet(kind, item)

    def _await_shards(self) -> None:
        """Wait until this rank's window holds the shards of its column. The last unit is announced last."""
        last = len(self._units) - 1
        version = self.transport.watch(self.transport.rank, Word.COUNT + last)
        if version() != self.version:
            self.peers.begin(Activity.NETWORK, last)
            self.waiter.until(
                lambda: version() == self.version,
                Cause.NETWORK,
                lambda: f"waiting for the parameters of other nodes (version {self.version})",
            )

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        items = super().end_version(kind, item)
        self._totals = in_turn(
            partial(self._begin_total, window) for window in self.windows if window.spec.grad_numel
        )
        return items

    def _begin_total(self, window: UnitWindow) -> Callable[[], Tensor]:
        sums = window.summed()  # a 1-D tensor; [3, 3, 3, 3] on rank 0 of the example
        self.traffic.bytes_reduced += sums.nbytes
        return partial(self.await_nodes, window.index, self._group.begin_exchange(sums))

    def total(self, unit: int) -> Tensor:
        if not self._units[unit].grad_numel:
            return super().total(unit)
        with self.traced("sum_over_nodes", unit=self._units[unit].name):
            total, *others = next(self._totals)  # [3, 3] and [7, 7] on rank 0 of the example
            for other in others:
                total += other
            return total  # [10, 10]

    def _trouble(self) -> str:
        """What is wrong on other nodes, or with the link to them; empty if nothing is."""
        return self._link.trouble() or self._sharing.trouble


class CopiesEngine(SpanningEngine):
    """`SpanningEngine` of a model that is sharded over all ranks; see Note [A copy per node]."""

    def _protocol_for(self, transport: Transport, units: Sequence[UnitSpec], **options: Any) -> Protocol:
        return CopiesProtocol(
            transport,
            units,
            layout=self._layout,
            link=self._make_link(),
            group=self._group,
            sharing=Sharing(self._make_link(), self._group),
            trained=[unit.trained for unit in self._units],
            **options,
        )
