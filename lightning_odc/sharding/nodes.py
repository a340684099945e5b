"""How ranks are laid out over nodes, and the mesh over which a model is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_odc.protocol.nodes.column import Layout

#: What ways to shard over nodes are on demand. By collectives, ``fully_shard`` replicates the model as they say.
ON_DEMAND = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def layout_of(
    device_mesh: Sequence[int] | DeviceMesh | None,
    num_nodes: int,
    world_size: int,
    rank: int,
    on_demand: bool = True,
) -> Layout | None:
    """The layout over several nodes; ``None`` for one of them."""
    default = (num_nodes, world_size // num_nodes)
    nodes, on_node = default
    ranks = list(range(world_size))
    if isinstance(device_mesh, DeviceMesh):
        nodes, on_node = device_mesh.shape
        ranks = device_mesh.mesh.flatten().tolist()
    elif device_mesh is not None:
        nodes, on_node = device_mesh
    if nodes * on_node != world_size or ranks != sorted(ranks):
        raise ValueError(
            f"{world_size} ranks do not form {nodes} rows of {on_node} in ascending order, a row for each node. Start "
            f"equally many on each. As device_mesh, write (nodes, ranks per node), such as {default}, or leave it out. "
            'ODCStrategy(communication="collective") takes any number of ranks.'
        )
    if nodes == 1:
        return None
    if on_demand and on_node == 1:
        raise ValueError(
            f"{nodes} nodes of one rank have nothing to read on demand: ranks read from other ranks of their node, so "
            "each of these would hold a copy of the whole model and of its gradient. Use several ranks per node "
            '(`devices=2`), communication="collective", or strategy="ddp".'
        )
    return Layout(nodes, on_node, rank)


def check_groups(size: int, world_size: int, num_nodes: int) -> None:
    """Refuse tensor-parallel groups that the ranks cannot form."""
    if world_size % size:
        groups = max(world_size // size, 1)
        raise ValueError(
            f"tensor_parallel_size or context_parallel_size makes groups of {size}, and {world_size} ranks do not "
            f"divide into them. Write Trainer(devices={groups * size})."
        )
    if num_nodes > 1:
        raise ValueError(
            f"tensor_parallel_size and context_parallel_size work on one node, and there are {num_nodes}. Over several "
            "nodes, use Lightning's ModelParallelStrategy."
        )


def mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    """The 2-D mesh of a layout, with the dimensions ``replicate`` and ``shard``. All ranks together."""
    ranks = torch.arange(layout.world_size).view(layout.nodes, -1)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("replicate", "shard"))


def check_shards(model: nn.Module, mesh: DeviceMesh, groups: DeviceMesh | None = None) -> None:
    """Refuse a model that the user has sharded over other ranks, or that groups of ranks do not divide."""
    is_divided = False
    meshes: dict[DeviceMesh, str] = {}
    for name, parameter in model.named_parameters():
        meshes.setdefault(getattr(parameter, "device_mesh", mesh), name)
    for of_parameters, name in meshes.items():
        ranks = of_parameters.mesh
        if groups is not None and torch.equal(ranks, groups.mesh):
            is_divided = True
        elif not torch.equal(ranks, mesh.mesh):
            raise ValueError(
                f"{name!r} is sharded over the ranks {ranks.tolist()}, but this strategy shards "
                f"over {mesh.mesh.tolist()}. In `configure_model`, write `fully_shard(module, "
                "mesh=self.trainer.strategy.shard_mesh)`, or leave the sharding to the strategy."
            )
    if groups is not None and not is_divided:
        raise ValueError(
            f"tensor_parallel_size={groups.size(1)}: no layer is divided, so the ranks of a group would do the same "
            "work. In `configure_model`, or with Fabric before `fabric.setup`, write\n"
            '    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}\n'
            '    parallelize_module(block, mesh["tensor_parallel"], plan)\n'
            "where mesh is `self.device_mesh`, or `fabric.strategy.device_mesh`."
        )
