"""Signals of the operating system, on which all ranks act at the same place.

Note [Signals wait for a meeting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A signal reaches a rank at any moment, some ranks earlier than others, and some not at all. Lightning's handlers run
collectives, which then meet other collectives of the ranks, or none. So a rank that gets a signal only says so in its
record of the next meeting. All ranks read the same records, so all of them call the previous handler at the same place:
at the end of the training batch in which they met, where callbacks save checkpoints, too. When SIGTERM has waited for
`PATIENCE` seconds, an alarm lets the rank that got it raise at once. The others stop as they do for any failed
rank.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_odc import _compat_lightning
from lightning_odc.protocol.peers import Signals

Handler = Callable[[int, FrameType | None], object] | int | None

#: Seconds that SIGTERM waits for the end of a training batch. Launchers and schedulers often kill after 30.
PATIENCE = 8.0


class PendingSignals(Callback):
    """Replaces Lightning's handlers while a trainer runs. See Note [Signals wait for a meeting]."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._handlers: dict[int, Handler] = {}
        self._delivered: set[int] = set()

    @contextmanager
    def collected(self, trainer: Trainer) -> Iterator[None]:
        """Take the place of the trainer's handlers, which exist only after the strategy's setup."""
        callbacks = _compat_lightning.callbacks_of(trainer)
        callbacks.append(self)
        if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set
            self._handlers = dict(_compat_lightning.handlers_of_lightning())
            for number in self._handlers:
                signal.signal(number, self._note)
        try:
            yield
        finally:
            self._stop_alarm()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            callbacks[:] = [callback for callback in callbacks if callback is not self]

    def on_train_batch_end(self, *_: object) -> None:
        self.deliver()

    def deliver(self) -> None:
        """Let the handlers act on what the ranks have agreed on. All ranks together."""
        for number in sorted(self._signals.agreed - self._delivered):
            self._delivered.add(number)
            self._stop_alarm()
            handler = self._handlers.get(number)
            if callable(handler):
                handler(number, None)
            if number != signal.SIGTERM:  # one may be sent again, and is to be acted on again
                self._signals.forget(number)
                self._delivered.discard(number)

    def _note(self, number: int, _: FrameType | None) -> None:
        """Takes no lock and starts nothing: it runs between any two instructions of this rank."""
        if number == signal.SIGTERM and number not in self._signals.raised | self._delivered:
            self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, _give_up)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        self._signals.raised.add(number)

    def _stop_alarm(self) -> None:
        if signal.SIGALRM in self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _give_up(*_: object) -> None:
    raise SIGTERMException
