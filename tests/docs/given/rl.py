"""The task of the lesson, under the names of the page."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from notebooks.support import strokes

prompts = [{"tokens": strokes.prompt(one), "problem": list(one)} for one in strokes.problems(8, seed=0)]
make_model = strokes.make_model


def reward(prompt, response):
    return strokes.reward(prompt["problem"], response)
