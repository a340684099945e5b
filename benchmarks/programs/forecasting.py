"""PyTorch Forecasting: a Temporal Fusion Transformer on series of different lengths."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pytorch_forecasting import EncoderNormalizer, TemporalFusionTransformer, TimeSeriesDataSet

from benchmarks.programs.training import SAMPLES, Project


def project() -> Project:
    """One sample of each series."""
    random = np.random.default_rng(0)
    frames = []
    for series in range(SAMPLES):
        values = random.normal(size=random.integers(8, 40)).cumsum()
        frames.append(pd.DataFrame({"series": str(series), "time": range(len(values)), "value": values}))
    data = TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        "time",
        "value",
        ["series"],
        max_encoder_length=36,
        min_encoder_length=4,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        target_normalizer=EncoderNormalizer(),
        predict_mode=True,
    )
    module = TemporalFusionTransformer.from_dataset(data, hidden_size=16, dropout=0.0)
    return Project(module, data, data.to_dataloader().collate_fn)
