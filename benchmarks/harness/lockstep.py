"""The control experiment: on-demand communication that meets like collectives, at every unit.

It reads and adds like ``communication="on_demand"``, and all ranks meet before every read and after every addition. So
it splits a speed-up over collectives in two: cheaper bytes, and fewer waits. Nothing stays gathered from one microbatch
to the next, and gradients leave a rank in every microbatch. All ranks need equally many microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Segment
from lightning_odc.protocol.unit_window import UnitWindow
from lightning_odc.strategy.odc import ODCStrategy


class LockstepStrategy(ODCStrategy):
    """Trains with a meeting of all ranks at every unit.

    Args:
        **kwargs: Arguments of ``ODCStrategy``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, communication="on_demand", keep_gathered=0)

    def _make_engine(self, *args: Any) -> Any:
        attached = super()._make_engine(*args)
        if isinstance(attached.engine, OnDemandEngine):  # not with one rank
            attached.engine.make_protocol = LockstepProtocol
        return attached


class LockstepProtocol(Protocol):
    """The protocol with a meeting at every unit."""

    def open(self) -> None:
        super().open()
        for window in self.windows:
            self._meet_at(window)

    def _meet_at(self, window: UnitWindow) -> None:
        gather = window.gather
        accumulate = window.accumulate

        def meet_and_gather(out: Tensor, since: int = 0) -> None:
            self.meet("lockstep")
            gather(out, since)

        def accumulate_and_meet(chunks: Tensor, segments: Sequence[Segment]) -> None:
            accumulate(chunks, segments)
            self.meet("lockstep")

        window.gather = meet_and_gather  # type: ignore[method-assign]
        window.accumulate = accumulate_and_meet  # type: ignore[method-assign]
