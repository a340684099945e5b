"""An interactive session with a small model and random data."""

import sys

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.ps1 = ">>> "


class Model(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(width, width)), nn.Sequential(nn.Linear(width, width))
        )

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return loader


loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=2)
lengths = [[3, 1, 2], [4]]  # by rank


def batches_of(rank):
    for _ in range(2):
        yield [torch.randn(length, 8) for length in lengths[rank]]
