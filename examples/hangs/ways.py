"""What the cases share: the same `main` in one process, under stock `fully_shard`, and with `attach`."""

import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning_odc import attach
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TIMEOUT = timedelta(
    seconds=3
)  # after this, a collective that waits raises an error


class Stock:
    """The verbs of `attach`, with the collectives of `fully_shard`."""

    def __init__(self, model):
        self.model = model
        self.total = torch.zeros(())  # of the weights of a step

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    @contextmanager
    def backward(self, weight):
        self.total += weight
        yield

    def step(self, optimizer):
        ranks = 1
        if dist.is_initialized():
            ranks = dist.get_world_size()
            dist.all_reduce(self.total)
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # a mean over ranks
                parameter.grad *= ranks / self.total
        self.total.zero_()
        optimizer.step()


WAYS = {"one": Stock, "stock": Stock, "odc": attach}


def sharded(way, model, *units):
    if way != "one":
        for unit in units:
            fully_shard(unit)
        fully_shard(model)
    return model


def whole(model):
    values = {}
    for name, value in model.named_parameters():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        values[name] = value.detach().clone()
    return values


def run(main, way):
    torch.set_default_dtype(torch.float64)
    expected = main("one", [0, 1])  # this process has the data of both ranks
    store, rank, ranks = next(dist.rendezvous("env://"))
    store.set(f"ready/{rank}", "")
    store.wait(
        [f"ready/{other}" for other in range(ranks)]
    )  # however long they take to start
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    found = main(way, [dist.get_rank()])
    dist.destroy_process_group()
    return found, expected


def largest_difference(found, expected):
    differences = [(found[name] - expected[name]).abs().max() for name in expected]
    return float(torch.stack(differences).max())


def report(main):
    difference = largest_difference(*run(main, sys.argv[1]))
    print(f"differs from one process by {difference:.0e}")
