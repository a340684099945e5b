"""Signals of the operating system, on which all ranks act at the same place.

Note [Signals wait for a meeting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A signal reaches a rank at any moment, some ranks earlier than others, and some not at all. Lightning's handlers run
collectives, which then meet other collectives of the ranks, or none. So a rank that gets a signal only says so in its
record of the next meeting. All ranks read the same records, so all of them call the previous handler at the same place:
at the end of the training batch in which they met, where callbacks save checkpoints, too. When SIGTERM has waited for
`PATIENCE` seconds, the rank that got it raises at once, and the others stop as they do for any failed rank.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_odc import _compat_lightning
from lightning_odc.engine.peers import Signals

Handler = Callable[[int, FrameType | None], object]

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
