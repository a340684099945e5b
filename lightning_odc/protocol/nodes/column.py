"""Ranks as rows, one per node, and columns; and what the ranks of a column send each other, by collectives.

The ranks of a node are a *row*, those with the same place in all rows a *column*: ``docs/memory-and-traffic.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc import _compat

_Answer = TypeVar("_Answer")
#: More collectives at once would not be faster, and each needs memory for what it receives.
_UNDER_WAY = 2


@dataclass(frozen=True)
class Layout:
    """The ranks of a job as rows, one per node, which share windows, and columns."""

    nodes: int
    on_node: int  # ranks of each
    rank: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.on_node

    @property
    def node(self) -> int:
        """Which row this rank is in, and its place in the column."""
        return self.rank // self.on_node

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its row, which speaks for it."""
        return self.rank % self.on_node == 0

    @property
    def column(self) -> list[int]:
        """The ranks with the same place on all nodes."""
        return list(range(self.rank % self.on_node, self.world_size, self.on_node))

    def row_of(self, node: int) -> list[int]:
        """The ranks of a node."""
        return list(range(node * self.on_node, (node + 1) * self.on_node))


class ColumnGroup:
    """The process group of this rank's column. All ranks of the column are there when a collective begins."""

    def __init__(self, layout: Layout, device: torch.device, stall: timedelta) -> None:
        self.device = device
        self._layout = layout
        self._stall = stall  # time without progress after which a collective gives up
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Make the group. All ranks of the job together."""
        columns = [replace(self._layout, rank=rank).column for rank in self._layout.row_of(0)]
        self._group, _ = dist.new_subgroups_by_enumeration(columns, timeout=self._stall)
        # NCCL connects in the first collective, which may take long: not in the thread that looks for news.
        self.begin_exchange(torch.zeros(self._layout.nodes, device=self.device))()

    def close(self) -> None:
        """Give the group back. Idempotent."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def begin_gather(self, own: Tensor, whole: Tensor) -> Any:
        """Begin to copy what every rank of the column has to all; returns the work. Both are 1-D."""
        # Every backend can move bytes.
        return _compat.all_gather(
            whole.view(torch.uint8), own.view(torch.uint8), group=self._group, async_op=True
        )

    def begin_exchange(self, sums: Tensor) -> Callable[[], Tensor]:
        """Begin to give every rank of the column its part; returns what waits for what this rank is given."""
        # Half of a reduce-scatter; the sum over what was heard is the other half. That of gloo is an all-reduce, which
        # sends twice the bytes. ``sums`` (1-D, a part per rank) must not change until the end; ``[nodes, part]`` comes.
        heard = torch.empty_like(sums)
        whole = heard.view(torch.uint8)
        work: Any = dist.all_to_all_single(whole, sums.view(torch.uint8), group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return heard.view(self._layout.nodes, -1)

        return wait


def in_turn(begins: Iterable[Callable[[], Callable[[], _Answer]]]) -> Iterator[_Answer]:
    """Begin one collective after the other; yields what each comes to, while the next one is under way."""
    ends: deque[Callable[[], _Answer]] = deque()
    for begin in begins:
        ends.append(begin())
        if len(ends) == _UNDER_WAY:
            yield ends.popleft()()
    for end in ends:
        yield end()
