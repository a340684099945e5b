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
    """The ranks that share roll-outs.

    Attributes:
        rank: This rank.
        count: The number of ranks.
        device: The device of this rank.
        meets: Whether ranks wait for each other in every microbatch, so that all need equally many.
        engine: What they meet through; ``None`` in a process of its own.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU
    meets: bool = False
    engine: Engine | None = None

    @classmethod
    def of(cls, strategy: Any) -> Ranks:
        """The ranks of what `strategy_of` returns."""
        count = strategy.world_size
        meets = strategy.communication != "on_demand" and count > 1
        return cls(strategy.global_rank, count, strategy.root_device, meets, strategy.engine)

    def gather(self, kind: str, own: Tensor, note: Any = None) -> tuple[list[Tensor], list[Any]]:
        """What every rank has, in rank order. All ranks together.

        Ranks meet through the engine first, which finds out that another one has failed, and how much each has. Then
        one collective moves the bytes, which are too many for the engine's mailboxes.

        Args:
            kind: What they meet for, in words.
            own: ``[b]`` uint8 on the CPU; ``b`` may differ from rank to rank.
            note: Anything small that JSON can hold.

        Returns:
            The bytes of every rank on the CPU, and the notes.

        Raises:
            PeerFailedError: another rank raised or died on its way here.
        """
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
    """The strategy of a trainer, of its module, or of a ``Fabric``.

    Args:
        where: One of these.
        call: What the user wrote, for the message.

    Raises:
        TypeError: it is not a strategy of this package.
    """
    strategy = getattr(getattr(where, "trainer", where), "strategy", None)
    if not hasattr(type(strategy), "engine"):
        raise TypeError(
            f"{call} needs a module that is trained by this package's strategy, and got a {type(where).__name__} "
            f"with {type(strategy).__name__}. Write\n"
            '    import lightning_odc\n    trainer = Trainer(strategy="odc_plain", ...)'
        )
    return strategy
