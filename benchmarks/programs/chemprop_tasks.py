"""chemprop: several properties of which many are missing. Its loss counts the finite ones."""

from __future__ import annotations

from chemprop import data

from benchmarks.programs.chemprop import molecules, network
from benchmarks.programs.training import Project, predict_alone


def project() -> Project:
    """Three properties, 40 % missing."""
    return Project(network(3), molecules(3, 0.4), data.collate_batch, predict=predict_alone)
