"""A thread that does one job after another, and ends before the interpreter does."""

from __future__ import annotations

import atexit
import queue
from collections.abc import Callable
from threading import Thread

Job = Callable[[], object]


class Background:
    """Does jobs in their order, in a thread of its own, until it is stopped or a job raises.

    A thread that waits inside of torch while the interpreter ends may end the process with an error. So who has one
    closes it at exit, if that has not been done before.

    Args:
        name: What the thread is called, for debuggers.
        close: What its owner does to stop it; called at exit.
        begin: What is done first, in the thread.
        idle: What is done before each job, and again after every ``every`` seconds without one.
        every: The seconds.
        end: What is done last.

    Attributes:
        error: What a job has raised. Nothing is done after it.
    """

    def __init__(
        self,
        name: str,
        close: Job,
        begin: Job | None = None,
        idle: Job | None = None,
        every: float | None = None,
        end: Job | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._close = close
        self._begin = begin
        self._idle = idle
        self._every = every
        self._end = end
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name=f"lightning-odc {name}", daemon=True)
        atexit.register(close)
        self._thread.start()

    def do(self, job: Job) -> None:
        """Let the thread do something, behind what it was given before."""
        self._jobs.put(job)

    def stop(self, patience: float) -> None:
        """End behind what was given, and wait for that, but no longer than so many seconds. Idempotent."""
        atexit.unregister(self._close)
        self._jobs.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            if self._begin is not None:
                self._begin()
            while (job := self._next()) is not None:
                job()
            if self._end is not None:
                self._end()
        except BaseException as error:
            self.error = error

    def _next(self) -> Job | None:
        while True:
            if self._idle is not None:
                self._idle()
            try:
                return self._jobs.get(timeout=self._every)
            except queue.Empty:
                pass
