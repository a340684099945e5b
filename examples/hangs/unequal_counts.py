"""In every step, one rank has three microbatches, and the other has one."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

COUNTS = [3, 1]  # microbatches of each rank


def main(way, ranks):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    model = sharded(way, nn.Sequential(*blocks), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for _ in range(4):
            shares = [torch.randn(count, 4, 8) for count in COUNTS]
            for rank in ranks:
                for batch in shares[rank]:
                    loss = model(batch).square().mean(1).sum()
                    with odc.backward(weight=len(batch)):
                        loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
