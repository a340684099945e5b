"""Hybrid sharding: on demand inside a node, one sum over nodes per minibatch.

Every node holds a whole replica of the model, sharded over its own ranks. Gradients leave a node only after a meeting
that ends a version (see Note [Two levels]): every rank sums over its column what its row has added up for its shards.
Then all replicas take the same optimizer step, so parameters need not be sent. Two nodes, a unit of 4 numbers, 2 per
rank::

    rank                      0            1            2            3
    has added up, shape [2]   [1, 1]       [5, 5]       [2, 2]       [7, 7]       of the microbatches of its row
    sum over the column       [3, 3]       [12, 12]     [3, 3]       [12, 12]     of all microbatches
    optimizer step on         numbers 0, 1 numbers 2, 3 numbers 0, 1 numbers 2, 3

Replicas begin equal, because the first node sends its values to the others when the engine attaches. When parameters
are published outside a step, ranks compare checksums of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.hybrid.spanning import ColumnGroup, SpanningEngine, SpanningProtocol
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Transport, UnitSpec

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Replicas(ColumnGroup):
    """A column of which every rank holds the same shards."""

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over the column, in place; returns what waits for the end of it."""
        return self._begin(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def level(self, shards: Mapping[str, Tensor]) -> None:
        """Give this rank's shards (by parameter name) the values that they have on the first node."""
        for shard in shards.values():
            if shard.numel():
                sent = shard.to(self.device).contiguous()
                self._checked(
                    lambda sent=sent: dist.broadcast(sent, src=self._layout.column[0], group=self._group)  # type: ignore[misc]
                )
                shard.copy_(sent)

    def level_where_different(
        self, shards: Mapping[str, Tensor], sums_by_rank: list[Mapping[str, int]]
    ) -> None:
        """`level` the shards whose `checksums` differ within the column, and say so."""
        column = [sums_by_rank[rank] for rank in self._layout.column]
        different = {name: s for name, s in shards.items() if len({sums[name] for sums in column}) > 1}
        if different:
            warnings.warn(
                f"{', '.join(different)} differed between nodes, and now has the value of the node of rank 0 "
                "everywhere. Change parameters on all ranks of all nodes in the same way.",
                stacklevel=2,
            )
            self.level(different)


def checksums(shards: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for each shard, by name. If the bits of two shards differ, it (nearly always) differs, too."""
    return {
        name: int(shard.contiguous().view(-1).view(_WIDTHS[shard.element_size()]).sum(dtype=torch.int64))
        for name, shard in shards.items()
    }


class HybridProtocol(SpanningProtocol):
    """`SpanningProtocol` that sums gradients over replicas."""

    _group: Replicas

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sums: dict[int, Callable[[], Tensor]] = {}

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        items = super().end_version(kind, item)
        with self.traced("begin_sum_over_nodes"):
            for index, spec in enumerate(self._units):
                if spec.grad_numel:  # a 1-D tensor of so many numbers; [1, 1] on rank 0 of the example
                    self._sums[index] = self._group.begin_sum(self.windows[index].summed())
                    self.traffic.bytes_reduced += spec.grad_bytes
        return items

    def total(self, unit: int) -> Tensor:
        if unit not in self._sums:
            return super().total(unit)
        with self.traced("sum_over_nodes", unit=self._units[unit].name):
            return self.await_nodes(unit, self._sums.pop(unit))  # [3, 3] on rank 0 of the example


class HybridEngine(SpanningEngine):
    """`SpanningEngine` of nodes with a replica of the model each."""

    _group: Replicas

    def refresh(self) -> None:
        self.reshard()
        shards = self._shards()
        sums = self.exchange("publish parameters", checksums(shards))
        self._group.level_where_different(shards, sums)
        self.publish()

    def _protocol_for(self, transport: Transport, units: Sequence[UnitSpec], **options: Any) -> Protocol:
        link = self._make_link()
        return HybridProtocol(transport, units, layout=self._layout, link=link, group=self._group, **options)

    @torch.no_grad()
    def _before_publishing(self) -> None:
        super()._before_publishing()
        self._group.level(self._shards())

    def _shards(self) -> dict[str, Tensor]:
        return {slot.name: slot.local for unit in self._units for slot in unit.slots}
