"""Small models for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 7  # odd: shards are uneven and padded


class Block(nn.Module):
    """A residual block with a norm, of odd sizes so that every parameter is padded."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; optionally tied, partly frozen, with scalars, or with a block that some batches skip."""

    def __init__(
        self, depth: int = 3, vocab: int = 11, tied: bool = False, frozen: bool = False, scalars: bool = False
    ) -> None:
        super().__init__()
        if scalars:
            self.logit_scale = nn.Parameter(torch.tensor(0.5))
        else:
            self.logit_scale = None
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            for parameter in self.blocks[0].parameters():
                parameter.requires_grad_(False)
            self.blocks[1].up.weight.requires_grad_(False)
        if scalars:
            self.blocks[0].gain = nn.Parameter(torch.tensor(1.0), requires_grad=not frozen)
            self.blocks[0].register_forward_hook(lambda block, _, output: output * block.gain)

    def forward(self, tokens: Tensor, skip: Sequence[int] = ()) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        if self.logit_scale is None:
            return self.head(x)
        return self.head(x) * self.logit_scale.exp()


def token_batches(sizes: Sequence[int], seed: int = 0, vocab: int = 11) -> list[Tensor]:
    """One batch of random tokens per entry of ``sizes``: shape ``[1, size]``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (1, size), generator=generator) for size in sizes]


def summed_loss(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    """Next-token loss summed over tokens."""
    logits = model(tokens, **options)
    return nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, unsharded, on every rank."""
    from torch.distributed.tensor import DTensor

    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value
        if isinstance(value, DTensor):
            whole = value.full_tensor()
        full[name] = whole.clone()
    return full


def init_gloo(rank: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.get_rank() == rank
