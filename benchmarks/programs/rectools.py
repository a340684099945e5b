"""RecTools: SASRec over the purchases of users, some of whom have many. It imports ``pytorch_lightning``.

It draws its weights in ``on_train_start``.
"""

from __future__ import annotations

import lightning_odc.pytorch_lightning  # noqa: F401  # isort: skip

import numpy as np
import pandas as pd
from rectools.dataset import Dataset
from rectools.models import SASRecModel

from benchmarks.programs.training import SAMPLES, Project


def project() -> Project:
    """The module and the loader that ``SASRecModel.fit`` would make."""
    random = np.random.default_rng(0)
    rows = []
    for user in range(SAMPLES):
        items = random.integers(0, 100, random.integers(3, 60))
        rows += [(user, item, 1.0, np.datetime64(i, "m")) for i, item in enumerate(items)]
    data = Dataset.construct(pd.DataFrame(rows, columns=["user_id", "item_id", "weight", "datetime"]))
    model = SASRecModel(n_factors=32, n_blocks=2, n_heads=2, dropout_rate=0.0, session_max_len=64)
    model._build_model_from_dataset(data)
    loader = model.data_preparator.get_dataloader_train()
    return Project(model.lightning_model, loader.dataset, loader.collate_fn, 0.1)
