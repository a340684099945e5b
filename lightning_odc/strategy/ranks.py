"""What ranks tell each other besides gradients: their program, signals, that one has left a loop, that one has failed.

Note [Signals wait for a meeting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A signal reaches a rank at any moment, some ranks earlier than others, and some not at all. Lightning's handlers run
collectives, which then meet other collectives of the ranks, or none. So a rank that gets a signal only says so in its
record of the next meeting. All ranks read the same records, so all of them call the previous handler at the same place:
at the end of the training batch in which they met, where callbacks save checkpoints, too. When SIGTERM has waited for
`PATIENCE` seconds, the rank that got it raises at once, and the others stop as they do for any failed rank.

Note [Who has left]
~~~~~~~~~~~~~~~~~~~
Every rank counts the ends of batches, epochs and training that it has reached. If a rank waits at a meeting for a peer
with a higher count, the peer will not come: it has passed that place (`Peers.check_not_past`), and has skipped an
optimizer step. Between two meetings the counts may differ, for example under gradient accumulation. So the count says
nothing to a rank that waits for a lock or for its own device. A shard that was not published when its owner left will
never be published (`Peers.check_not_left`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ThroughputMonitor
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_odc import _compat_lightning
from lightning_odc._version import __version__
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Signals
from lightning_odc.engine.units import first_difference
from lightning_odc.errors import DisagreementError

_PLAIN = (bool, int, float, str, tuple, type(None))


def compare_batches(engine: Engine, trainer: Trainer) -> None:
    """Find out now, not by a hang at the end of the epoch, that ranks will take different numbers of steps."""
    batches = trainer.num_training_batches
    counts = engine.exchange("begin training", -1 if batches == float("inf") else batches)
    enough = trainer.max_steps * trainer.accumulate_grad_batches
    stops_before = trainer.max_steps > 0 and min(counts) >= enough
    if len(set(counts)) > 1 and not stops_before and -1 not in counts:
        raise DisagreementError(
            f"The ranks have {counts} training batches per epoch (by rank). Every rank needs the same number of "
            "Lightning batches; unequal work belongs inside a Minibatch (0 to k microbatches). With a "
            "distributed sampler, let it pad or drop: DistributedSampler(..., drop_last=True)."
        )


def compare_programs(engine: Engine, trainer: Trainer, folded: int) -> None:
    """Find out that versions or hyperparameters differ, which no meeting would show. All ranks together."""
    lines = [
        f"versions: lightning-odc {__version__}, lightning {lightning.__version__}, torch {torch.__version__}",
        f"accumulate_grad_batches={trainer.accumulate_grad_batches * folded}",
        f"gradient_clip_val={trainer.gradient_clip_val}, algorithm {trainer.gradient_clip_algorithm}",
        f"precision={trainer.precision}",
    ]
    for number, optimizer in enumerate(trainer.optimizers):
        for group in optimizer.param_groups:
            plain = [f"{key}={value!r}" for key, value in group.items() if isinstance(value, _PLAIN)]
            lines.append(f"optimizer {number}: {type(optimizer).__name__}({', '.join(plain)})")
    if difference := first_difference(partial(engine.exchange, "compare programs"), lines):
        raise DisagreementError(
            f"The ranks do not run the same program. The first difference: {difference}\nRun the same code with the "
            "same arguments on every rank."
        )


#: Seconds that SIGTERM waits for the end of a training batch. Launchers and schedulers often kill after 30.
PATIENCE = 8.0

_LOOK_EVERY = 0.5


class PendingSignals(Callback):
    """Replaces Lightning's handlers while a trainer runs. See Note [Signals wait for a meeting]."""

    def __init__(self, signals: Signals) -> None:
        self.patience = PATIENCE  # seconds that SIGTERM waits
        self._signals = signals
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._delivered: set[int] = set()
        self._since: float | None = None
        self._stop = threading.Event()

    @contextmanager
    def collected(self, trainer: Trainer) -> Iterator[None]:
        """Take the place of the trainer's handlers, which exist only after the strategy's setup."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(self)
        watch = threading.Thread(target=self._repeat_sigterm, name="lightning-odc signals", daemon=True)
        if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set
            self._handlers = dict(_compat_lightning.handlers_of_lightning())
            for number in self._handlers:
                signal.signal(number, self._note)
            watch.start()
        try:
            yield
        finally:
            self._stop.set()
            if watch.ident is not None:
                watch.join()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            callbacks[:] = [callback for callback in callbacks if callback is not self]

    def on_train_batch_end(self, *_: Any) -> None:
        self.deliver()

    def deliver(self) -> None:
        """Let the handlers act on what the ranks have agreed on. All ranks together."""
        for number in sorted(self._signals.agreed - self._delivered):
            self._delivered.add(number)
            if number == signal.SIGTERM:
                self._since = None
            if number in self._handlers:
                self._handlers[number](number, None)
            if number != signal.SIGTERM:  # one may be sent again, and is to be acted on again
                self._signals.forget(number)
                self._delivered.discard(number)

    def _note(self, number: int, _: Any) -> None:
        """Takes no lock and starts nothing: it runs between any two instructions of this rank."""
        if number == signal.SIGTERM and number not in self._delivered:
            if self._since is not None and time.monotonic() - self._since >= self.patience:
                self._since = None
                raise SIGTERMException
            if number not in self._signals.raised:
                self._since = time.monotonic()
        self._signals.raised.add(number)

    def _repeat_sigterm(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            if self._since is not None and time.monotonic() - self._since >= self.patience:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


_EPOCH, _TRAINING = 2, 3  # Lightning's own numbers are 0, and 1 for "the job is told to end"
_NAMES = {0: "about to run another batch", 1: "told to end"}
_NAMES |= {_EPOCH: "at the end of an epoch", _TRAINING: "at the end"}


@dataclass(eq=False)
class FirstCallback(Callback):
    """Runs before all other callbacks, and counts the ends that this rank has come to: see Note [Who has left]."""

    engine: Engine
    fail: Callable[[BaseException], None]
    end_epoch: Callable[[], None]

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self.engine, OnDemandEngine):
            self.engine.protocol.announce_end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._announce_end(_EPOCH, trainer)
        self.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._announce_end(_TRAINING, trainer)

    def _announce_end(self, end: int, trainer: Trainer) -> None:
        if not isinstance(self.engine, OnDemandEngine):
            return
        self.engine.protocol.announce_end()
        if not _compat_lightning.BROADCASTS_BEFORE_BATCHES:
            return
        # Lightning broadcasts from rank 0 before every batch, where rank 0 hangs if another rank has left the epoch. So
        # all ranks broadcast here, too, with another number: one that has left learns that rank 0 has not.
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
        self.engine.reshard()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Callbacks that save when a rank has failed find its peers told: these come to save, too, instead of waiting
    # for that rank to take its step.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.fail(exception)


@contextmanager
def first_and_last(
    trainer: Trainer, engine: Engine, fail: Callable[[BaseException], None], end_epoch: Callable[[], None]
) -> Iterator[None]:
    """Put `FirstCallback` before the callbacks of a trainer, and what publishes behind them, inside this context."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    first = FirstCallback(engine, fail, end_epoch)
    # What other callbacks write into the model when an evaluation begins is published.
    begins = ("on_validation_epoch_start", "on_test_epoch_start", "on_predict_epoch_start")
    last = LambdaCallback(**dict.fromkeys(begins, lambda *_: engine.refresh()))
    callbacks[:] = [first, *callbacks, last]
    try:
        yield
    finally:
        callbacks[:] = [callback for callback in callbacks if callback not in (first, last)]


@contextmanager
def counted_by_microbatch(callbacks: Iterable[Any]) -> Iterator[None]:
    """Let what users give Lightning's `ThroughputMonitor` get one microbatch at a time, inside this context."""

    def of_all(count: Callable[[Any], int]) -> Callable[[Any], int]:
        # Not 0: the monitor refuses a batch without samples.
        return lambda batch: sum(map(count, batch)) or 1 if isinstance(batch, Minibatch) else count(batch)

    with ExitStack() as after:
        for monitor in callbacks:
            for name in ("batch_size_fn", "length_fn") if isinstance(monitor, ThroughputMonitor) else ():
                if (count := getattr(monitor, name)) is not None:
                    after.callback(setattr, monitor, name, count)
                    setattr(monitor, name, of_all(count))
        yield
