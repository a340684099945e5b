"""The ranks that share prompts, roll-outs and scores, and how these travel between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc.engine.base import Engine

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The ranks that share roll-outs."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU
    # whether ranks wait for each other in every microbatch, so that all need equally many
    meets: bool = False
    engine: Engine | None = None  # what they meet through; ``None`` in a process of its own

    def gather(self, kind: str, own: Any) -> list[Any]:
        """What every rank has, in rank order, with tensors on the CPU. All ranks together."""
        own = apply_to_collection(own, Tensor, _on_cpu)
        items = [own] * self.count
        if self.engine is not None:
            # This finds out that another rank has failed. What follows may be too large for the engine's mailboxes.
            self.engine.exchange(kind, None)
        if self.count > 1:
            dist.all_gather_object(items, own)
        return items


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # of a view only its own part


def ranks_of(where: Any, call: str) -> tuple[Any, Ranks]:
    """The strategy of a trainer, of its module, or of a ``Fabric``, and its ranks."""
    trainer = getattr(where, "trainer", where)
    strategy: Any = getattr(trainer, "strategy", None)
    if not hasattr(type(strategy), "engine"):
        raise TypeError(
            f"{call} needs a module that is trained by this package's strategy, and got a {type(where).__name__} "
            f"with {type(strategy).__name__}. Write\n"
            '    import lightning_odc\n    trainer = Trainer(strategy="odc_plain", ...)'
        )
    if strategy.options.group_size > 1:
        raise NotImplementedError(
            f"{call} works on single ranks: leave out tensor_parallel_size and context_parallel_size."
        )
    meets = strategy.communication != "on_demand" and strategy.world_size > 1
    ranks = Ranks(strategy.global_rank, strategy.world_size, strategy.root_device, meets, strategy.engine)
    return strategy, ranks
