"""The timelines of three short runs, recorded before."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_odc
from lightning_odc.callbacks import TimelineRecorder

runs = {
    "collective": ("collective", None),
    "on_demand": ("on_demand", None),
    "balanced": ("on_demand", "steal"),
}
for name, (communication, balance) in runs.items():
    strategy = lightning_odc.ODCStrategy(
        sharding_strategy="FULL_SHARD", communication=communication, balance=balance
    )
    recorder = TimelineRecorder(f"timelines/{name}")
    Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, callbacks=[recorder], logger=False
    ).fit(BoringModel())
