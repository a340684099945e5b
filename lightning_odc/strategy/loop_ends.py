"""Finding out at once that a rank has left a batch, an epoch or the training that others are still in.

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

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

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
