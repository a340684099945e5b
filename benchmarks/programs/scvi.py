"""scvi-tools: SCVI over counts of genes. Without noise, since ranks would draw other numbers than one process."""

from __future__ import annotations

import anndata
import numpy as np
from scvi.dataloaders import AnnDataLoader
from scvi.model import SCVI
from scvi.train import TrainingPlan
from torch.distributions import Normal

from benchmarks.programs.training import SAMPLES, Project


def project() -> Project:
    """A small SCVI whose layers normalize each sample by itself."""
    counts = np.random.default_rng(0).poisson(2.0, (SAMPLES, 50)).astype(np.float32)
    data = anndata.AnnData(counts)
    SCVI.setup_anndata(data)
    norms = {"use_batch_norm": "none", "use_layer_norm": "both"}
    model = SCVI(data, n_hidden=32, n_layers=2, dropout_rate=0.0, **norms)
    Normal.rsample = lambda self, *_: self.loc  # type: ignore[method-assign]
    rows = AnnDataLoader(model.adata_manager).dataset
    cells = [{name: value.reshape(-1) for name, value in rows[i].items()} for i in range(SAMPLES)]
    return Project(TrainingPlan(model.module), cells, rate=1e-3)
