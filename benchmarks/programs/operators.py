"""Lets torchvision be imported: that of PyPI cannot load its operators into a build of torch without CUDA.

Then its own import fails, and that of Lightning with it, for want of two operators. No program here calls them.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou) -> Tensor")
