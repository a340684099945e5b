"""A thread that writes control words when this rank's device has done what they announce."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from lightning_odc.engine.transports.device import Mark

_PATIENCE = 10.0


class Announcer:
    """Writes words in the order in which they were handed over; see Note [When the host waits for its device].

    Args:
        store: writes a word.
        enter_thread: called first in the thread.
    """

    def __init__(self, store: Callable[[int, int], None], enter_thread: Callable[[], None]) -> None:
        self._store = store
        self._enter_thread = enter_thread
        self._waiting: queue.SimpleQueue[tuple[Mark, int, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lightning-odc announcer", daemon=True)
        self._thread.start()

    def announce(self, mark: Mark, word: int, value: int) -> None:
        """Write a word when ``mark`` has been passed.

        Raises:
            RuntimeError: an earlier word could not be written.
        """
        self.check()
        self._waiting.put((mark, word, value))

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise RuntimeError("The device failed while parameters were published.") from self._error

    def stop(self) -> None:
        """Write what is left, and end. A device that hangs is not waited for any longer than 10 s. Idempotent."""
        self._waiting.put(None)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            self._enter_thread()
            while (item := self._waiting.get()) is not None:
                mark, word, value = item
                mark.synchronize()  # without the interpreter's lock
                self._store(word, value)
        except BaseException as error:  # of the device or of the driver: for whoever asks next
            self._error = error
