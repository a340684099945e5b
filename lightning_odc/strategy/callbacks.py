"""Our callbacks around those of a trainer, and who leaves a loop.

Note [Who has left]
~~~~~~~~~~~~~~~~~~~
Every rank counts the ends of batches, epochs and training that it has come to. A rank that waits at a meeting for a
peer whose count is higher than its own waits in vain: the peer has passed the place (`Peers.check_not_past`). That
finds out who leaves out an optimizer step.

Between two meetings the counts may differ. Under gradient accumulation a rank with little work ends its batches first.
So the count says nothing to a rank that waits for a lock, for a shard, or for its own device. The holder of a lock
gives it back, wherever that rank is in the loop. A shard that was not published when its owner left will never be
published (`Peers.check_not_left`). A shard whose owner has ended a batch may still be published: the owner's device
may be behind its host.

It is not enough for a rank that leaves an epoch, since Lightning 2.6 broadcasts from rank 0 before every batch, and
that is where rank 0 then hangs, outside of our sight. So all ranks broadcast in the same way at the end of every epoch
and of training, another number. A rank that has left and hears the number of a batch knows that rank 0 has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError

_EPOCH, _TRAINING = 2, 3  # Lightning's own numbers are 0, and 1 for "the job is told to end"
_NAMES = {
    0: "about to run another batch",
    1: "told to end",
    _EPOCH: "at the end of an epoch",
    _TRAINING: "at the end",
}


class LoopEnds(Callback):
    """See Note [Who has left]. The first of all callbacks, so that nobody else communicates before.

    Args:
        count: called at every end.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def on_train_batch_end(self, *_: Any) -> None:
        self._count()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._come_to(_EPOCH, trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._come_to(_TRAINING, trainer)

    def _come_to(self, end: int, trainer: pl.Trainer) -> None:
        self._count()
        if not _compat.BROADCASTS_BEFORE_BATCHES:
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


class _Before(Callback):
    """The first of all callbacks.

    Those that change the model at the end of an evaluation find its shards. Those that save when a rank has failed
    find the others told, who come to save, too, instead of waiting for that rank to take its step.
    """

    def __init__(self, reshard: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self._reshard = reshard
        self._fail = fail

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reshard()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reshard()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reshard()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fail(exception)


class _After(Callback):
    """The last of all callbacks: publishes what others write into the model when an evaluation begins."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish()

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish()

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish()


@contextmanager
def surrounded(
    trainer: Trainer,
    *,
    reshard: Callable[[], None],
    publish: Callable[[], None],
    fail: Callable[[BaseException], None],
) -> Iterator[None]:
    """Put callbacks of ours before and after those of a trainer, for a while.

    Args:
        trainer: whose callbacks.
        reshard: frees what is gathered.
        publish: lets peers read the parameters as they are.
        fail: tells peers that this rank has failed.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    own = (_Before(reshard, fail), _After(publish))
    callbacks[:] = [own[0], *callbacks, own[1]]
    try:
        yield
    finally:
        callbacks[:] = [callback for callback in callbacks if callback not in own]
