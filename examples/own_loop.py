"""The engine in a loop of your own, over a model that `fully_shard` has sharded."""

import torch
import torch.distributed as dist
from lightning_odc import attach
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
model = nn.Sequential(*blocks)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rank = dist.get_rank()
count = 3 if rank == 0 else 1  # microbatches of each step

with attach(model) as odc:
    for _ in range(10):
        for batch in torch.randn(count, 4, 8):
            loss = model(batch).square().mean(1).sum()
            with odc.backward(weight=len(batch)):
                loss.backward()
        odc.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    print(f"rank {rank}: 10 steps of {count}")
dist.destroy_process_group()
