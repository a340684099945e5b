"""chemprop: a message-passing network over molecules of different sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from chemprop import data, models, nn

from benchmarks.programs.training import SAMPLES, Project, predict_alone


def molecules(tasks: int, missing: float) -> Any:
    """Chains of carbon with a few oxygens, and numbers to predict of which some are missing."""
    random = np.random.default_rng(0)
    points = []
    for _ in range(SAMPLES):
        length = int(random.integers(2, 40))
        atoms = random.choice(["C", "C", "O"], length)
        targets = random.normal(size=tasks)
        targets[random.random(tasks) < missing] = np.nan
        points.append(data.MoleculeDatapoint.from_smi("C" + "".join(atoms), targets))
    return data.MoleculeDataset(points)


def network(tasks: int) -> Any:
    """The usual network."""
    message_passing = nn.BondMessagePassing(d_h=64)
    predictor = nn.RegressionFFN(n_tasks=tasks, input_dim=64, hidden_dim=64)
    return models.MPNN(message_passing, nn.MeanAggregation(), predictor)


def project() -> Project:
    """One property, always known."""
    return Project(network(1), molecules(1, 0.0), data.collate_batch, predict=predict_alone)
