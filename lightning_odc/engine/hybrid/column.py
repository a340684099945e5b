"""Which rank is where, and collectives over the ranks that hold the same shards: a few per unit and minibatch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.comm import all_gather
from lightning_odc.errors import PeerFailedError

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")
#: More at once would not be faster, and each needs memory for what it receives.
_UNDER_WAY = 2


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
    def column(self) -> tuple[int, ...]:
        """The ranks that hold the same shards as this one."""
        place = self.row.index(self.rank)
        return tuple(row[place] for row in self.rows)

    @property
    def node(self) -> int:
        """Which row this rank is in, and its place in the column."""
        return self.rows.index(self.row)

    @property
    def columns(self) -> list[list[int]]:
        return [list(column) for column in zip(*self.rows, strict=True)]

    @property
    def main_row(self) -> tuple[int, ...]:
        """The ranks on the host of rank 0."""
        return next(row for row in self.rows if 0 in row)

    def by_rank(self, by_column: Sequence[Sequence[_Item]]) -> list[_Item]:
        """Items of every column, in rank order over the whole job."""
        found = {
            rank: item
            for column, items in zip(self.columns, by_column, strict=True)
            for rank, item in zip(column, items, strict=True)
        }
        return [found[rank] for rank in sorted(found)]


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
        wait: Callable[[], object] = all_gather(
            _as_bytes(whole), _as_bytes(own), group=self._group, async_op=True
        ).wait
        return wait

    def begin_exchange(self, sums: Tensor) -> Callable[[], Tensor]:
        """Begin to give every rank of the column its part; returns what waits for what this rank is given."""
        # Half of a reduce-scatter; the sum over what was heard is the other half. That of gloo is an all-reduce, which
        # sends twice the bytes. ``sums`` (1-D, a part per rank) must not change until the end; ``[nodes, part]`` comes.
        heard = torch.empty_like(sums)
        parts = _as_bytes(heard), _as_bytes(sums)
        return self._begin(
            lambda: dist.all_to_all_single(*parts, group=self._group, async_op=True),
            heard.view(len(self._layout.column), -1),
        )

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


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor in a dtype that every backend can move."""
    return tensor.view(torch.uint8)
