"""What happens between two batches, from the one place where Lightning says so: its profiler.

Lightning tells its profiler about every hook it calls, and when the training loop asks the loader for a batch and has
got it. The fetching is waiting for data, and nothing else lies in it.

Note [The broadcast before every batch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Right before it fetches a batch, Lightning's training loop (2.6) broadcasts from rank 0 whether the job was told to end.
A rank that comes before rank 0 waits there, which no hook shows. It lies between the last profiled hook of a batch and
the next fetching; beside it there is only what the rank logs. So from a rank's own begin of this gap to rank 0's begin
the rank waits for rank 0, up to the time that it takes to log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.profilers import Profiler

from lightning_odc._compat import FETCH_ACTION


class DataClock(Profiler):
    """Stands before the trainer's profiler, passes everything on, and times what lies between two batches.

    Args:
        inner: the trainer's own profiler.
        on_fetch: called whenever a batch is about to be fetched, with the end of the last profiled action and the
            present, in nanoseconds of the monotonic clock.

    Attributes:
        seconds: spent fetching so far.
        seen: whether a batch was ever fetched.
    """

    def __init__(self, inner: Profiler, on_fetch: Callable[[int, int], None]) -> None:
        super().__init__()
        self.seconds = 0.0
        self.seen = False
        self._inner = inner
        self._on_fetch = on_fetch
        self._last = self._began = 0

    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._began = time.monotonic_ns()
            self._on_fetch(self._last, self._began)

    def stop(self, action_name: str) -> None:
        self._last = time.monotonic_ns()
        if self._began and action_name.endswith(FETCH_ACTION):
            self.seconds += (self._last - self._began) / 1e9
            self._began, self.seen = 0, True
        self._inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        with self._inner.profile(action_name):
            yield action_name
        self._last = time.monotonic_ns()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self._inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        return self._inner.summary()

    def describe(self) -> None:
        self._inner.describe()

    def __del__(self) -> None:
        """Nothing to release: the inner profiler releases what is its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def install(self, trainer: Any) -> None:
        """Take the place of the trainer's profiler."""
        trainer.profiler = self

    def remove(self, trainer: Any) -> None:
        """Give the place back. Idempotent."""
        if trainer.profiler is self:
            trainer.profiler = self._inner
