"""lightly: DINO, whose teacher is an average of the weights that ``training_step`` updates."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn

from benchmarks.programs.training import SAMPLES, Project, predict_alone


class DINO(pl.LightningModule):
    """As in the examples of lightly, with a small backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.GELU(), nn.Linear(16, 16))
        self.student_head = DINOProjectionHead(16, 32, 16, 32, freeze_last_layer=0)
        self.teacher_backbone = deepcopy(self.student_backbone)
        self.teacher_head = DINOProjectionHead(16, 32, 16, 32)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(32)

    def forward(self, views: list[Tensor]) -> Tensor:
        """The student's features."""
        return self.student_backbone(views[0])

    def training_step(self, views: list[Tensor], index: int) -> Any:
        """The average first."""
        update_momentum(self.student_backbone, self.teacher_backbone, 0.9)
        update_momentum(self.student_head, self.teacher_head, 0.9)
        teacher = [self.teacher_head(self.teacher_backbone(view)) for view in views]
        student = [self.student_head(self.student_backbone(view)) for view in views]
        return self.criterion(teacher, student, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        """As in the examples."""
        self.student_head.cancel_last_layer_gradients(self.current_epoch)


def project() -> Project:
    """Two views of each image."""
    views = [list(sample) for sample in torch.randn(SAMPLES, 2, 3, 16, 16)]
    return Project(DINO(), views, rate=0.1, predict=predict_alone)
