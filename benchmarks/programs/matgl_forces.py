"""MatGL: energies and forces, which are derivatives of energies. Its loss adds means over samples and over atoms."""

from __future__ import annotations

from functools import partial

from matgl.graph.data import collate_fn_pes
from matgl.utils.training import PotentialLightningModule

from benchmarks.programs.matgl import molecules, network
from benchmarks.programs.training import Project


def project() -> Project:
    """Without stresses, which molecules do not have."""
    collate = partial(collate_fn_pes, include_stress=False)
    return Project(PotentialLightningModule(network()), molecules(True), collate, 1e-3)
