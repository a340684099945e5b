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
from lightning_odc.engine.hybrid.spanning import Layout
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.transports.host import boot_id
from lightning_odc.errors import DisagreementError

Fact = TypeVar("Fact", bound=Hashable)

#: What is left of a way of sharding inside a node.
WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def layout_of(
    device_mesh: Sequence[int] | DeviceMesh | None, num_nodes: int, world_size: int, rank: int
) -> Layout:
    """The layout over several nodes."""
    if device_mesh is None and world_size % num_nodes:
        raise ValueError(
            f"{world_size} ranks on {num_nodes} nodes: every node needs as many ranks as the others. Start equally "
            'many on each, Trainer(devices=..., num_nodes=...), or use ODCStrategy(communication="collective").'
        )
    if isinstance(device_mesh, DeviceMesh):
        rows = [[int(member) for member in row] for row in device_mesh.mesh.tolist()]
    else:
        replicate, shard = device_mesh or (num_nodes, world_size // num_nodes)
        starts = range(0, replicate * shard, shard)
        rows = [list(range(start, start + shard)) for start in starts]
    members = sorted(member for row in rows for member in row)
    if members != list(range(world_size)):
        on_node = world_size // num_nodes
        raise ValueError(
            f"device_mesh={device_mesh!r} arranges {len(members)} ranks, but there are {world_size}: write "
            f"device_mesh=({num_nodes}, {on_node}), nodes times ranks per node, or leave it out."
        )
    columns = [list(column) for column in zip(*rows, strict=True)]
    if any(line != sorted(line) for line in rows + columns):
        raise ValueError(
            f"The ranks of device_mesh={device_mesh!r} must ascend along both of its dimensions."
        )
    return Layout(tuple(tuple(row) for row in rows), rank)


def check_rows(layout: Layout, replicates: bool, communication: str = "on_demand") -> None:
    """Refuse rows of one rank, which have nothing to read on demand."""
    count = len(layout.rows)
    if communication == "collective" or count == 1:
        return
    if len(layout.row) > 1:
        return
    if replicates:
        raise ValueError(
            f"Hybrid sharding over {count} x 1 ranks shards nothing: every rank holds the whole model, and "
            "there is nothing to read on demand. Use several ranks per node (Trainer(devices=...), or "
            'device_mesh=(nodes, ranks per node)), or Trainer(strategy="ddp").'
        )
    raise ValueError(
        f"{count} nodes of one rank have nothing to read on demand: ranks read from other ranks of their node, so each "
        "of these would hold a copy of the whole model and of its gradient. Use several ranks per node "
        '(`devices=2`), communication="collective", or strategy="ddp".'
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
    return DeviceMesh(device_type, torch.tensor(layout.rows), mesh_dim_names=("replicate", "shard"))


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
    divided = [row for row in layout.rows if len({hosts[rank] for rank in row}) > 1]
    if not divided:
        return
    by_host = list(_ranks_of(hosts).values())
    for ranks in by_host:
        name = names[ranks[0]]
        places.append(f"{name} has {_said(ranks)}")
    sizes = {len(ranks) for ranks in by_host}
    if len(sizes) > 1:
        advice = "Every node needs as many ranks as the others: start equally many on each"
    elif len(by_host) != len(layout.rows):
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
