"""Several nodes on one host: rows of ranks that share no memory with each other."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_odc import _compat
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.nodes.column import ColumnGroup, Layout
from lightning_odc.protocol.nodes.copies import CopiesProtocol
from lightning_odc.protocol.nodes.leaders import Leaders
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.nodes import mesh_of


def as_nodes(rank: int, ranks_per_node: int = 2) -> None:
    """Set the variables that ``torchrun`` sets where every node has so many ranks."""
    os.environ |= {"LOCAL_RANK": str(rank % ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    os.environ["GROUP_RANK"] = str(rank // ranks_per_node)


def make_copies_engine(rank: int, **options: Any) -> OnDemandEngine:
    """The engine of four ranks on two nodes, which all ranks make together."""
    layout = Layout(2, 2, rank)
    group = mesh_of(layout, "cpu")["shard"].get_group()
    everybody = process_group_rendezvous(dist.group.WORLD)
    row = process_group_rendezvous(group)
    return OnDemandEngine(
        lambda: SharedMemoryTransport(rank % 2, 2, row, layout.row_of(layout.node)),
        everybody,
        make_protocol=partial(
            CopiesProtocol,
            layout=layout,
            column=ColumnGroup(layout, torch.device("cpu"), timedelta(seconds=15)),
            make_leaders=partial(Leaders, layout, everybody, _compat.default_store(), "127.0.0.1", 10.0),
        ),
        timeout=30,
        **options,
    )
