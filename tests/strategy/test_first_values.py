"""All ranks begin with the values of rank 0, as under DDP, whoever shards the model and wherever it was changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.fits import assert_same, fit
from tests.support.models import full_parameters
from tests.support.modules import TokenModule, loader, token_batches
from tests.support.ranks import on_ranks
from tests.support.tiers import fast


class Drawn(TokenModule):
    """Each rank draws its own weights, in a hook; with a buffer, a scalar and weights in float64."""

    shift: Tensor

    def __init__(self, hook: str) -> None:
        super().__init__(lr=0.0)
        self.register_buffer("shift", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.hook = hook

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            self.draw()

    def configure_model(self) -> None:
        if self.hook == "configure_model":
            self.draw()

    def draw(self) -> None:
        torch.manual_seed(self.global_rank)
        for value in self.state_dict().values():
            nn.init.normal_(value)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        unused = self.scale * self.shift.sum() + self.wide.sum()
        return super().training_step(batch, batch_idx) + 0 * unused


@on_ranks(2)
@pytest.mark.parametrize("hook", ["setup", "configure_model"])
@pytest.mark.parametrize("sharding_strategy", fast(["FULL_SHARD", "NO_SHARD"], "FULL_SHARD"))
def test_weights_and_buffers_are_those_of_rank_0(rank, hook, sharding_strategy):
    module = Drawn(hook)
    fit(module, loader(token_batches([5])), sharding_strategy=sharding_strategy)
    alone = Drawn("nowhere")
    torch.manual_seed(0)
    for value in alone.state_dict().values():
        nn.init.normal_(value)
    assert_same(full_parameters(module), full_parameters(alone), 0.0)
    assert torch.equal(module.shift, alone.shift)


class ShardsABlock(Drawn):
    """`configure_model` draws, and shards one block by hand: each rank has cut its own draw of it."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.wide = nn.Parameter(torch.ones(5))  # where users choose the units, torch wants one dtype in each

    def configure_model(self) -> None:
        self.draw()
        fully_shard(self.net.blocks[0])


@on_ranks(2)
def test_what_configure_model_leaves_whole_is_that_of_rank_0(rank):
    module = ShardsABlock()
    fit(module, loader(token_batches([5])))
    alone = ShardsABlock()
    torch.manual_seed(0)
    for value in alone.state_dict().values():
        nn.init.normal_(value)
    found = full_parameters(module)
    expected = full_parameters(alone)
    left_whole = [name for name in expected if not name.startswith("net.blocks.0.")]
    assert_same(
        {name: found[name] for name in left_whole}, {name: expected[name] for name in left_whole}, 0.0
    )
    assert torch.equal(module.shift, alone.shift)
