"""A layer to name."""

import torch


class TransformerLayer(torch.nn.Linear):
    pass
