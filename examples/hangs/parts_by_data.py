"""The data choose which expert of a unit runs, so ranks have gradients of different parameters."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

EXPERTS = [[0, 0], [0, 1], [2, 1]]  # of each rank, by step


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8 + n) for n in range(3))

    def forward(self, batch, expert):
        return self.experts[expert](batch)


def main(way, ranks):
    torch.manual_seed(0)
    model = sharded(way, Experts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for experts in EXPERTS:
            batches = torch.randn(2, 4, 8)
            for rank in ranks:
                loss = model(batches[rank], experts[rank]).square().mean(1).sum()
                with odc.backward(weight=4):
                    loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
