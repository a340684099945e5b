"""The last minibatch of an epoch has fewer samples than there are ranks."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

SAMPLES = 5  # two minibatches of two samples, and one of a single sample


def main(way, ranks):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    model = sharded(way, nn.Sequential(*blocks), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for minibatch in torch.randn(SAMPLES, 8).split(2):
            for rank in ranks:
                for sample in minibatch[rank::2]:
                    loss = model(sample).square().mean()
                    with odc.backward(weight=1):
                        loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
