"""A job of one rank, as ``torchrun`` starts it, and random minibatches."""

import os

import torch

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def minibatches(rank):
    for _ in range(2):
        yield [torch.randn(4, 8) for _ in range(3 if rank == 0 else 1)]
