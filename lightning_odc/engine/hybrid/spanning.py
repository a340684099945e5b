"""The common part of the engines for several nodes: on demand inside a node, meetings and collectives over all nodes.

Note [Two levels]
~~~~~~~~~~~~~~~~~
The ranks of a node are a *row*, those with the same place in all rows a *column*: ``docs/memory-and-traffic.md``. A
meeting has two stages: a rank first tells its column its record, over TCP (``link.py``), then its row what it heard. So
then every rank has the records of all ranks, and no rank is still at work on the minibatch, on any node.

Four ranks on two nodes, rows ``(0, 1)`` and ``(2, 3)``, columns ``(0, 2)`` and ``(1, 3)``; rank ``r`` tells the record
``R_r``::

    rank                 0            1            2            3
    after the column     R0 R2        R1 R3        R0 R2        R1 R3
    after the row        R0 R1 R2 R3 on every rank, in this order

Hybrid sharding (`HybridEngine`). Every node holds a whole replica of the model, sharded over its own ranks. Gradients
leave a node only after a meeting that ends a version: every rank sums over its column what its row has added up. Then
all replicas take the same optimizer step, so parameters need not be sent. Two nodes, a unit of 4 numbers, 2 per rank::

    rank                      0            1            2            3
    has added up, shape [2]   [1, 1]       [5, 5]       [2, 2]       [7, 7]       of the microbatches of its row
    sum over the column       [3, 3]       [12, 12]     [3, 3]       [12, 12]     of all microbatches
    optimizer step on         numbers 0, 1 numbers 2, 3 numbers 0, 1 numbers 2, 3

Replicas begin equal, because the first node sends its values to the others when the engine attaches. When parameters
are published outside a step, ranks compare checksums of them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.comm import all_gather
from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Activity
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.unit_window import UnitWindow
from lightning_odc.engine.waiting import Cause
from lightning_odc.errors import PeerFailedError

_Answer = TypeVar("_Answer")
#: More collectives at once would not be faster, and each needs memory for what it receives.
_UNDER_WAY = 2
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class Layout:
    """The ranks of a job as rows (one per node, which shard the model among themselves) and columns."""

    rows: tuple[tuple[int, ...], ...]  # equally many ranks in each
    rank: int

    @property
    def world_size(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks that share this rank's replica of the model."""
        return next(row for row in self.rows if self.rank in row)

    @property
    def columns(self) -> list[list[int]]:
        return [list(column) for column in zip(*self.rows, strict=True)]

    @property
    def column(self) -> list[int]:
        """The ranks that hold the same shards as this one."""
        return self.columns[self.row.index(self.rank)]

    @property
    def node(self) -> int:
        """Which row this rank is in, and its place in the column."""
        return self.rows.index(self.row)

    @property
    def main_row(self) -> tuple[int, ...]:
        """The ranks on the host of rank 0."""
        return next(row for row in self.rows if 0 in row)


class ColumnGroup:
    """The process group of this rank's column. All ranks of the column are there when a collective begins."""

    def __init__(self, layout: Layout, device: torch.device, stall: timedelta) -> None:
        self.device = device
        self.trouble: Callable[[], str] = str  # tells which rank of the column is gone, if one is
        self._layout = layout
        self._stall = stall  # time without progress after which a collective gives up
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Make the group. All ranks of the job together; idempotent."""
        if self._group is None:
            self._group, _ = dist.new_subgroups_by_enumeration(self._layout.columns, timeout=self._stall)

    def close(self) -> None:
        """Give the group back. Idempotent."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def begin_gather(self, own: Tensor, whole: Tensor) -> Callable[[], object]:
        """Begin to copy what every rank of the column has to all; returns what waits for its end. Both are 1-D."""
        # Every backend can move bytes.
        work = all_gather(whole.view(torch.uint8), own.view(torch.uint8), group=self._group, async_op=True)
        return work.wait

    def begin_exchange(self, sums: Tensor) -> Callable[[], Tensor]:
        """Begin to give every rank of the column its part; returns what waits for what this rank is given."""
        # Half of a reduce-scatter; the sum over what was heard is the other half. That of gloo is an all-reduce, which
        # sends twice the bytes. ``sums`` (1-D, a part per rank) must not change until the end; ``[nodes, part]`` comes.
        heard = torch.empty_like(sums)
        exchange = partial(
            dist.all_to_all_single,
            heard.view(torch.uint8),
            sums.view(torch.uint8),
            group=self._group,
            async_op=True,
        )
        return self._begin(exchange, heard.view(len(self._layout.rows), -1))

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over the column, in place; returns what waits for the end of it."""
        return self._begin(partial(dist.all_reduce, tensor, group=self._group, async_op=True), tensor)

    def level(self, shards: Iterable[Tensor]) -> None:
        """Give this rank's shards the values that they have on the first node."""
        first = self._layout.column[0]
        for shard in shards:
            if shard.numel():
                sent = shard.to(self.device).contiguous()
                self._checked(partial(dist.broadcast, sent, src=first, group=self._group))
                shard.copy_(sent)

    def blame(self, what: str, trouble: str, error: BaseException) -> str:
        """The message of a collective that broke."""
        others = [rank for rank in self._layout.column if rank != self._layout.rank]
        trouble = trouble or f"The reason is not known; ranks {others} took part in it."
        return f"{what} over nodes broke on rank {self._layout.rank}. {trouble}\n{error}"

    def _begin(self, collective: Callable[[], Any], arrived: Tensor) -> Callable[[], Tensor]:
        """Begin a collective; returns what waits for its end and gives the tensor that it fills."""
        work = self._checked(collective)

        def wait() -> Tensor:
            self._checked(work.wait)
            return arrived

        return wait

    def _checked(self, collective: Callable[[], _Answer]) -> _Answer:
        """A collective whose failure says which rank is to blame, as far as that is known."""
        try:
            return collective()
        except RuntimeError as error:
            raise PeerFailedError(self.blame("A sum of gradients", self.trouble(), error)) from error


def in_turn(begins: Iterable[Callable[[], Callable[[], _Answer]]]) -> Iterator[_Answer]:
    """Begin one collective after the other; yields what each comes to, while the next one is under way."""
    ends: deque[Callable[[], _Answer]] = deque()
    for begin in begins:
        ends.append(begin())
        if len(ends) == _UNDER_WAY:
            yield ends.popleft()()
    for end in ends:
        yield end()


class SpanningProtocol(Protocol):
    """`Protocol` within a row, whose meetings span all nodes; see Note [Two levels]."""

    def __init__(
        self,
        *args: Any,
        layout: Layout,
        make_link: Callable[[], ReplicaLink],  # a fresh, unopened link to this rank's column
        group: ColumnGroup,  # of this rank's column, opened
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._layout = layout
        self._link = make_link()
        self._group = group
        self._totals: Iterator[Tensor] = iter(())
        self.peers.beyond = group.trouble = self._link.trouble

    def open(self) -> None:
        self._link.open()
        try:
            super().open()
        except BaseException:
            self._link.close()
            raise

    def close(self) -> None:
        self._totals = iter(())  # it holds views of the window
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
        records: list[Any] = [None] * self._layout.world_size
        for ranks, heard in zip(self._layout.columns, by_column, strict=True):
            for rank, theirs in zip(ranks, heard, strict=True):
                records[rank] = theirs
        return records  # [R0, R1, R2, R3]

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        items = super().end_version(kind, item)
        summed = (window for window in self.windows if window.spec.grad_numel)
        self._totals = in_turn(partial(self._sum_over_nodes, window) for window in summed)
        return items

    def total(self, unit: int) -> Tensor:
        if self._units[unit].grad_numel:
            return next(self._totals)
        return super().total(unit)

    def _sum_over_nodes(self, window: UnitWindow) -> Callable[[], Tensor]:
        """Begin to sum a unit's gradients over the column. On GPUs the host only asks, and does not wait."""
        sums = window.summed()
        name = window.spec.name
        what = f"waiting for the gradients of unit {name!r} from other nodes"
        self.traffic.bytes_reduced += sums.nbytes
        end = self._begin_total(sums)

        def wait() -> Tensor:
            self.peers.begin(Activity.NETWORK, window.index)
            with self.traced("sum_over_nodes", unit=name), self.waiter.during(Cause.NETWORK, lambda: what):
                total = end()
            self.peers.begin(Activity.COMPUTE, window.index)
            return total

        return wait

    @abstractmethod
    def _begin_total(self, sums: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over the column what a row has added up; returns what waits for this rank's part, 1-D."""


class SpanningEngine(OnDemandEngine):
    """`OnDemandEngine` over the ranks of several nodes."""

    def __init__(
        self,
        *args: Any,  # a transport between the ranks of this row, and a rendezvous of all
        layout: Layout,
        make_link: Callable[[], ReplicaLink],  # a fresh, unopened link to this rank's column
        group: ColumnGroup,  # of this rank's column, not yet opened
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._layout = layout
        self._group = group
        self._protocol_options |= {"layout": layout, "make_link": make_link, "group": group}

    @property
    def world_size(self) -> int:
        return self._layout.world_size

    def close(self) -> None:
        super().close()
        self._group.close()

    def _before_publishing(self) -> None:
        self._group.open()


class HybridProtocol(SpanningProtocol):
    """`SpanningProtocol` that sums gradients over replicas."""

    def _begin_total(self, sums: Tensor) -> Callable[[], Tensor]:
        return self._group.begin_sum(sums)  # from [1, 1] to [3, 3] on rank 0 of the example


class HybridEngine(SpanningEngine):
    """`SpanningEngine` of nodes with a replica of the model each."""

    protocol_class = HybridProtocol

    def refresh(self) -> None:
        self.reshard()
        checksum = sum(map(_checksum, self._shards()))
        by_rank = self.exchange("publish parameters", checksum)
        of_column = {by_rank[rank] for rank in self._layout.column}
        if len(of_column) > 1:
            warnings.warn(
                "Parameters differed between nodes, and now have the values of the node of rank 0 everywhere. Change "
                "parameters on all ranks of all nodes in the same way.",
                stacklevel=2,
            )
            self._group.level(self._shards())
        self.publish()

    def _before_publishing(self) -> None:
        super()._before_publishing()
        self._group.level(self._shards())

    def _shards(self) -> list[Tensor]:
        return [slot.local_shard for unit in self._units for slot in unit.slots]


def _checksum(shard: Tensor) -> int:
    """A number that (nearly always) differs if the bits of two shards do."""
    width = _WIDTHS[shard.element_size()]
    numbers = shard.contiguous().view(-1).view(width)
    return int(numbers.sum(dtype=torch.int64))
