"""A model of texts and images, whose tower does not run where a batch has no image."""

import torch
from torch import nn
from ways import WAYS, report, sharded, whole

HAS_IMAGES = [[True, True], [True, False], [False, True]]  # of each rank, by step


class TextAndImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8))
        self.text = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, text, images):
        if images is not None:
            text = text + self.tower(images)
        return self.text(text)


def main(way, ranks):
    torch.manual_seed(0)
    model = TextAndImages()
    model = sharded(way, model, model.tower, model.text)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAYS[way](model) as odc:
        for has_images in HAS_IMAGES:
            batches = [[torch.randn(4, 8), torch.randn(4, 16)] for _ in has_images]
            for rank in ranks:
                text, images = batches[rank]
                if not has_images[rank]:
                    images = None
                loss = model(text, images).square().mean(1).sum()
                with odc.backward(weight=len(text)):
                    loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
        return whole(model)


if __name__ == "__main__":
    report(main)
