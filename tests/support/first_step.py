"""What a process pays for once: importing this does the first optimizer step of sharded parameters, alone.

DTensor finds out how an operation shards when it meets it first, by shape: 0.2 s of a rank's first step, half of what
many ranks do at all. Processes that are forked from one that has imported this know it already.

A build of torch with an accelerator would ask its driver here, and then no forked process could use it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Net, full_parameters


def _step(world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    adamw = torch.optim.AdamW(net.parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for optimizer in (adamw, sgd):
        for parameter in net.parameters():  # by hand: backward starts threads
            parameter.grad = torch.ones_like(parameter)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    full_parameters(net)
    dist.destroy_process_group()


if torch.accelerator.current_accelerator() is None:
    torch.set_num_threads(1)  # threads do not survive a fork
    for world_size in (1, 2, 3):
        _step(world_size)
