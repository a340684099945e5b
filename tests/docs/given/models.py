"""A small model with blocks; on lightning < 2.6 a stand-in for the callback that it does not have."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import fully_shard

from lightning_odc import ODCStrategy
from tests.support.models import Block, Net

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:
    from lightning.pytorch.callbacks import Timer

    def EMAWeightAveraging(decay):  # noqa: N802
        return Timer()
