"""A Lightning callback that records what each rank does, minibatch by minibatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_odc import ODCStrategy
from lightning_odc.callbacks.idle.sources import MeetingTracer
from lightning_odc.callbacks.idle.summary import waits_in_meetings
from lightning_odc.demo.model import ByteModel
from lightning_odc.demo.result import RankRecord

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class Recorder(Callback):
    """Times every minibatch from start to start and collects loss and waiting, then gathers all ranks' records.

    Args:
        on_minibatch: called on every rank after each minibatch with that rank's mean loss.

    Attributes:
        ranks: after the fit, the record of every rank, in rank order, on every rank.
        interrupted: the fit was ended by Ctrl-C (Lightning turns that into ``SystemExit``).
    """

    def __init__(self, on_minibatch: Callable[[float], None]) -> None:
        self.on_minibatch = on_minibatch
        self.record = RankRecord([], [], [], [])
        self.ranks: list[RankRecord] = []
        self.interrupted = False
        self._started: float | None = None
        self._ended = 0.0
        self._waits: dict[str, float] = {}
        self._collectives = MeetingTracer()

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        assert isinstance(trainer.strategy, ODCStrategy)
        if trainer.strategy.communication == "collective" and trainer.world_size > 1:
            trainer.strategy.engine.listen(self._collectives)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._close_span(trainer, time.monotonic())
        self._started = time.monotonic()

    def on_train_batch_end(self, _: Trainer, pl_module: LightningModule, *__: Any) -> None:
        assert isinstance(pl_module, ByteModel)
        loss_sum, tokens = pl_module.take_loss()
        self.record.loss_sums.append(loss_sum)
        self.record.tokens.append(tokens)
        self.on_minibatch(loss_sum / max(tokens, 1))
        self._ended = time.monotonic()

    def on_train_end(self, trainer: Trainer, _: LightningModule) -> None:
        # After the last minibatch there is no next start: its span ends with it.
        self._close_span(trainer, self._ended)
        assert isinstance(trainer.strategy, ODCStrategy)
        trainer.strategy.engine.unlisten(self._collectives)
        self.record.traffic.update(asdict(trainer.strategy.engine.traffic))
        self.ranks = with_collective_waits(_gather(self.record))

    def on_exception(self, _: Trainer, __: LightningModule, exception: BaseException) -> None:
        self.interrupted = isinstance(exception, KeyboardInterrupt)

    def _close_span(self, trainer: Trainer, now: float) -> None:
        """End the running minibatch, if there is one, at ``now``."""
        waits = measured_waits(trainer.strategy)
        if self._started is not None:
            self.record.seconds.append(now - self._started)
            new = {cause: seconds - self._waits.get(cause, 0.0) for cause, seconds in waits.items()}
            self.record.waits.append(new)
            self.record.meetings.append(self._collectives.take_meetings())
        else:
            self._collectives.take_meetings()
        self._waits = waits


def measured_waits(strategy: Strategy) -> dict[str, float]:
    """Seconds that this rank has waited for others so far, by cause; empty if the mode cannot measure them."""
    assert isinstance(strategy, ODCStrategy)
    return {str(cause): seconds for cause, seconds in strategy.engine.waits.items()}


def with_collective_waits(ranks: list[RankRecord]) -> list[RankRecord]:
    """The same records, with the waits inside collectives, which the ranks know only together (one machine's clock)."""
    for index, meetings in enumerate(zip(*(rank.meetings for rank in ranks), strict=True)):
        waited = waits_in_meetings(meetings, common_clock=True) if any(meetings) else None
        for rank, seconds in zip(ranks, waited or (), strict=False):
            rank.waits[index]["collective"] = seconds
    return ranks


def _gather(record: RankRecord) -> list[RankRecord]:
    """Every rank's record, in rank order."""
    records: list[Any] = [record]
    if dist.is_initialized():
        records = [None] * dist.get_world_size()
        dist.all_gather_object(records, record)
    return records
