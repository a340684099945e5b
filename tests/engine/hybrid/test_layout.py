"""Which rank is on which node, and who is named by those that wait for another node."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_odc.engine.hybrid.spanning import ColumnGroup, HybridProtocol, Layout
from lightning_odc.errors import DisagreementError
from lightning_odc.sharding.nodes import layout_of
from notebooks.support.threads import ThreadHub
from tests.engine.test_protocol import UNITS
from tests.support.interleaving import together


class SilentLink:
    """The other node has not come yet."""

    open = close = begin = lambda *_: None
    trouble = missing = lambda *_: ""

    def complete(self) -> bool:
        return False


def test_a_neighbour_that_has_gone_on_is_named_by_those_that_wait_for_another_node():
    hub, layout = ThreadHub(2), Layout(((0, 1), (2, 3)), rank=2)
    replicas = ColumnGroup(layout, torch.device("cpu"), timedelta(seconds=20))
    parts: dict[str, Any] = {"layout": layout, "link": SilentLink(), "group": replicas, "timeout": 20}
    first, second = (HybridProtocol(hub.transport(rank), UNITS, **parts) for rank in range(2))
    together(first.open, second.open)
    first.transport.job_rank = lambda peer: layout.row[peer]  # type: ignore[method-assign]
    second.announce_end()
    with pytest.raises(DisagreementError, match=r"Rank 3 has ended a batch .* in which rank 2 waits for it"):
        first.meet("step")


def test_a_layout_has_rows_and_columns():
    layout = layout_of((2, 3), num_nodes=1, world_size=6, rank=4)
    assert layout == Layout(((0, 1, 2), (3, 4, 5)), 4)
    assert (layout.row, layout.column) == ((3, 4, 5), [1, 4])
    assert layout.columns == [[0, 3], [1, 4], [2, 5]]
    assert layout_of(None, num_nodes=3, world_size=6, rank=0).rows == ((0, 1), (2, 3), (4, 5))


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
    assert layout_of(strategy.device_mesh, num_nodes=1, world_size=4, rank=3).row == (2, 3)
