"""Callbacks of the strategy before and after those of the user, and the ranks that leave a loop.

Note [Who has left]
~~~~~~~~~~~~~~~~~~~
Every rank counts the ends of batches, epochs and training that it has reached. If a rank waits at a meeting for a peer
with a higher count, the peer will not come: it has passed that place (`Peers.check_not_past`). That shows which rank
has skipped an optimizer step.

Between two meetings the counts may differ. Under gradient accumulation a rank with little work ends its batches first.
So the count says nothing to a rank that waits for a lock, for a shard, or for its own device. The holder of a lock
gives it back, wherever that rank is in the loop. A shard that was not published when its owner left will never be
published (`Peers.check_not_left`). A shard whose owner has ended a batch may still be published: the owner's device
may be behind its host.

Counts are not enough if a rank leaves an epoch. Lightning 2.6 broadcasts from rank 0 before every batch, and rank 0
then hangs there, where the engine does not see it. So all ranks broadcast in the same way at the end of every epoch and
of training, with another number. If a rank has left and receives the number of a batch, it knows that rank 0 has not
left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_odc import _compat_lightning
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.errors import DisagreementError

_EPOCH, _TRAINING = 2, 3  # Lightning's own numbers are 0, and 1 for "the job is told to end"
_NAMES = {
    0: "about to run another batch",
    1: "told to end",
    _EPOCH: "at the end of an epoch",
    _TRAINING: "at the end",
}


class FirstCallback(Callback):
    """Runs before all other callbacks, and counts the ends that this rank has come to: see Note [Who has left]."""

    def __init__(
        self, engine: Engine, fail: Callable[[BaseException], None], end_epoch: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._fail = fail
        self._end_epoch = end_epoch

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self._engine, OnDemandEngine):
            self._engine.protocol.announce_end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._come_to(_EPOCH, trainer)
        self._end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._come_to(_TRAINING, trainer)

    def _come_to(self, end: int, trainer: Trainer) -> None:
        if not isinstance(self._engine, OnDemandEngine):
            return
        self._engine.protocol.announce_end()
        if not _compat_lightning.BROADCASTS_BEFORE_BATCHES:
            return
        heard = torch.tensor([end], device=trainer.strategy.root_device)
        dist.broadcast(heard, src=0)
        if int(heard) != end:
            raise DisagreementError(
                f"Rank {trainer.global_rank} is {_NAMES[end]}, after {trainer.global_step} optimizer steps, and rank 0 "
                f"is {_NAMES.get(int(heard), 'elsewhere')}. Stop on all ranks together: EarlyStopping does, and "
                "`trainer.should_stop` must be set on every rank, for example by `self.trainer.strategy."
                "reduce_boolean_decision(stop, all=False)`."
            )

    # Callbacks that change the model at the end of an evaluation find its shards.
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._engine.reshard()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Callbacks that save when a rank has failed find its peers told: these come to save, too, instead of waiting
    # for that rank to take its step.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fail(exception)


class LastCallback(Callback):
    """Runs after all other callbacks: publishes what they write into the model when an evaluation begins."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._engine.refresh()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start


@contextmanager
def first_and_last(
    trainer: Trainer, engine: Engine, fail: Callable[[BaseException], None], end_epoch: Callable[[], None]
) -> Iterator[None]:
    """Put `FirstCallback` before and `LastCallback` after the callbacks of a trainer, inside this context."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    first, last = FirstCallback(engine, fail, end_epoch), LastCallback(engine)
    callbacks[:] = [first, *callbacks, last]
    try:
        yield
    finally:
        callbacks[:] = [callback for callback in callbacks if callback not in (first, last)]


@contextmanager
def counted_by_microbatch(callbacks: Iterable[Any]) -> Iterator[None]:
    """Let what users give Lightning's `ThroughputMonitor` get one microbatch at a time, inside this context."""
    with ExitStack() as after:
        for monitor in callbacks:
            for name in ("batch_size_fn", "length_fn") if isinstance(monitor, ThroughputMonitor) else ():
                if (count := getattr(monitor, name)) is not None:
                    after.callback(setattr, monitor, name, count)
                    setattr(monitor, name, partial(_counted, count))
        yield


def _counted(count: Callable[[Any], int], batch: Any) -> int:
    # Not 0: the monitor refuses a batch without samples.
    return sum(map(count, batch)) or 1 if isinstance(batch, Minibatch) else count(batch)
