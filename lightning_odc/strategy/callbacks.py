"""What stands around the callbacks of a trainer.

Note [Who has left]
~~~~~~~~~~~~~~~~~~~
Every rank counts the ends of batches, epochs and training that it has reached. If a rank waits at a meeting for a peer
with a higher count, the peer will not come: it has passed that place (`Peers.check_not_past`), and has skipped an
optimizer step. Between two meetings the counts may differ, for example under gradient accumulation. So the count says
nothing to a rank that waits for a lock or for its own device. A shard that was not published when its owner left will
never be published (`Peers.check_not_left`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_odc import _compat_lightning
from lightning_odc.engine.over_windows import OverWindows
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.strategy.reducing import ReducingStrategy


@dataclass(eq=False)
class FirstCallback(Callback):
    """Runs before all other callbacks, and counts the ends that this rank has come to: see Note [Who has left]."""

    strategy: ReducingStrategy

    def on_train_batch_end(self, *_: object) -> None:
        engine = self.strategy.engine
        if isinstance(engine, OverWindows):
            engine.protocol.announce_end()

    def on_train_epoch_end(self, *_: object) -> None:
        self._meet_group("the end of an epoch")
        self.on_train_batch_end()
        self.strategy._training_now.end_epoch()

    def on_train_end(self, *_: object) -> None:
        self._meet_group("the end of training")
        self.on_train_batch_end()

    def on_validation_start(self, *_: object) -> None:
        self._meet_group("validation")

    def _meet_group(self, place: str) -> None:
        """Find out whether a rank of the group is elsewhere: one that has left the loop alone."""
        sample_group = self.strategy.attached.sample_group
        if sample_group is not None:
            sample_group.tell(place, None)

    # Callbacks that change the model at the end of an evaluation find its shards.
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.strategy.engine.reshard()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Callbacks that save when a rank has failed find its peers told: these come to save, too, instead of waiting
    # for that rank to take its step.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.strategy.on_exception(exception)


@contextmanager
def first_and_last(callbacks: list[Callback], strategy: ReducingStrategy) -> Iterator[None]:
    """Put `FirstCallback` before the callbacks of a trainer, and what publishes behind them, inside this context."""
    first = FirstCallback(strategy)

    def publish(*_: object) -> None:
        strategy.engine.refresh()

    # What other callbacks write into the model when an evaluation begins is published.
    last = LambdaCallback(
        on_validation_epoch_start=publish, on_test_epoch_start=publish, on_predict_epoch_start=publish
    )
    callbacks[:] = [first, *callbacks, last]
    try:
        yield
    finally:
        callbacks[:] = [callback for callback in callbacks if callback not in (first, last)]


def meeting_before_batches(trainer: Trainer, sample_group: SampleGroup) -> AbstractContextManager[None]:
    """Before every batch the ranks of a group meet: one that has left the loop alone is at another place."""

    def meet(broadcast: Callable[[], None]) -> None:
        sample_group.tell("a training batch", None)
        broadcast()

    return _compat_lightning.in_place_of_broadcasts(trainer, meet)
