"""Callbacks that a strategy puts around those of a trainer, where a strategy's own hooks come too early or too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


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
