"""Ranks validate unequal numbers of batches between steps."""

import torch
import torch.distributed as dist
from torch import nn
from ways import WAYS, report, sharded, whole

BATCHES = [3, 1]  # of each rank's validation data


def main(way, ranks):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    model = sharded(way, nn.Sequential(*blocks), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = torch.zeros(2)  # the validation loss after each step
    with WAYS[way](model) as odc:
        for step in range(2):
            training = torch.randn(2, 4, 8)
            validation = [torch.randn(count, 4, 8) for count in BATCHES]
            for rank in ranks:
                loss = model(training[rank]).square().mean(1).sum()
                with odc.backward(weight=4):
                    loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
            for rank in ranks:
                for batch in validation[rank]:
                    with torch.no_grad():
                        losses[step] += model(batch).square().mean() / sum(BATCHES)
        if way != "one":
            dist.all_reduce(losses)
        return {**whole(model), "losses": losses}


if __name__ == "__main__":
    report(main)
