"""The copies of one rank's shards on other nodes: kept equal by collectives over a column, one per minibatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.hybrid.layout import Layout
from lightning_odc.errors import PeerFailedError

_Answer = TypeVar("_Answer")
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Replicas:
    """The process group of this rank's column.

    Args:
        layout: of all ranks.
        device: where gradients are.
        stall: time without progress after which a collective gives up; all ranks are there when one begins.
        trouble: tells which rank of the column is gone, if one is.
    """

    def __init__(
        self, layout: Layout, device: torch.device, stall: timedelta, trouble: Callable[[], str]
    ) -> None:
        self._layout = layout
        self._device = device
        self._stall = stall
        self._trouble = trouble
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

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over the column, in place; returns what waits for the end of it."""
        work = self._checked(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

        def wait() -> Tensor:
            assert work is not None
            self._checked(work.wait)
            return tensor

        return wait

    def level(self, shards: Mapping[str, Tensor]) -> None:
        """Give this rank's shards (by parameter name) the values that they have on the first node."""
        for shard in shards.values():
            if shard.numel():
                sent = shard.to(self._device).contiguous()
                self._checked(
                    lambda sent=sent: dist.broadcast(sent, src=self._layout.column[0], group=self._group)  # type: ignore[misc]
                )
                shard.copy_(sent)

    def level_where_different(
        self, shards: Mapping[str, Tensor], sums_by_rank: list[Mapping[str, int]]
    ) -> None:
        """`level` the shards whose `checksums` differ within the column, and say so.

        Args:
            shards: of this rank.
            sums_by_rank: the `checksums` of every rank of the job.
        """
        column = [sums_by_rank[rank] for rank in self._layout.column]
        different = {name: s for name, s in shards.items() if len({sums[name] for sums in column}) > 1}
        if different:
            warnings.warn(
                f"{', '.join(different)} differed between nodes, and now has the value of the node of rank 0 "
                "everywhere. Change parameters on all ranks of all nodes in the same way.",
                stacklevel=2,
            )
            self.level(different)

    def _checked(self, collective: Callable[[], _Answer]) -> _Answer:
        """A collective whose failure says which rank is to blame, as far as that is known."""
        try:
            return collective()
        except RuntimeError as error:
            others = [rank for rank in self._layout.column if rank != self._layout.rank]
            trouble = self._trouble() or f"The reason is not known; ranks {others} took part in it."
            raise PeerFailedError(
                f"A sum of gradients over nodes broke on rank {self._layout.rank}. {trouble}\n{error}"
            ) from error


def checksums(shards: Mapping[str, Tensor]) -> dict[str, int]:
    """By name, a number that differs if the bits of two shards do (nearly always)."""
    return {
        name: int(shard.contiguous().view(-1).view(_WIDTHS[shard.element_size()]).sum(dtype=torch.int64))
        for name, shard in shards.items()
    }
