"""PyKEEN: DistMult, whose entities are normalized between forward and backward. It imports ``pytorch_lightning``."""

from __future__ import annotations

import lightning_odc.pytorch_lightning  # noqa: F401  # isort: skip

from pathlib import Path
from typing import Any

from pykeen.contrib.lightning import LCWALitModule
from pykeen.predict import predict_target

from benchmarks.programs.training import SAMPLES, Project


def predict(module: Any, _loader: Any, path: Path) -> Any:
    """Scores of all entities."""
    scores = predict_target(
        module.model, head="uk", relation="embassy", triples_factory=module.dataset.training
    )
    module.model.save_state(path)
    return scores.df["score"].to_numpy()


def project() -> Project:
    """Triples of the data set Nations, which comes with PyKEEN."""
    module = LCWALitModule("nations", model="DistMult", model_kwargs={"embedding_dim": 16})
    loader = module.train_dataloader()
    samples = [loader.dataset[i] for i in range(SAMPLES)]
    return Project(module, samples, loader.collate_fn, 0.1, predict=predict)
