"""A data set of token lists, a stream of the same, and a small causal model that takes packed batches."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_odc import BalancedDataLoader
from lightning_odc.samples.packing import pack_samples


class Tokens(Dataset):
    lengths = tuple(3 + 5 * i % 37 for i in range(96))

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": torch.arange(self.lengths[index]) % 50}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 50))

    def mean_loss(self, batch):
        logits = self.layers(self.embedding(batch["input_ids"]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        return self.mean_loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([dataset[i] for i in range(len(dataset))])


dataset = Tokens()
collate = pack_samples
model = Model()
rank = 0
stream = Stream()
trainer = Trainer(strategy="odc", max_epochs=1)
