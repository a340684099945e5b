"""How ranks are laid out over nodes: what users ask for, what the mesh is, which engine spans it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_odc.engine.hybrid.engine import HybridEngine
from lightning_odc.engine.hybrid.layout import Layout
from lightning_odc.engine.hybrid.replica_link import ReplicaLink
from lightning_odc.engine.hybrid.replicas import Replicas
from lightning_odc.engine.transports.base import Rendezvous, Transport

#: What is left of a way of sharding inside a node.
WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}

#: Seconds without any sign of another host, or without progress of a sum over nodes, before that is an error; at most
#: a quarter of ``timeout``, so that the message is not that of a wait for a rank that is slow.
SILENCE = 30.0
STALL = 60.0


def layout_of(device_mesh: Any, num_nodes: int, world_size: int, rank: int) -> Layout:
    """The layout under hybrid sharding.

    Args:
        device_mesh: what the user passed: ``None``, ``(replicate, shard)``, or a 2-D ``DeviceMesh``.
        num_nodes: of the trainer; how often the model is replicated if the user did not say.
        world_size: number of ranks.
        rank: of this process.

    Raises:
        ValueError: the mesh does not have ``world_size`` ranks, each one once and in ascending order.
    """
    if isinstance(device_mesh, DeviceMesh):
        rows = [[int(member) for member in row] for row in device_mesh.mesh.tolist()]
    else:
        replicate, shard = device_mesh or (num_nodes, world_size // num_nodes)
        rows = [list(range(start, start + shard)) for start in range(0, replicate * shard, shard)]
    members = sorted(member for row in rows for member in row)
    if members != list(range(world_size)):
        raise ValueError(
            f"device_mesh={device_mesh!r} arranges {len(members)} ranks, but there are {world_size}: write "
            f"device_mesh=({num_nodes}, {world_size // num_nodes}), nodes times ranks per node, or leave it out."
        )
    if any(line != sorted(line) for line in [*rows, *(list(column) for column in zip(*rows, strict=True))]):
        raise ValueError(
            f"The ranks of device_mesh={device_mesh!r} must ascend along both of its dimensions."
        )
    return Layout(tuple(tuple(row) for row in rows), rank)


def check_nodes(sharding_strategy: str, num_nodes: int, communication: str) -> None:
    """Refuse to read shards of another host.

    Raises:
        ValueError: on demand, sharded over several nodes.
    """
    if num_nodes > 1 and sharding_strategy not in WITHIN_NODE and communication != "collective":
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}) with sharding_strategy={sharding_strategy!r} would read shards of other "
            "hosts on demand, which this version cannot. Write "
            'ODCStrategy(sharding_strategy="HYBRID_SHARD"): on demand inside every node, one sum of gradients over '
            'nodes per minibatch. Or ODCStrategy(communication="collective").'
        )


def check_row(layout: Layout, communication: str) -> None:
    """Refuse rows of one rank, which have nothing to read on demand.

    Raises:
        ValueError: a row has one rank.
    """
    if len(layout.row) == 1 and len(layout.rows) > 1 and communication != "collective":
        raise ValueError(
            f"Hybrid sharding over {len(layout.rows)} x 1 ranks shards nothing: every rank holds the whole model, and "
            "there is nothing to read on demand. Use several ranks per node (Trainer(devices=...), or "
            'device_mesh=(nodes, ranks per node)), or Trainer(strategy="ddp").'
        )


def mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    """The 2-D mesh of a layout, with the dimensions ``replicate`` and ``shard``. All ranks together."""
    return DeviceMesh(device_type, torch.tensor(layout.rows), mesh_dim_names=("replicate", "shard"))


def check_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model that the user has sharded over other ranks.

    Raises:
        ValueError: naming the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not torch.equal(parameter.device_mesh.mesh, mesh.mesh):
            raise ValueError(
                f"{name!r} is sharded over the ranks {parameter.device_mesh.mesh.tolist()}, but this strategy shards "
                f"over {mesh.mesh.tolist()}. In `configure_model`, write `fully_shard(module, "
                "mesh=self.trainer.strategy.shard_mesh)`, or leave the sharding to the strategy."
            )


def make_hybrid_engine(
    make_transport: Callable[[], Transport],
    rendezvous: Rendezvous,
    layout: Layout,
    *,
    main_address: str,
    device: torch.device,
    timeout: timedelta,
    **options: Any,
) -> HybridEngine:
    """The engine of several nodes.

    Args:
        make_transport: between the ranks of this row.
        rendezvous: between all ranks.
        layout: of all ranks.
        main_address: of the host of rank 0.
        device: of the gradients.
        timeout: of any wait.
        **options: as in ``OnDemandEngine``.
    """
    seconds = timeout.total_seconds()
    silence, stall = min(SILENCE, seconds / 4), min(STALL, seconds / 4)
    links: list[ReplicaLink] = []

    def make_link() -> ReplicaLink:
        link = ReplicaLink(layout.rank, layout.column, rendezvous, main_address, layout.main_row, silence)
        links[:] = [link]
        return link

    def trouble() -> str:
        return next((link.trouble() for link in links), "")

    replicas = Replicas(layout, device, timedelta(seconds=stall), trouble)
    return HybridEngine(
        make_transport,
        rendezvous,
        layout=layout,
        make_link=make_link,
        replicas=replicas,
        timeout=seconds,
        **options,
    )


def check_mesh_argument(device_mesh: Any) -> None:
    """Refuse what is no 2-D mesh.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(device_mesh, DeviceMesh):
        is_right = device_mesh.ndim == 2
    else:
        is_right = (
            isinstance(device_mesh, Iterable)
            and len(sizes := list(device_mesh)) == 2
            and all(isinstance(size, int) and size > 0 for size in sizes)
        )
    if not is_right:
        raise ValueError(
            f"ODCStrategy(device_mesh={device_mesh!r}) is no mesh of nodes: write device_mesh=(nodes, ranks per node), "
            "or pass a 2-D DeviceMesh."
        )
