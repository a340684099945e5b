"""Progress bars of what may take long before training."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]


def progress(items: Collection[Any], what: str, unit: str) -> Any:
    """A bar over some items, to iterate over or to update.

    It shows after two seconds, on rank 0, and goes at the end.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        return tqdm(items, disable=True)
    return tqdm(items, desc=what, unit=unit, delay=2, leave=False)
