"""The ranks that share prompts, roll-outs and scores, and how these travel between them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_odc.engine.base import Engine
from lightning_odc.engine.comm import all_gather

CPU = torch.device("cpu")
_PLAIN = (bool, int, float, str)  # a bool is an int, too


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
        """What every rank has, in rank order, with tensors on the CPU. All ranks together.

        Raises:
            TypeError: Something besides numbers, text, tensors, and lists, tuples and dictionaries of them.
        """
        data = _to_bytes(plain(own))
        if self.engine is None:
            return [_from_bytes(data)]
        # Ranks meet through the engine first, which finds out that another one has failed, and how much each
        # has. Then one collective moves the bytes, which are too many for the engine's mailboxes.
        sizes = self.engine.exchange(kind, len(data))
        if self.count == 1:
            return [_from_bytes(data)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data.to(self.device)
        rows = padded.new_empty(self.count, len(padded))
        all_gather(rows.view(-1), padded)
        return [_from_bytes(row[:size].cpu()) for row, size in zip(rows, sizes, strict=True)]


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


def plain(value: Any) -> Any:
    """The same in types that every rank reads without running code; tensors are copies on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # of a view only its own part
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)  # without a class of its own, such as numpy's
    if value is None:
        return None
    raise TypeError(
        f"`{type(value).__name__}` cannot be sent to other ranks. Use numbers, text, tensors, and lists and "
        'dictionaries of them, such as {"input_ids": [5, 7], "answer": 12}.'
    )


def _to_bytes(value: Any) -> Tensor:
    """``[b]`` uint8 on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
