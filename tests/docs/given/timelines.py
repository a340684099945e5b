"""The timelines of two short runs, recorded before."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_odc
from lightning_odc.callbacks import TimelineRecorder

for mode in ("collective", "on_demand"):
    strategy = lightning_odc.ODCStrategy(communication=mode, balance=None)
    recorder = TimelineRecorder(f"timelines/{mode}")
    Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, callbacks=[recorder], logger=False
    ).fit(BoringModel())
