"""Which rank is on which node, and what is refused in the way that ranks are started on nodes."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_odc.engine.nodes.column import Layout
from lightning_odc.errors import DisagreementError
from lightning_odc.sharding import nodes
from lightning_odc.sharding.nodes import check_hosts, layout_of
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks

NAMES = {"a": "alpha", "b": "beta", "c": "gamma", "d": "delta"}


def check_rows(nodes: int, hosts: str) -> None:
    layout = Layout(nodes, len(hosts) // nodes, 0)
    check_hosts(layout, lambda own: [[own[0], NAMES[host], host] for host in hosts])


def test_rows_on_one_host_each_are_fine():
    check_rows(2, "aabb")
    check_rows(2, "aaaa")  # two nodes on one big machine
    check_rows(3, "aabbcc")


@pytest.mark.parametrize(
    ("nodes", "hosts", "said"),
    [
        (
            2,
            "aaaabb",
            "alpha has ranks 0, 1, 2, 3; beta has ranks 4, 5. Every node needs as many",
        ),
        (
            2,
            "abab",
            "alpha has ranks 0, 2; beta has ranks 1, 3. Ranks of a node need neighbouring numbers",
        ),
        (2, "abcd", r"delta has ranks 3. Write Trainer\(num_nodes=4, devices=1\)"),
    ],
)
def test_rows_on_several_hosts_are_refused_with_what_to_write(nodes, hosts, said):
    with pytest.raises(ValueError, match=f'{said}.*communication="collective"'):
        check_rows(nodes, hosts)


def test_every_rank_tells_its_version_and_its_host(monkeypatch):
    layout = Layout(2, 2, 0)
    check_hosts(layout, lambda own: [own] * 4)
    found = zip(["1.0", "1.0", "1.0", "1.1"], ["alpha", "alpha", "beta", "beta"], "aabb", strict=True)
    with pytest.raises(DisagreementError) as caught:
        check_hosts(layout, lambda own: [*found])
    assert "1.0 on alpha (ranks 0, 1); 1.0 on beta (ranks 2); 1.1 on beta (ranks 3)" in str(caught.value)
    assert "pip install lightning-odc==1.0" in str(caught.value)
    says = r"versions of lightning-odc: .* 0\.0\.1 on beta \(ranks 2, 3\)"
    with pytest.raises(DisagreementError, match=says):
        check_hosts(layout, lambda own: [own, own, *[["0.0.1", "beta", "there"]] * 2])
    monkeypatch.setattr(nodes, "boot_id", lambda: "here")
    with pytest.raises(ValueError, match="neighbouring numbers"):
        check_hosts(layout, lambda own: [own, [own[0], "beta", "there"]] * 2)


def test_a_layout_has_rows_and_columns():
    layout = layout_of((2, 3), num_nodes=1, world_size=6, rank=4)
    assert layout == Layout(2, 3, 4)
    assert layout.node == 1
    assert layout.row_of(1) == [3, 4, 5]
    assert layout.column == [1, 4]
    found = [Layout(2, 3, rank).leads for rank in range(6)]
    assert found == [True, False, False, True, False, False]
    found = layout_of(None, num_nodes=3, world_size=6, rank=0)
    assert found == Layout(3, 2, 0)


@on_ranks(2)
def test_a_device_mesh_says_which_ranks_form_a_node(rank):
    init_gloo(rank)
    mesh = init_device_mesh("cpu", (2, 1))
    found = layout_of(mesh, num_nodes=1, world_size=2, rank=rank)
    assert found == Layout(2, 1, rank)
    with pytest.raises(ValueError, match="must have all 2 ranks in ascending order: a row is a node"):
        layout_of(DeviceMesh("cpu", [[1], [0]]), num_nodes=1, world_size=2, rank=rank)


def test_a_mesh_of_other_ranks_and_nodes_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"arranges 4 ranks, but there are 6: write\s+device_mesh=\(2, 3\)"):
        layout_of((2, 2), num_nodes=2, world_size=6, rank=0)
    with pytest.raises(ValueError, match=r"5 ranks on 2 nodes: every node needs as many ranks as the others"):
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
    found = layout_of(strategy.device_mesh, num_nodes=1, world_size=4, rank=3)
    assert found == Layout(2, 2, 3)
