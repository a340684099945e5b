"""The ranks that share roll-outs, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_odc.engine.base import Engine
from lightning_odc.engine.comm import all_gather

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

    def gather(self, kind: str, own: Tensor, note: Any = None) -> tuple[list[Tensor], list[Any]]:
        """What every rank has, ``[b]`` uint8 on the CPU, with its note, in rank order. All ranks together."""
        # Ranks meet through the engine first, which finds out that another one has failed, and how much each
        # has. Then one collective moves the bytes, which are too many for the engine's mailboxes.
        if self.engine is None:
            return [own], [note]
        told = self.engine.exchange(kind, [len(own), note])
        sizes, notes = [size for size, _ in told], [what for _, what in told]
        if self.count == 1 or not max(sizes):
            return [own] * self.count, notes
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own.to(self.device)
        whole = padded.new_empty(self.count * len(padded))
        all_gather(whole, padded)
        rows = whole.view(self.count, -1)
        # Each copy has memory of its own, so that its bytes can be read as numbers of 8 bytes.
        copies = [row[:size].to("cpu", copy=True) for row, size in zip(rows, sizes, strict=True)]
        return copies, notes


def strategy_of(where: Any, call: str) -> Any:
    """The strategy of a trainer, of its module, or of a ``Fabric``."""
    strategy = getattr(getattr(where, "trainer", where), "strategy", None)
    if not hasattr(type(strategy), "engine"):
        raise TypeError(
            f"{call} needs a module that is trained by this package's strategy, and got a {type(where).__name__} "
            f"with {type(strategy).__name__}. Write\n"
            '    import lightning_odc\n    trainer = Trainer(strategy="odc_plain", ...)'
        )
    return strategy
