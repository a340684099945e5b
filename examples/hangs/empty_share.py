"""A filter leaves one rank without a sample in some steps."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

KEPT = [[4, 4], [3, 0], [0, 5]]  # samples of each rank after the filter, by step


def main(way, ranks):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    model = sharded(way, nn.Sequential(*blocks), *blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for kept in KEPT:
            shares = [torch.randn(count, 8) for count in kept]
            for rank in ranks:
                if len(shares[rank]):
                    loss = model(shares[rank]).square().mean(1).sum()
                    with odc.backward(weight=len(shares[rank])):
                        loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
