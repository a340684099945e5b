"""How ranks are laid out over nodes, and the mesh over which a model is sharded."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from lightning_odc._version import __version__
from lightning_odc.engine.hybrid.spanning import Layout
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.transports.host import boot_id
from lightning_odc.errors import DisagreementError

#: What is left of a way of sharding inside a node.
WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def layout_of(device_mesh: Any, num_nodes: int, world_size: int, rank: int) -> Layout:
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


def check_rows(layout: Layout, replicates: bool, communication: str = "on_demand") -> None:
    """Refuse rows of one rank, which have nothing to read on demand."""
    if len(layout.row) > 1 or len(layout.rows) == 1 or communication == "collective":
        return
    count = len(layout.rows)
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
        raise ValueError(
            f"tensor_parallel_size or context_parallel_size makes groups of {size}, and {world_size} ranks do not "
            f"divide into them. Write Trainer(devices={max(world_size // size, 1) * size})."
        )
    if num_nodes > 1:
        raise ValueError(
            f"tensor_parallel_size and context_parallel_size work on one node, and there are {num_nodes}. Over several "
            "nodes, use Lightning's ModelParallelStrategy."
        )


def mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    """The 2-D mesh of a layout, with the dimensions ``replicate`` and ``shard``. All ranks together."""
    return DeviceMesh(device_type, torch.tensor(layout.rows), mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def gloo_checked(strategy: Any) -> Iterator[None]:
    """Make the process group in this context: before, all nodes tell whether others can reach gloo there."""
    is_gloo = strategy.root_device.type == "cpu" or "gloo" in (strategy.process_group_backend or "")
    if strategy.num_nodes == 1 or not is_gloo or dist.is_initialized():
        yield
        return
    environment = strategy.cluster_environment
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    node, local = strategy.node_rank, strategy.local_rank
    rank, count = node * strategy.num_processes + local, strategy.world_size
    store, _, _ = next(rendezvous("env://", rank, count, timeout=strategy.timeout))
    # gloo takes the address that the name of the host has. If that is the loopback interface, other hosts do not get
    # through: one end waits for the whole timeout, and the other fails without the reason.
    is_lost = "GLOO_SOCKET_IFNAME" not in os.environ and _is_on_loopback(socket.gethostname())
    store.set(f"odc/host/{node}", json.dumps([socket.gethostname(), boot_id(), is_lost]))
    hosts = [json.loads(store.get(f"odc/host/{one}")) for one in range(strategy.num_nodes)]
    lost = sorted({name for name, _, is_lost in hosts if is_lost})
    if lost and len({(name, boot) for name, boot, _ in hosts}) > 1:
        if store.add("odc/told", 1) == count:
            store.set("odc/all told", "")
        if rank == 0:  # whose end is that of the store
            store.wait(["odc/all told"])
        raise ValueError(
            f"The name of {', '.join(lost)} is that of the loopback interface, or of none, so the other nodes cannot "
            "reach gloo there. On every node, name the interface that the nodes see each other by (`ip -brief address` "
            "lists them):\n    export GLOO_SOCKET_IFNAME=eth0"
        )
    yield  # the process group takes the same store: rank 0 must not have closed it


def _is_on_loopback(name: str) -> bool:
    """Whether gloo takes the loopback interface for a name: the first of its addresses that is here, or else that."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return ipaddress.ip_address(address[0]).is_loopback
    return True


def mesh_for_modules(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh with the dimensions that modules for ``ModelParallelStrategy`` ask for. All ranks together."""
    # "data_parallel" is ``mesh``, or under hybrid sharding its last dimension; "tensor_parallel" is one rank.
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return DeviceMesh.from_group(
        [*mesh.get_all_groups(), alone],
        mesh.device_type,
        mesh.mesh.unsqueeze(-1),
        mesh_dim_names=(*("replicate",) * (mesh.ndim - 1), "data_parallel", "tensor_parallel"),
    )


def check_hosts(layout: Layout, rendezvous: Rendezvous) -> None:
    """Refuse nodes with different versions, and rows of ranks on several hosts. All ranks together."""
    versions, names, hosts = zip(*rendezvous([__version__, socket.gethostname(), boot_id()]), strict=True)
    if len(set(versions)) > 1:
        ranks_of = _ranks_of(list(zip(versions, names, strict=True)))
        where = "; ".join(
            f"{version} on {name} ({_said(ranks)})" for (version, name), ranks in ranks_of.items()
        )
        raise DisagreementError(
            f"The nodes run different versions of lightning-odc: {where}. Install the same one on all of them, for "
            f"example: pip install lightning-odc=={versions[0]}"
        )
    if all(len({hosts[rank] for rank in row}) == 1 for row in layout.rows):
        return
    by_host = list(_ranks_of(hosts).values())
    where = "; ".join(f"{names[ranks[0]]} has {_said(ranks)}" for ranks in by_host)
    if len({len(ranks) for ranks in by_host}) > 1:
        advice = "Every node needs as many ranks as the others: start equally many on each"
    elif len(by_host) != len(layout.rows):
        advice = f"Write Trainer(num_nodes={len(by_host)}, devices={len(by_host[0])})"
    else:
        advice = "Ranks of a node need neighbouring numbers (SLURM: --distribution=block)"
    raise ValueError(
        f"Ranks of a node share memory, so they must be on one host; but {where}. {advice}, or use "
        'ODCStrategy(communication="collective").'
    )


def _ranks_of(facts: Sequence[Any]) -> dict[Any, list[int]]:
    """Ranks by what is true of them."""
    return {one: [rank for rank, fact in enumerate(facts) if fact == one] for one in dict.fromkeys(facts)}


def _said(ranks: Iterable[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def check_shards(model: nn.Module, mesh: DeviceMesh, groups: DeviceMesh | None = None) -> None:
    """Refuse a model that the user has sharded over other ranks, or that groups of ranks do not divide."""
    is_divided = False
    for name, parameter in model.named_parameters():
        own: DeviceMesh = getattr(parameter, "device_mesh", mesh)
        if groups is not None and torch.equal(own.mesh, groups.mesh):
            is_divided = True
        elif not torch.equal(own.mesh, mesh.mesh):
            raise ValueError(
                f"{name!r} is sharded over the ranks {own.mesh.tolist()}, but this strategy shards "
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
