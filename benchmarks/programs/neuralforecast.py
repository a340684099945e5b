"""NeuralForecast: NHITS by its own ``fit``, over series of different lengths. It imports ``pytorch_lightning``."""

from __future__ import annotations

import lightning_odc.pytorch_lightning  # noqa: F401  # isort: skip

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from benchmarks.programs.training import EACH, RANKS, START, STEPS, Run

SERIES = RANKS * EACH


def train(run: Run) -> None:
    """All series in each step."""
    random = np.random.default_rng(0)
    frames = []
    for series in range(SERIES):
        values = random.normal(size=random.integers(40, 160))
        days = pd.date_range("2026-01-01", periods=len(values))
        frames.append(pd.DataFrame({"unique_id": series, "ds": days, "y": values}))
    network = NHITS(
        h=6,
        input_size=12,
        max_steps=STEPS,
        batch_size=SERIES // run.devices,
        windows_batch_size=None,
        mlp_units=3 * [[32, 32]],
        optimizer=torch.optim.SGD,
        learning_rate=0.01,
        **run.trainer,
    )
    run.keep(network.state_dict(), START)
    forecast = NeuralForecast([network], "D")
    forecast.fit(pd.concat(frames))
    run.keep(forecast.models[0].state_dict())
    predicted = forecast.predict()["NHITS"]
    forecast.save(str(run.path("saved")), overwrite=True)
    run.keep_predicted(predicted.to_numpy())
