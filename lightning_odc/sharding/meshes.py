"""Over which ranks a model is sharded that its user has sharded, and where this rank is among them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_odc.engine.values import ranks_of_job
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.sharding.engines import Place
from lightning_odc.sharding.nodes import layout_of


def meshes_of(model: nn.Module) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh over which a model is sharded, or an error that shows the line to write; and one with groups as rows."""
    meshes: dict[DeviceMesh, str] = {}  # each with the name of a parameter
    groups = set()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # ``fully_shard`` shards first what tensor parallelism has divided: that is the last dimension.
            if mesh.ndim == 2 and not parameter.placements[0].is_replicate():
                groups.add(mesh)
                dimensions = mesh.mesh_dim_names or ("",)
                mesh = mesh[dimensions[0]]
            meshes.setdefault(mesh, name)
    if len(meshes) > 1:
        first, second, *_ = meshes
        raise ValueError(
            f"{meshes[first]!r} is sharded over the mesh {first.mesh.tolist()}, {meshes[second]!r} over "
            f"{second.mesh.tolist()}. Pass the same `mesh=` to every `fully_shard`."
        )
    mesh = next(iter(meshes))
    of_groups = next(iter(groups), None)
    ranks = (of_groups or mesh).mesh
    if mesh.ndim > 1 or len(groups) > 1 or ranks.numel() != dist.get_world_size():
        raise ValueError(
            f"The model is sharded over the ranks {ranks.tolist()}, and there are {dist.get_world_size()}. For "
            "`attach`, shard it over all of them, `fully_shard(block)`: on several nodes, each then keeps a copy of "
            'what is published. With tensor parallelism, shard it over `mesh["data_parallel"]` of one mesh '
            '("data_parallel", "tensor_parallel").'
        )
    return mesh, of_groups


def place_on(
    device_type: str, mesh: DeviceMesh | None, sample_group: SampleGroup | None, communication: str
) -> Place:
    """Where this rank is, as ``torchrun`` and the mesh of a sharded model say it."""
    world_size = ranks_of_job()
    rank = 0
    if world_size > 1:  # else a whole model may train without a process group
        rank = dist.get_rank()
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, torch.cuda.current_device())
    place = Place(device, rank, world_size, on_node)
    if sample_group is not None:
        if on_node < world_size:
            raise ValueError(
                "`attach` takes tensor parallelism on one node only. Over several nodes, train with the collectives of "
                "`fully_shard`, without `attach`."
            )
        return replace(place, data_parallel=mesh, sample_group=sample_group)
    if on_node == world_size or communication == "collective":
        return place
    nodes = world_size // on_node
    layout = layout_of((nodes, on_node), nodes, world_size, rank)
    return replace(place, layout=layout)
