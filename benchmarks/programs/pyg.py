"""PyTorch Geometric: GIN over graphs of different sizes, with its ``DataLoader``."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_mean_pool

from benchmarks.programs.training import SAMPLES, Project, predict_alone


class Graphs(pl.LightningModule):
    """One number of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GIN(4, 16, 3)
        self.head = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Mean over the nodes."""
        return self.head(global_mean_pool(self.network(batch.x, batch.edge_index), batch.batch))

    def training_step(self, batch: Batch) -> Tensor:
        """Mean over the graphs."""
        return (self(batch).flatten() - batch.y).square().mean()


def project() -> Project:
    """Graphs of 4 to 119 nodes."""
    samples = []
    for i in range(SAMPLES):
        nodes = 4 + i * 37 % 116
        edges = torch.randint(nodes, (2, 2 * nodes))
        samples.append(Data(torch.randn(nodes, 4), edges, y=torch.randn(1)))
    return Project(Graphs(), samples, loader=DataLoader, predict=predict_alone)
