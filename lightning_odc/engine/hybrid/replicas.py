"""The copies of one rank's shards on other nodes: kept equal by collectives over a column, one per minibatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.hybrid.column import ColumnGroup

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Replicas(ColumnGroup):
    """A column of which every rank holds the same shards."""

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
                sent = shard.to(self.device).contiguous()
                self._checked(
                    lambda sent=sent: dist.broadcast(sent, src=self._layout.column[0], group=self._group)  # type: ignore[misc]
                )
                shard.copy_(sent)

    def level_where_different(
        self, shards: Mapping[str, Tensor], sums_by_rank: list[Mapping[str, int]]
    ) -> None:
        """`level` the shards whose `checksums` differ within the column, and say so.

        Args:
            shards: Shards of this rank.
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


def checksums(shards: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for each shard, by name. If the bits of two shards differ, it (nearly always) differs, too."""
    return {
        name: int(shard.contiguous().view(-1).view(_WIDTHS[shard.element_size()]).sum(dtype=torch.int64))
        for name, shard in shards.items()
    }
