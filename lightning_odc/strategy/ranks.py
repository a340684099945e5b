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

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ThroughputMonitor
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_odc import _compat_lightning
from lightning_odc._version import __version__
from lightning_odc.attached import Attached
from lightning_odc.data.content import digest_of
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import Signals
from lightning_odc.engine.sample_group import SampleGroup
from lightning_odc.engine.units import first_difference
from lightning_odc.engine.waiting import HangReport
from lightning_odc.errors import DisagreementError

Handler = Callable[[int, FrameType | None], object]

_PLAIN = (bool, int, float, str, tuple, type(None))


def compare_batches(engine: Engine, trainer: Trainer) -> None:
    """Find out now, not by a hang at the end of the epoch, that ranks will take different numbers of steps."""
    batches = trainer.num_training_batches
    if batches == math.inf:
        batches = -1
    counts = engine.exchange("begin training", batches)
    enough = trainer.max_steps * trainer.accumulate_grad_batches
    stops_before = trainer.max_steps > 0 and min(counts) >= enough
    is_endless = -1 in counts
    if len(set(counts)) > 1 and not stops_before and not is_endless:
        raise DisagreementError(
            f"The ranks have {counts} training batches per epoch (by rank). Every rank needs the same number of "
            "Lightning batches; unequal work belongs inside a Minibatch (0 to k microbatches). With a "
            "distributed sampler, let it pad or drop: DistributedSampler(..., drop_last=True)."
        )


def saves_when_it_fails(trainer: Trainer) -> bool:
    """Whether a callback of Lightning's saves a checkpoint when a rank has failed."""
    for callback in trainer.checkpoint_callbacks:
        saves = type(callback).on_exception is not Callback.on_exception
        if getattr(callback, "save_on_exception", saves):
            return True
    return False


def log_hyperparameter(trainer: Trainer, name: str, value: str) -> None:
    """Let all loggers have a fact about the run; one that fails is passed over."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams({name: value})
        except Exception as error:
            rank_zero_warn(
                f"{type(logger).__name__} cannot log {name}={value}: {type(error).__name__}: {error}"
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
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            plain = [f"{key}={value!r}" for key, value in group.items() if isinstance(value, _PLAIN)]
            arguments = ", ".join(plain)
            lines.append(f"optimizer {number}: {kind}({arguments})")
    difference = first_difference(partial(engine.exchange, "compare programs"), lines)
    if difference:
        raise DisagreementError(
            f"The ranks do not run the same program. The first difference: {difference}\nRun the same code with the "
            "same arguments on every rank."
        )


def compare_whole_parameters(sample_group: SampleGroup, model: nn.Module) -> None:
    """Find out that parameters which tensor parallelism does not divide differ. All ranks of a group together."""
    sums: list[float] = []
    for parameter in model.parameters():
        values = parameter.detach()
        if isinstance(values, DTensor) and values.device_mesh.ndim == 1:
            shard = values.to_local()
            sums.append(float(shard.abs().sum()))
    sample_group.check_same(
        "values of parameters that are not divided",
        digest_of(sums),
        "Make them from the same seed on all ranks: lightning.seed_everything(0).",
    )


def hang_report(trainer: Trainer, after: timedelta | None) -> HangReport | None:
    """What says where this rank is, after so long a wait: on stderr and in the trainer's directory."""
    if after is None:
        return None
    directory = None
    if "://" not in trainer.default_root_dir:
        directory = Path(trainer.default_root_dir) / "odc-hang-reports"

    def place() -> str:
        return f", in epoch {trainer.current_epoch} after {trainer.global_step} optimizer steps"

    return HangReport(after.total_seconds(), directory, trainer.global_rank, place)


#: Seconds that SIGTERM waits for the end of a training batch. Launchers and schedulers often kill after 30.
PATIENCE = 8.0

_LOOK_EVERY = 0.5


class PendingSignals(Callback):
    """Replaces Lightning's handlers while a trainer runs. See Note [Signals wait for a meeting]."""

    def __init__(self, signals: Signals) -> None:
        self.patience = PATIENCE  # seconds that SIGTERM waits
        self._signals = signals
        self._handlers: dict[int, Handler] = {}
        self._delivered: set[int] = set()
        self._since: float | None = None
        self._stop = threading.Event()

    @contextmanager
    def collected(self, trainer: Trainer) -> Iterator[None]:
        """Take the place of the trainer's handlers, which exist only after the strategy's setup."""
        callbacks = _compat_lightning.callbacks_of(trainer)
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

    def on_train_batch_end(self, *_: object) -> None:
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

    def _note(self, number: int, _: FrameType | None) -> None:
        """Takes no lock and starts nothing: it runs between any two instructions of this rank."""
        if number == signal.SIGTERM and number not in self._delivered:
            if self._has_waited():
                self._since = None
                raise SIGTERMException
            if number not in self._signals.raised:
                self._since = time.monotonic()
        self._signals.raised.add(number)

    def _has_waited(self) -> bool:
        """Whether SIGTERM waits, and has waited long enough."""
        since = self._since  # which a handler may change at any moment
        if since is None:
            return False
        return time.monotonic() - since >= self.patience

    def _repeat_sigterm(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            if self._has_waited():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@dataclass(eq=False)
class FirstCallback(Callback):
    """Runs before all other callbacks, and counts the ends that this rank has come to: see Note [Who has left]."""

    attached: Attached
    fail: Callable[[BaseException], None]
    end_epoch: Callable[[], None]

    def on_train_batch_end(self, *_: object) -> None:
        if isinstance(self.attached.engine, OnDemandEngine):
            self.attached.engine.protocol.announce_end()

    def on_train_epoch_end(self, *_: object) -> None:
        self._meet_group("the end of an epoch")
        self.on_train_batch_end()
        self.end_epoch()

    def on_train_end(self, *_: object) -> None:
        self._meet_group("the end of training")
        self.on_train_batch_end()

    def on_validation_start(self, *_: object) -> None:
        self._meet_group("validation")

    def _meet_group(self, place: str) -> None:
        """Find out whether a rank of the group is elsewhere: one that has left the loop alone."""
        if self.attached.sample_group is not None:
            self.attached.sample_group.tell(place, None)

    # Callbacks that change the model at the end of an evaluation find its shards.
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attached.engine.reshard()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Callbacks that save when a rank has failed find its peers told: these come to save, too, instead of waiting
    # for that rank to take its step.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.fail(exception)


@contextmanager
def first_and_last(
    callbacks: list[Callback],
    attached: Attached,
    fail: Callable[[BaseException], None],
    end_epoch: Callable[[], None],
) -> Iterator[None]:
    """Put `FirstCallback` before the callbacks of a trainer, and what publishes behind them, inside this context."""
    first = FirstCallback(attached, fail, end_epoch)

    def publish(*_: object) -> None:
        attached.engine.refresh()

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


@contextmanager
def counted_by_microbatch(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Let what users give Lightning's `ThroughputMonitor` get one microbatch at a time, inside this context."""
    with ExitStack() as after:
        for monitor in callbacks:
            if isinstance(monitor, ThroughputMonitor):
                after.callback(setattr, monitor, "batch_size_fn", monitor.batch_size_fn)
                monitor.batch_size_fn = partial(_count_all, monitor.batch_size_fn)
                if monitor.length_fn is not None:
                    after.callback(setattr, monitor, "length_fn", monitor.length_fn)
                    monitor.length_fn = partial(_count_all, monitor.length_fn)
        yield


def _count_all(count: Callable[[object], int], batch: object) -> int:
    """The count of a batch, or of all microbatches in it."""
    if not isinstance(batch, Minibatch):
        return count(batch)
    return sum(map(count, batch)) or 1  # not 0: the monitor refuses a batch without samples
