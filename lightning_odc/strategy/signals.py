"""SIGTERM and a scheduler's signal to requeue, held back until all ranks can act on them together.

Note [Signals wait for a meeting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A signal reaches a rank at any moment, some ranks earlier than others, and some not at all. Lightning's handlers run
collectives (a broadcast, a checkpoint), which then meet other collectives of the ranks, or none. So a rank that
gets a signal only says so in its record of the next meeting. All ranks read the same records, so all of them call the
previous handler at the same place: at the end of the training batch in which they met, where callbacks
save checkpoints, too.

A meeting may be far away: a validation, a slow loader, a peer that hangs. When SIGTERM has waited for `PATIENCE`
seconds, the rank that got it raises at once, and the others stop as they do for any failed rank.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_odc import _compat
from lightning_odc.engine.peers import Signals

#: Seconds that SIGTERM waits for the end of a training batch. Launchers and schedulers often kill after 30.
PATIENCE = 8.0

_LOOK_EVERY = 0.5


class PendingSignals(Callback):
    """Replaces Lightning's handlers while a trainer runs. See Note [Signals wait for a meeting].

    Args:
        signals: The signals that ranks tell each other at meetings.

    Attributes:
        patience: The seconds that SIGTERM waits.
    """

    def __init__(self, signals: Signals) -> None:
        self.patience = PATIENCE
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
        try:
            if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set
                with self._before_handlers():
                    yield
            else:
                yield
        finally:
            callbacks[:] = [callback for callback in callbacks if callback is not self]

    @contextmanager
    def _before_handlers(self) -> Iterator[None]:
        for number, handler in _compat.handlers_of_lightning().items():
            self._handlers[number] = handler
            signal.signal(number, self._note)
        watch = threading.Thread(target=self._press, name="lightning-odc signals", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._stop.set()
            watch.join()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

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

    def _press(self) -> None:
        """Send SIGTERM to the main thread once more where it has waited for too long: it may sleep."""
        while not self._stop.wait(_LOOK_EVERY):
            if self._since is not None and time.monotonic() - self._since >= self.patience:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
