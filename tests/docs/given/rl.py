"""The task of the lesson, under the names of the page."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_odc import balance
from lightning_odc.lessons import strokes

prompts = strokes.problems(8, seed=0)
make_model = strokes.make_model


def roll_out(model, some, seed):
    return [
        {**one, "tokens": one["prompt"] + one["answer"], "learnt_tokens": len(one["answer"])}
        for one in strokes.roll_out(model, some, group=2, seed=seed)
    ]


def summed_policy_loss(model, responses):
    return strokes.policy_loss(model, strokes.pack_rollouts(responses))[0]
