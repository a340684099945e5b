"""How ranks are laid out over nodes, and the mesh over which a model is sharded."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_odc._version import __version__
from lightning_odc.engine.nodes.column import Layout
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.transports.host import boot_id
from lightning_odc.errors import DisagreementError

Fact = TypeVar("Fact", bound=Hashable)

#: What ways to shard over nodes are on demand. By collectives, ``fully_shard`` replicates the model as they say.
ON_DEMAND = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def layout_of(
    device_mesh: Sequence[int] | DeviceMesh | None, num_nodes: int, world_size: int, rank: int
) -> Layout:
    """The layout over several nodes."""
    if device_mesh is None and world_size % num_nodes:
        raise ValueError(
            f"{world_size} ranks on {num_nodes} nodes: every node needs as many ranks as the others. Start equally "
            'many on each, Trainer(devices=..., num_nodes=...), or use ODCStrategy(communication="collective").'
        )
    nodes = num_nodes
    on_node = world_size // num_nodes
    if isinstance(device_mesh, DeviceMesh):
        nodes, on_node = device_mesh.shape
        if device_mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise ValueError(
                f"device_mesh={device_mesh!r} must have all {world_size} ranks in ascending order: a row is a node."
            )
    elif device_mesh is not None:
        nodes, on_node = device_mesh
        if nodes * on_node != world_size:
            raise ValueError(
                f"device_mesh={device_mesh!r} arranges {nodes * on_node} ranks, but there are {world_size}: write "
                f"device_mesh=({num_nodes}, {world_size // num_nodes}), nodes times ranks per node, or leave it out."
            )
    return Layout(nodes, on_node, rank)


def check_rows(layout: Layout) -> None:
    """Refuse rows of one rank, which have nothing to read on demand."""
    if layout.nodes > 1 and layout.on_node == 1:
        raise ValueError(
            f"{layout.nodes} nodes of one rank have nothing to read on demand: ranks read from other ranks of their "
            "node, so each of these would hold a copy of the whole model and of its gradient. Use several ranks per "
            'node (`devices=2`), communication="collective", or strategy="ddp".'
        )


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


def mesh_for_modules(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh with the dimensions that modules for ``ModelParallelStrategy`` ask for. All ranks together."""
    # "data_parallel" is ``mesh``, or under hybrid sharding its last dimension; "tensor_parallel" is one rank.
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    groups = [*mesh.get_all_groups(), alone]
    ranks = mesh.mesh.unsqueeze(-1)
    names = ["data_parallel", "tensor_parallel"]
    if mesh.ndim == 2:
        names.insert(0, "replicate")
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=tuple(names))


def check_hosts(layout: Layout, rendezvous: Rendezvous) -> None:
    """Refuse nodes with different versions, and rows of ranks on several hosts. All ranks together."""
    facts = rendezvous([__version__, socket.gethostname(), boot_id()])
    versions, names, hosts = zip(*facts, strict=True)
    places: list[str] = []  # which ranks are where
    if len(set(versions)) > 1:
        where = list(zip(versions, names, strict=True))
        installed = _ranks_of(where)
        for (version, name), ranks in installed.items():
            places.append(f"{version} on {name} ({_said(ranks)})")
        raise DisagreementError(
            f"The nodes run different versions of lightning-odc: {'; '.join(places)}. Install the same one on all of "
            f"them, for example: pip install lightning-odc=={versions[0]}"
        )
    hosts_of = [{hosts[rank] for rank in layout.row_of(node)} for node in range(layout.nodes)]
    if all(len(of_node) == 1 for of_node in hosts_of):
        return
    by_host = list(_ranks_of(hosts).values())
    for ranks in by_host:
        name = names[ranks[0]]
        places.append(f"{name} has {_said(ranks)}")
    sizes = {len(ranks) for ranks in by_host}
    if len(sizes) > 1:
        advice = "Every node needs as many ranks as the others: start equally many on each"
    elif len(by_host) != layout.nodes:
        (on_host,) = sizes
        advice = f"Write Trainer(num_nodes={len(by_host)}, devices={on_host})"
    else:
        advice = "Ranks of a node need neighbouring numbers (SLURM: --distribution=block)"
    raise ValueError(
        f"Ranks of a node share memory, so they must be on one host; but {'; '.join(places)}. {advice}, or use "
        'ODCStrategy(communication="collective").'
    )


def _ranks_of(facts: Sequence[Fact]) -> dict[Fact, list[int]]:
    """Ranks by what is true of them."""
    ranks: dict[Fact, list[int]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(fact, []).append(rank)
    return ranks


def _said(ranks: Iterable[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"ranks {listed}"


def check_shards(model: nn.Module, mesh: DeviceMesh, groups: DeviceMesh | None = None) -> None:
    """Refuse a model that the user has sharded over other ranks, or that groups of ranks do not divide."""
    is_divided = False
    for name, parameter in model.named_parameters():
        of_parameter: DeviceMesh = getattr(parameter, "device_mesh", mesh)
        ranks = of_parameter.mesh
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
