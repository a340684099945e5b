"""Which rank is where: rows that shard among themselves, columns of ranks that hold the same shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Layout:
    """The ranks of a job as rows (one per node, which shard the model among themselves) and columns.

    Args:
        rows: the ranks of every row, equally many in each.
        rank: Rank of this process.
    """

    rows: tuple[tuple[int, ...], ...]
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
