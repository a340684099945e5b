"""A model and a loader."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class MyModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


model = MyModel()
loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
