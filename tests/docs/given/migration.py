"""A model with a layer to name, and a loader."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_odc.callbacks import DeviceIdleMonitor


class TransformerLayer(torch.nn.Linear):
    pass


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(TransformerLayer(8, 8), TransformerLayer(8, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


make_model = Model
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
