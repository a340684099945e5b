"""On demand inside a node, one sum over nodes per minibatch: the engine of hybrid sharding.

Note [Two levels]
~~~~~~~~~~~~~~~~~
Every node holds a whole replica of the model, sharded over its own ranks (a *row*), which run the protocol among
themselves as if there were no other nodes. The ranks that hold the same shards on all nodes are a *column*. A meeting
has two stages: a rank first tells its column its record, over TCP (``connection.py``), then its row what it heard. So
after the second stage every rank has the records of all ranks, and no rank is still at work on the minibatch, on any
node. What follows a meeting that ends a version is the only time that gradients leave a node: every rank sums
what its row has added up for its shards over its column, unit by unit, and takes up a unit while later ones are under
way. After that all replicas take the same optimizer step, so that parameters need not be sent.

Four ranks on two nodes, rows ``(0, 1)`` and ``(2, 3)``, columns ``(0, 2)`` and ``(1, 3)``, a unit of 4 numbers, 2 per
rank; rank ``r`` tells the record ``R_r``::

    rank                      0            1            2            3
    record                    R0           R1           R2           R3
    after the column          R0 R2        R1 R3        R0 R2        R1 R3
    after the row             R0 R1 R2 R3 on every rank, in this order
    has added up, shape [2]   [1, 1]       [5, 5]       [2, 2]       [7, 7]       of the microbatches of its row
    sum over the column       [3, 3]       [12, 12]     [3, 3]       [12, 12]     of all microbatches
    optimizer step on         numbers 0, 1 numbers 2, 3 numbers 0, 1 numbers 2, 3

Replicas begin equal, because the values of the first node are sent to the others when the engine attaches; and whenever
parameters are published outside a step, ranks compare checksums of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.engine.hybrid.layout import Layout
from lightning_odc.engine.hybrid.replica_link import ReplicaLink
from lightning_odc.engine.hybrid.replicas import Replicas, checksums
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Activity
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Rendezvous, Transport, UnitSpec
from lightning_odc.engine.waiting import Cause


class HybridProtocol(Protocol):
    """`Protocol` within a row, whose meetings and sums span all nodes; see Note [Two levels].

    Args:
        transport: between the ranks of this row, not yet opened.
        units: as in `Protocol`.
        layout: of all ranks.
        link: to this rank's column, not yet opened.
        replicas: opened.
        **options: as in `Protocol`.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[UnitSpec],
        *,
        layout: Layout,
        link: ReplicaLink,
        replicas: Replicas,
        **options: Any,
    ) -> None:
        super().__init__(transport, units, **options)
        self._layout = layout
        self._link = link
        self._replicas = replicas
        self._sums: dict[int, Callable[[], Tensor]] = {}
        self._specs = tuple(units)
        self.peers.beyond = link.trouble

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

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        items = super().end_version(kind, item)
        with self.traced("begin_sum_over_nodes"):
            for index, spec in enumerate(self._specs):
                if spec.grad_numel:  # a 1-D tensor of so many numbers; [1, 1] on rank 0 of the example
                    self._sums[index] = self._replicas.begin_sum(self.windows[index].summed())
                    self.traffic.bytes_reduced += spec.grad_bytes
        return items

    def total(self, unit: int) -> Tensor:
        if unit not in self._sums:
            return super().total(unit)
        with self.traced("sum_over_nodes", unit=self._specs[unit].name):
            return self._sums.pop(unit)()  # waits for this unit alone; [3, 3] on rank 0 of the example

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self._layout.world_size)

    def _exchange(self, kind: str, record: Any) -> list[Any]:
        column = self._meet_column(kind, record)  # on ranks 0 and 2 of the example [R0, R2]
        by_column = super()._exchange(kind, column)  # [[R0, R2], [R1, R3]], from the ranks of this row
        return self._layout.by_rank(by_column)  # [R0, R1, R2, R3]

    def _meet_column(self, kind: str, record: Any) -> list[Any]:
        """The records of this rank's column, in its order."""
        self.peers.begin(Activity.MEET)
        self._link.begin(record)
        self.waiter.until(
            self._link.complete,
            Cause.SETTLE,
            lambda: (
                f"waiting for {self._link.missing()} on other nodes at meeting {self._meetings + 1} ({kind})"
            ),
            check=self.peers.check_none_past,
        )
        return self._link.records()


class HybridEngine(OnDemandEngine):
    """`OnDemandEngine` over the ranks of several nodes, each with a replica of the model; see Note [Two levels].

    Args:
        make_transport: as in `OnDemandEngine`, between the ranks of this row.
        rendezvous: gives every rank's object to every rank of the job; used at `attach` only.
        layout: of all ranks.
        make_link: makes a fresh, unopened link to this rank's column.
        replicas: not yet opened.
        **options: as in `OnDemandEngine`.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        rendezvous: Rendezvous,
        *,
        layout: Layout,
        make_link: Callable[[], ReplicaLink],
        replicas: Replicas,
        **options: Any,
    ) -> None:
        super().__init__(make_transport, rendezvous, **options)
        self._layout = layout
        self._make_link = make_link
        self._replicas = replicas

    @property
    def world_size(self) -> int:
        return self._layout.world_size

    def close(self) -> None:
        super().close()
        self._replicas.close()

    def tasks(self, minibatch: Minibatch) -> Iterator[Task]:
        """As in `OnDemandEngine`; work is stolen within the row, whose windows are at hand."""
        if minibatch.all_ranks is not None:
            everybody = minibatch.all_ranks
            minibatch = minibatch.map(lambda microbatch: microbatch)
            minibatch.all_ranks = everybody.of(self._layout.row)
        yield from super().tasks(minibatch)

    def refresh(self) -> None:
        self.reshard()
        shards = self._shards()
        sums = self.exchange("publish parameters", checksums(shards))
        self._replicas.level_where_different(shards, sums)
        self.publish()

    def _protocol_for(self, transport: Transport, units: Sequence[UnitSpec], **options: Any) -> Protocol:
        link = self._make_link()
        return HybridProtocol(
            transport, units, layout=self._layout, link=link, replicas=self._replicas, **options
        )

    @torch.no_grad()
    def _before_publishing(self) -> None:
        self._replicas.open()
        self._replicas.level(self._shards())

    def _shards(self) -> dict[str, Tensor]:
        return {slot.name: slot.local for unit in self._units for slot in unit.slots}
