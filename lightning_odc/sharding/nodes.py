"""How ranks are laid out over nodes, and the mesh over which a model is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_odc.engine.hybrid.layout import Layout

#: What is left of a way of sharding inside a node.
WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def layout_of(device_mesh: Any, num_nodes: int, world_size: int, rank: int) -> Layout:
    """The layout over several nodes.

    Args:
        device_mesh: The argument of the user: ``None``, ``(replicate, shard)``, or a 2-D ``DeviceMesh``.
        num_nodes: The nodes of the trainer: how many rows there are if the user did not say.
        world_size: The number of ranks.
        rank: The rank of this process.

    Raises:
        ValueError: the mesh does not have ``world_size`` ranks, each one once and in ascending order; or nodes do not
            have equally many.
    """
    if device_mesh is None and world_size % num_nodes:
        raise ValueError(
            f"{world_size} ranks on {num_nodes} nodes: every node needs as many ranks as the others. Start equally "
            'many on each, Trainer(devices=..., num_nodes=...), or use ODCStrategy(communication="collective").'
        )
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
