"""Which rank is on which node."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.sharding.nodes import layout_of
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks


def test_a_layout_has_rows_and_columns():
    layout = layout_of((2, 3), num_nodes=1, world_size=6, rank=4)
    assert layout == Layout(2, 3, 4)
    assert layout.node == 1
    assert layout.row_of(1) == [3, 4, 5]
    assert layout.column == [1, 4]
    assert [Layout(2, 3, rank).leads for rank in range(6)] == [True, False, False, True, False, False]
    assert layout_of(None, num_nodes=3, world_size=6, rank=0) == Layout(3, 2, 0)


@on_ranks(2)
def test_a_device_mesh_says_which_ranks_form_a_node(rank):
    init_gloo(rank)
    mesh = init_device_mesh("cpu", (2, 1))
    assert layout_of(mesh, num_nodes=1, world_size=2, rank=rank, on_demand=False) == Layout(2, 1, rank)
    with pytest.raises(
        ValueError, match="2 ranks do not form 2 rows of 1 in ascending order, a row for each node"
    ):
        layout_of(DeviceMesh("cpu", [[1], [0]]), num_nodes=1, world_size=2, rank=rank)


def test_a_mesh_of_other_ranks_and_nodes_of_different_sizes_are_refused():
    says = r"6 ranks do not form 2 rows of 2 in ascending order.* such as \(2, 3\), or leave it out"
    with pytest.raises(ValueError, match=says):
        layout_of((2, 2), num_nodes=2, world_size=6, rank=0)
    with pytest.raises(ValueError, match=r"5 ranks do not form 2 rows of 2 .*\. Start equally many on each"):
        layout_of(None, num_nodes=2, world_size=5, rank=0)


def test_a_mesh_from_the_command_line():
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    arguments = ["--trainer.strategy=lightning_odc.ODCStrategy", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.strategy.sharding_strategy=HYBRID_SHARD", "--trainer.strategy.device_mesh=[2,2]"]
    command = LightningCLI(
        LightningModule, args=arguments, run=False, save_config_callback=None, seed_everything_default=False
    )
    strategy: Any = command.trainer.strategy
    assert strategy.sharding_strategy.name == "HYBRID_SHARD"
    assert layout_of(strategy.device_mesh, num_nodes=1, world_size=4, rank=3) == Layout(2, 2, 3)
