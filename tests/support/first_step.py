"""What a process pays for once: importing this does the first optimizer step of sharded parameters, alone.

DTensor finds out how an operation shards when it meets it first, by shape: 0.2 s of a rank's first step, half of what
many ranks do at all. Processes that are forked from one that has imported this know it already.

A build of torch with an accelerator would ask its driver here, and then no forked process could use it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_odc._compat import WatchedMesh
from lightning_odc.sharding.wrapping import mesh_for
from tests.support.models import Net, full_parameters


class OfAnyRank(DeviceMesh):
    """Results of DTensor have the first of equal meshes. This one is that of every process that is forked, whose rank
    is not known yet."""

    @property
    def _coordinate_on_dim(self) -> tuple[int]:
        return (dist.get_rank(),)


class WatchedOfAnyRank(OfAnyRank, WatchedMesh):
    """The same of the package's meshes."""


def _step(mesh: DeviceMesh, lists: bool) -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    adamw = torch.optim.AdamW(net.parameters(), foreach=lists)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, foreach=lists)
    for optimizer in (adamw, sgd):
        for parameter in net.parameters():  # by hand: backward starts threads
            parameter.grad = torch.ones_like(parameter)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    full_parameters(net)


if torch.accelerator.current_accelerator() is None:
    torch.set_num_threads(1)  # threads do not survive a fork
    for world_size in (1, 2, 3):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        plain = init_device_mesh("cpu", (world_size,))
        plain.__class__ = OfAnyRank
        ours = mesh_for("cpu", world_size)
        ours.__class__ = WatchedOfAnyRank if isinstance(ours, WatchedMesh) else OfAnyRank
        for mesh in (plain, ours):
            _step(mesh, lists=False)
            _step(mesh, lists=True)
        dist.destroy_process_group()
