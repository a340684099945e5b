"""Each rank samples a text of its own length, and trains on it."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

NEW_TOKENS = [2, 9]  # of each rank


def main(way, ranks):
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 32)]
    model = sharded(way, nn.Sequential(*layers), layers[0], layers[1], layers[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for step in range(2):
            for rank in ranks:
                text = torch.tensor([step, rank])
                for _ in range(NEW_TOKENS[rank]):
                    with torch.no_grad():
                        token = model(text)[-1:].argmax(1)
                    text = torch.cat([text, token])
                logits = model(text[:-1])
                loss = nn.functional.cross_entropy(
                    logits, text[1:], reduction="sum"
                )
                with odc.backward(weight=len(text) - 1):
                    loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
