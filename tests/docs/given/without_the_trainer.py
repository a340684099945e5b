"""A job of one rank, if ``torchrun`` has not started it, and a sharded model."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_odc import attach

one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
for name, value in one.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
