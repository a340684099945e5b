"""On demand inside a node, one sum over nodes per minibatch: the engine of hybrid sharding.

Note [Two levels]
~~~~~~~~~~~~~~~~~
Every node holds a whole replica of the model, sharded over its own ranks (a *row*), which run the protocol among
themselves as if there were no other nodes. The ranks that hold the same shards on all nodes are a *column*. A meeting
has two parts: a rank first tells its column its record, over lines (Note [Lines between hosts]), then its row what it
heard. So after the second part every rank has the records of all ranks, and nobody is still at work on the minibatch,
on any node. What follows a meeting that ends a version is the only time that gradients leave a node: every rank sums
what its row has added up for its shards over its column, unit by unit, and takes up a unit while later ones are under
way. After that all replicas take the same optimizer step, so that parameters need not be sent.

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
from lightning_odc.engine.hybrid.replica_link import Column
from lightning_odc.engine.hybrid.replicas import Replicas, checksums
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Activity
from lightning_odc.engine.protocol import Protocol, Record
from lightning_odc.engine.transports.base import Rendezvous, Transport, UnitSpec
from lightning_odc.engine.waiting import Cause


class HybridProtocol(Protocol):
    """`Protocol` within a row, whose meetings and sums span all nodes; see Note [Two levels].

    Args:
        transport: between the ranks of this row, not yet opened.
        units: as in `Protocol`.
        layout: of all ranks.
        column: not yet opened.
        replicas: opened.
        **options: as in `Protocol`.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[UnitSpec],
        *,
        layout: Layout,
        column: Column,
        replicas: Replicas,
        **options: Any,
    ) -> None:
        super().__init__(transport, units, **options)
        self._layout = layout
        self._column = column
        self._replicas = replicas
        self._sums: dict[int, Callable[[], Tensor]] = {}
        self._specs = tuple(units)
        self.peers.beyond = column.trouble

    def open(self) -> None:
        self._column.open()
        try:
            super().open()
        except BaseException:
            self._column.close()
            raise

    def close(self) -> None:
        super().close()
        self._column.close()

    def fail(self, message: str) -> None:
        super().fail(message)
        self._column.fail(message)

    def end_version(self, record: Record) -> list[Record]:
        records = super().end_version(record)
        with self.traced("begin_sum_over_nodes"):
            for index, spec in enumerate(self._specs):
                if spec.grad_numel:
                    self._sums[index] = self._replicas.begin_sum(self.windows[index].summed())
                    self.traffic.bytes_reduced += spec.grad_bytes
        return records

    def total(self, unit: int) -> Tensor:
        if unit not in self._sums:
            return super().total(unit)
        with self.traced("sum_over_nodes", unit=self._specs[unit].name):
            return self._sums.pop(unit)()

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self._layout.world_size)

    def _exchange(self, record: Record) -> list[Record]:
        rows = super()._exchange({"kind": record["kind"], "column": self._meet_column(record)})
        return self._layout.by_rank([row["column"] for row in rows])

    def _meet_column(self, record: Record) -> list[Record]:
        self.peers.begin(Activity.MEET)
        self._column.begin(record)
        self.waiter.until(
            self._column.complete,
            Cause.SETTLE,
            lambda: (
                f"waiting for {self._column.missing()} on other nodes at meeting {self._meetings + 1} "
                f"({record['kind']})"
            ),
            check=self.peers.check_none_past,
        )
        return self._column.records()


class HybridEngine(OnDemandEngine):
    """`OnDemandEngine` over the ranks of several nodes, each with a replica of the model; see Note [Two levels].

    Args:
        make_transport: as in `OnDemandEngine`, between the ranks of this row.
        rendezvous: gives every rank's object to every rank of the job; used at `attach` only.
        layout: of all ranks.
        make_column: makes a fresh, unopened column.
        replicas: not yet opened.
        **options: as in `OnDemandEngine`.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        rendezvous: Rendezvous,
        *,
        layout: Layout,
        make_column: Callable[[], Column],
        replicas: Replicas,
        **options: Any,
    ) -> None:
        super().__init__(make_transport, rendezvous, **options)
        self._layout = layout
        self._make_column = make_column
        self._replicas = replicas

    @property
    def world_size(self) -> int:
        return self._layout.world_size

    def close(self) -> None:
        super().close()
        self._replicas.close()

    def tasks(self, share: Minibatch) -> Iterator[Task]:
        """As in `OnDemandEngine`; work is stolen within the row, whose windows are at hand."""
        if share.all_ranks is not None:
            everybody = share.all_ranks
            share = share.map(lambda microbatch: microbatch)
            share.all_ranks = everybody.of(self._layout.row)
        yield from super().tasks(share)

    def refresh(self) -> None:
        self.reshard()
        shards = self._shards()
        sums = self.exchange("publish parameters", checksums(shards))
        self._replicas.level_where_different(shards, sums)
        self.publish()

    def _protocol_for(self, transport: Transport, units: Sequence[UnitSpec], **options: Any) -> Protocol:
        column = self._make_column()
        return HybridProtocol(
            transport, units, layout=self._layout, column=column, replicas=self._replicas, **options
        )

    @torch.no_grad()
    def _before_publishing(self) -> None:
        self._replicas.open()
        self._replicas.level(self._shards())

    def _shards(self) -> dict[str, Tensor]:
        return {slot.name: slot.local for unit in self._units for slot in unit.slots}
