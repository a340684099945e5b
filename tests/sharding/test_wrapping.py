"""Which modules become units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_odc.sharding.wrapping import (
    mesh_for,
    precision_policy,
    repeated_blocks,
    shard_model,
    with_dtype_units,
    wrap_targets,
)
from tests.support.fits import Watch, are_equal, fitted
from tests.support.models import Block, Net, full_parameters, init_gloo
from tests.support.ranks import on_ranks


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    by_module = {id(module): name for name, module in model.named_modules()}
    return sorted(by_module[id(module)] for module in modules)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))


def test_by_default_the_repeated_blocks():
    model: nn.Module = Net()
    assert names(model, wrap_targets(model)) == BLOCKS
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(Block(), Block()))
    assert names(model, repeated_blocks(model)) == ["2.0", "2.1"], "repeated leaves are none"
    model = nn.ModuleList(Experts() for _ in range(2))
    assert names(model, repeated_blocks(model)) == ["0", "1"], "the outermost repetition counts"
    layers = [nn.ModuleList([nn.ModuleList([nn.LayerNorm(7), None]), Block()]) for _ in range(2)]  # type: ignore[list-item]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    assert names(model, repeated_blocks(model)) == ["layers.0.1", "layers.1.1"]


class Mlp(nn.Module):
    """A network of plain layers, of which norms are too small to be read one by one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 8), nn.LayerNorm(8), nn.LeakyReLU(0.2), nn.Linear(8, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Gan(LightningModule):
    """Adversarial training with manual optimization, as in Lightning's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = Mlp(3, 5)
        self.discriminator = Mlp(5, 1)

    def loss(self, samples: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(samples)
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        noise = batch[:, :3]
        self.step(of_generator, lambda: self.loss(self.generator(noise), True))
        made = self.generator(noise).detach()
        self.step(of_discriminator, lambda: (self.loss(batch, True) + self.loss(made, False)) / 2)

    def step(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss())
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(network.parameters(), lr=0.01) for network in networks]


@on_ranks(2)
@pytest.mark.parametrize("options", [{"sharding_strategy": "auto"}, {"auto_wrap_policy": {nn.Linear}}])
def test_adversarial_networks_of_plain_layers_are_trained_as_under_ddp(rank, options):
    """Two ranks sum two fp32 gradients, and a sum of two numbers has no order: equal bit for bit."""
    batches = list(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(rank)))
    begin = full_parameters(Gan())
    watch = Watch()
    ours = fitted(Gan(), batches, callbacks=[watch], **options)
    assert are_equal(ours, fitted(Gan(), batches, strategy="ddp_find_unused_parameters_true"))
    for name, value in begin.items():
        assert (ours[name] - value).abs().max() > 1e-3
    assert watch.reads > 0


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


def test_a_policy_that_takes_everything_leaves_out_what_has_no_parameters_left():
    model = Net()
    holders = [name for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    assert names(model, wrap_targets(model, always_wrap_policy)) == sorted(holders)


def test_nested_targets_come_innermost_first():
    model = Net()
    targets = wrap_targets(model, ModuleWrapPolicy({Block, nn.LayerNorm}))
    assert len(names(model, targets)) == 6
    assert isinstance(targets[0], nn.LayerNorm)
    positions = {id(module): index for index, module in enumerate(targets)}
    for block in model.blocks:
        assert positions[id(block.norm)] < positions[id(block)]


def test_other_dtypes_become_units_of_their_own():
    model = Net()
    model.blocks[0].up.double()
    model.blocks[1].norm.to(torch.complex64)
    model.blocks[2].up.double().requires_grad_(False)
    model.head.double()
    found = names(model, with_dtype_units(model, wrap_targets(model)))
    assert found == sorted([*BLOCKS, "blocks.0.up", "blocks.1.norm", "head"])
    plain = Net()
    assert names(plain, with_dtype_units(plain, wrap_targets(plain))) == BLOCKS
    wide = Net().double()
    wide.blocks[0] = nn.Sequential(Block())  # of fp32 in fp64
    assert names(wide, with_dtype_units(wide, [])) == ["blocks.0.0.down", "blocks.0.0.norm", "blocks.0.0.up"]


def test_a_checkpointed_block_is_sharded_with_its_wrapper():
    model = Net()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    assert names(model, wrap_targets(model, ModuleWrapPolicy({Block}))) == BLOCKS
    assert type(model.blocks[1]).__name__ == "CheckpointWrapper"


def test_ties_across_units_are_refused():
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(
        ValueError, match=r"'blocks.0.up.weight' and 'blocks.1.up.weight' are one tied parameter"
    ):
        shard_model(model, None)  # type: ignore[arg-type]


@on_ranks(2)
def test_the_rest_is_the_root_unit_and_sharding_twice_changes_nothing(rank):
    init_gloo(rank)
    model = Net(tied=True)
    for _ in range(2):
        shard_model(model, mesh_for("cpu", 2))
        units = [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
        assert units == ["FSDPNet", *["FSDPBlock"] * 3]
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.to_local().shape == torch.Size([6 - rank, 7])


@on_ranks(2)
def test_dtensor_finds_out_of_an_operation_once_in_a_process(rank):
    init_gloo(rank)
    first = mesh_for("cpu", 2)
    again = mesh_for("cpu", 2)
    assert first == again
    assert hash(first) == hash(again)
    plain = init_device_mesh("cpu", (2,), mesh_dim_names=again.mesh_dim_names)
    assert plain != again, "a result would have a mesh that does not meet before collectives"
    calls = []
    first.before_collective[lambda: calls.append(rank)] = None
    total = distribute_tensor(torch.ones(4), again, [Shard(0)]).sum().full_tensor()
    first.before_collective.popitem()
    assert total == 4
    assert calls


def test_in_which_dtype_gradients_are_handed_over():
    """Collectives sum in the accumulators' dtype; on demand, gradients travel as they were computed."""
    for compute in (torch.float16, torch.bfloat16):
        for on_demand, reduce in ((True, compute), (False, torch.float64)):
            policy = precision_policy(compute, torch.float64, on_demand)
            assert policy.param_dtype == compute
            assert policy.reduce_dtype == reduce
    assert precision_policy(None, torch.float64, True).reduce_dtype is None
