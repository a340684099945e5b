"""MatGL: energies of molecules of different sizes, as graphs of PyTorch Geometric."""

from __future__ import annotations

from typing import Any

import numpy as np
from ase import Atoms
from matgl.ext.ase import Atoms2Graph
from matgl.graph.data import MGLDataset, collate_fn_graph
from matgl.models import TensorNet
from matgl.utils.training import ModelLightningModule

from benchmarks.programs.training import SAMPLES, Project

ELEMENTS = ("H", "O")
REACH = 4.0


def molecules(forces: bool) -> Any:
    """Water and ice that no chemist knows."""
    random = np.random.default_rng(0)
    sizes = random.integers(3, 20, SAMPLES)
    atoms = [Atoms(random.choice([1, 8], size), random.uniform(0, 6, (size, 3))) for size in sizes]
    labels = {"energies": random.normal(size=SAMPLES).tolist()}
    if forces:
        labels["forces"] = [random.normal(size=(size, 3)).tolist() for size in sizes]
    converter = Atoms2Graph(ELEMENTS, REACH)
    return MGLDataset(structures=atoms, labels=labels, converter=converter, save_cache=False)


def network() -> Any:
    """A small network."""
    return TensorNet(ELEMENTS, units=16, nblocks=1, num_rbf=8, cutoff=REACH, is_intensive=False)


def project() -> Project:
    """Energies alone."""
    return Project(ModelLightningModule(network()), molecules(False), collate_fn_graph, 1e-3)
