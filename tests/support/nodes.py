"""Several nodes on one host: rows of ranks that share no memory with each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.hybrid.copies import CopiesEngine
from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.hybrid.spanning import ColumnGroup
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.nodes import layout_of, mesh_of


def as_nodes(rank: int, ranks_per_node: int = 2) -> None:
    """Set the variables that ``torchrun`` sets where every node has so many ranks."""
    os.environ |= {"LOCAL_RANK": str(rank % ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    os.environ["GROUP_RANK"] = str(rank // ranks_per_node)


def make_copies_engine(rank: int, **options: Any) -> CopiesEngine:
    """The engine of four ranks on two nodes, which all ranks make together."""
    layout = layout_of((2, 2), 2, 4, rank)
    group = mesh_of(layout, "cpu")["shard"].get_group()
    everybody, row = process_group_rendezvous(dist.group.WORLD), process_group_rendezvous(group)
    return CopiesEngine(
        lambda: SharedMemoryTransport(layout.row.index(rank), 2, row, layout.row),
        everybody,
        layout=layout,
        make_link=lambda: ReplicaLink(rank, layout.column, everybody, "127.0.0.1", layout.main_row, 10.0),
        group=ColumnGroup(layout, torch.device("cpu"), timedelta(seconds=15)),
        timeout=30,
        **options,
    )
