"""Small series with a target each, speech, texts of which some have an image, and graphs."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy

series = [(torch.randn(2 + i % 13, 4), torch.randn(())) for i in range(32)]
speech = [{"audio": torch.randn(1600 * (1 + i % 9)), "labels": torch.arange(2 + i % 5)} for i in range(32)]
texts_and_images = [
    {"input_ids": torch.arange(3 + i % 11), "patches": torch.randn(6 if i % 3 == 0 else 0, 12)}
    for i in range(32)
]
graphs = [
    {"x": torch.randn(n, 4), "edges": torch.randint(n, (2, 3 * n)), "y": torch.randint(3, (n,))}
    for n in (3 + i % 9 for i in range(32))
]
