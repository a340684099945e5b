"""Two ranks of a notebook: on processors, on two GPUs, or on one."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_odc import _compat_lightning
from lightning_odc.bench.processes import place
from lightning_odc.engine.transports.preflight import OVERLAP_VARIABLE


def ranks_on(device: str, strategy: Any, ranks: int = 2) -> dict[str, Any]:
    """Arguments for a ``Trainer`` whose ranks train there: ``Trainer(**ranks_on("cpu", "odc"), max_steps=5)``.

    On processors it is what you would write: ``{"accelerator": "cpu", "devices": 2, "strategy": "odc"}``. With a GPU
    for each rank, ``"accelerator"`` is ``"gpu"``. Ranks that share a GPU are for trying things out. Lightning, torch
    and NCCL each refuse them by default, so the strategy gets its devices by itself, and gloo instead of NCCL.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        strategy: A strategy, or the name of one.
        ranks: The number of ranks.

    Raises:
        ValueError: There is no GPU that torch can use.
    """
    placement = place(device, ranks)
    if not placement.shares:
        return {"accelerator": placement.accelerator, "devices": ranks, "strategy": strategy}
    os.environ[OVERLAP_VARIABLE] = "1"  # ranks are forked from this process
    if isinstance(strategy, str):
        strategy = StrategyRegistry.get(strategy)
    strategy.parallel_devices = placement.devices
    _compat_lightning.set_process_group_backend(strategy, placement.backend)
    return {"accelerator": placement.accelerator, "strategy": strategy}
