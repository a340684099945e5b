"""Three short samples and a long one."""

import torch
from lightning.pytorch import Trainer

import lightning_odc

short, long = torch.randn(1, 8), torch.randn(8, 8)
