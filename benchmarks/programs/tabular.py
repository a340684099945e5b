"""PyTorch Tabular: FT-Transformer by its own ``fit``. It imports ``pytorch_lightning``."""

from __future__ import annotations

import lightning_odc.pytorch_lightning  # noqa: F401  # isort: skip

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import FTTransformerConfig

from benchmarks.programs.training import EACH, RANKS, STEPS, Run, SaveStart

ROWS = RANKS * EACH
NUMBERS = ["a", "b", "c"]


def train(run: Run) -> None:
    """All rows in each step."""
    random = np.random.default_rng(0)
    rows = pd.DataFrame(random.normal(size=(ROWS, 4)), columns=[*NUMBERS, "y"])
    rows["kind"] = random.choice(["x", "y", "z"], ROWS)
    sizes = {"input_embed_dim": 16, "num_heads": 2, "num_attn_blocks": 3}
    table = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=NUMBERS, categorical_cols=["kind"]),
        model_config=FTTransformerConfig(
            batch_norm_continuous_input=False,
            task="regression",
            attn_dropout=0.0,
            ff_dropout=0.0,
            add_norm_dropout=0.0,
            **sizes,
        ),
        optimizer_config=OptimizerConfig(optimizer="SGD"),
        trainer_config=TrainerConfig(
            batch_size=ROWS // run.devices,
            max_epochs=STEPS,
            accelerator="cpu",
            devices=run.devices,
            progress_bar="none",
            trainer_kwargs={"strategy": run.trainer["strategy"]},
        ),
    )
    table.fit(rows, rows, callbacks=[SaveStart(run)])
    run.keep(table.model.state_dict())
    predicted = table.predict(rows)["y_prediction"]
    table.save_model(str(run.path("saved")))
    run.keep_predicted(predicted.to_numpy())
