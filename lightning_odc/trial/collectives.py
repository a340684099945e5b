"""Whether code talks to other ranks."""

from __future__ import annotations

import sys
from typing import Any

from lightning_odc import _compat


class CollectiveListener(_compat.TorchDispatchMode):  # type: ignore[misc]
    """Notes whether code in this context calls a collective, beside those of the engine and of ``fully_shard``."""

    supports_higher_order_operators = True  # passes them on

    def __init__(self) -> None:
        super().__init__()
        self.heard = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.heard and func.namespace in ("c10d", "_c10d_functional"):
            frame: Any = sys._getframe(1)
            while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_MOVERS):
                frame = frame.f_back
            self.heard = frame is None
        return func(*args, **(kwargs or {}))


_MOVERS = ("torch.distributed.fsdp.", "torch.distributed.tensor.", "lightning_odc.engine.")
