"""Two microbatches of different sizes."""

import torch

one_sample, three_samples = torch.randn(1, 8), torch.randn(3, 8)
