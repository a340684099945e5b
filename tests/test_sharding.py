"""Which modules become units."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from lightning_odc.sharding import mesh_for, precision_policy, repeated_blocks, shard_model, wrap_targets
from tests.models import Block, Net, init_gloo
from tests.ranks import run_ranks


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    by_module = {id(module): name for name, module in model.named_modules()}
    return sorted(by_module[id(module)] for module in modules)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_by_default_the_repeated_blocks():
    model = Net()
    assert names(model, wrap_targets(model)) == BLOCKS


def test_repeated_leaves_are_no_blocks():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(Block(), Block()))
    assert names(model, repeated_blocks(model)) == ["2.0", "2.1"]


def test_only_the_outermost_repetition_counts():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(2))

    model = nn.ModuleList(Layer() for _ in range(2))
    assert names(model, repeated_blocks(model)) == ["0", "1"]


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({Block}),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
        CustomPolicy(lambda module: isinstance(module, Block)),
        partial(size_based_auto_wrap_policy, min_num_params=300),
    ],
    ids=["classes", "transformer", "callable", "custom", "size"],
)
def test_policies_select_what_they_select_under_fsdp(policy):
    model = Net()
    assert names(model, wrap_targets(model, policy)) == BLOCKS


def test_nested_targets_come_innermost_first():
    model = Net()
    targets = wrap_targets(model, ModuleWrapPolicy({Block, nn.LayerNorm}))
    order = names(model, targets)
    assert len(order) == 6
    assert isinstance(targets[0], nn.LayerNorm)
    positions = {id(module): index for index, module in enumerate(targets)}
    for block in model.blocks:
        assert positions[id(block.norm)] < positions[id(block)]


def test_a_checkpointed_block_is_sharded_with_its_wrapper():
    model = Net()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    targets = wrap_targets(model, ModuleWrapPolicy({Block}))
    assert names(model, targets) == BLOCKS
    assert type(model.blocks[1]).__name__ == "CheckpointWrapper"


def test_ties_across_units_are_refused():
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(
        ValueError, match=r"'blocks.0.up.weight' and 'blocks.1.up.weight' are one tied parameter"
    ):
        shard_model(model, None)  # type: ignore[arg-type]


def _shard(rank: int) -> list[object]:
    init_gloo(rank)
    model = Net(tied=True)
    shard_model(model, mesh_for("cpu", 2))
    again = [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
    shard_model(model, mesh_for("cpu", 2))
    assert again == [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
    return [again, type(model.embed.weight).__name__, model.embed.weight.to_local().shape]


def test_the_rest_is_the_root_unit_and_sharding_twice_changes_nothing():
    first, second = run_ranks(_shard)
    assert first[0] == second[0] == ["FSDPNet", *["FSDPBlock"] * 3]
    assert (first[1:], second[1:]) == (["DTensor", torch.Size([6, 7])], ["DTensor", torch.Size([5, 7])])


@pytest.mark.parametrize(
    ("compute", "on_demand", "reduce"),
    [
        (torch.float16, True, None),
        (torch.bfloat16, True, None),
        (None, True, None),
        (torch.float16, False, torch.float64),
        (torch.bfloat16, False, torch.float64),
    ],
    ids=str,
)
def test_in_which_dtype_gradients_are_handed_over(compute, on_demand, reduce):
    policy = precision_policy(compute, torch.float64, on_demand)
    assert (policy.param_dtype, policy.reduce_dtype) == (compute, reduce)
