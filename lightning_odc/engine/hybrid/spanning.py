"""The common part of the engines for several nodes: on demand inside a node, meetings over all nodes.

Note [Two levels]
~~~~~~~~~~~~~~~~~
The ranks of a node (a *row*) share memory, and run the protocol among themselves. The ranks that have the same place in
all rows are a *column*. A meeting has two stages: a rank first tells its column its record, over TCP
(``link.py``), then its row what it heard. So after the second stage every rank has the records of all ranks, and
no rank is still at work on the minibatch, on any node.

Four ranks on two nodes, rows ``(0, 1)`` and ``(2, 3)``, columns ``(0, 2)`` and ``(1, 3)``; rank ``r`` tells the record
``R_r``::

    rank                 0            1            2            3
    record               R0           R1           R2           R3
    after the column     R0 R2        R1 R3        R0 R2        R1 R3
    after the row        R0 R1 R2 R3 on every rank, in this order

Besides these records, collectives over a column (``column.py``) use the link between nodes: a few for every unit and
minibatch, each when all ranks of the column are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.engine.hybrid.column import ColumnGroup, Layout
from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Activity
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Rendezvous, Transport, UnitSpec
from lightning_odc.engine.waiting import Cause


class SpanningProtocol(Protocol):
    """`Protocol` within a row, whose meetings span all nodes; see Note [Two levels]."""

    def __init__(
        self,
        transport: Transport,  # between the ranks of this row, not yet opened
        units: Sequence[UnitSpec],
        *,
        layout: Layout,
        link: ReplicaLink,  # to this rank's column, not yet opened
        group: ColumnGroup,  # of this rank's column, opened
        **options: Any,
    ) -> None:
        super().__init__(transport, units, **options)
        self._layout = layout
        self._link = link
        self._group = group
        self.peers.beyond = group.trouble = link.trouble

    def open(self) -> None:
        self._link.open()
        try:
            super().open()
        except BaseException:
            self._link.close()
            raise

    def close(self) -> None:
        super().close()
        self._link.close()

    def fail(self, message: str) -> None:
        super().fail(message)
        self._link.fail(message)

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self._layout.world_size)

    def _exchange(self, kind: str, record: Any) -> list[Any]:
        self.peers.begin(Activity.MEET)
        self._link.begin(record)
        self.waiter.until(
            self._link.complete,
            Cause.SETTLE,
            lambda: (
                f"waiting for {self._link.missing()} on other nodes at meeting {self._meetings + 1} ({kind})"
            ),
            check=self.peers.check_not_past,
        )
        column = self._link.records()  # on ranks 0 and 2 of the example [R0, R2]
        by_column = super()._exchange(kind, column)  # [[R0, R2], [R1, R3]], from the ranks of this row
        return self._layout.by_rank(by_column)  # [R0, R1, R2, R3]

    def await_nodes(self, unit: int, end: Callable[[], Tensor]) -> Tensor:
        """What a collective over the column comes to. On GPUs the host only asks, and does not wait."""
        name = self._units[unit].name
        self.peers.begin(Activity.NETWORK, unit)
        with self.waiter.during(
            Cause.NETWORK, lambda: f"waiting for the gradients of unit {name!r} from other nodes"
        ):
            answer = end()
        self.peers.begin(Activity.COMPUTE, unit)
        return answer


class SpanningEngine(OnDemandEngine):
    """`OnDemandEngine` over the ranks of several nodes."""

    def __init__(
        self,
        make_transport: Callable[[], Transport],  # between the ranks of this row
        rendezvous: Rendezvous,  # of all ranks of the job
        *,
        layout: Layout,
        make_link: Callable[[], ReplicaLink],  # a fresh, unopened link to this rank's column
        group: ColumnGroup,  # of this rank's column, not yet opened
        **options: Any,
    ) -> None:
        super().__init__(make_transport, rendezvous, **options)
        self._layout = layout
        self._make_link = make_link
        self._group = group

    @property
    def world_size(self) -> int:
        return self._layout.world_size

    def close(self) -> None:
        super().close()
        self._group.close()

    def tasks(self, minibatch: Minibatch) -> Iterator[Task]:
        """See `OnDemandEngine`. Work is stolen within the row, because its windows can be read."""
        if minibatch.all_ranks is not None:
            everybody = minibatch.all_ranks
            minibatch = minibatch.map(lambda microbatch: microbatch)
            minibatch.all_ranks = everybody.of(self._layout.row)
        yield from super().tasks(minibatch)

    def _before_publishing(self) -> None:
        self._group.open()
