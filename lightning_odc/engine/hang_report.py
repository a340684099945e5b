"""Reports of long waits: every rank says where it is, on stderr and, with the Python stack, in a file.

PyTorch's flight recorder does not see one-sided traffic. These reports show it after a hang.

The rank that hangs is the one that does not wait. A report at the place that waits would come from all ranks except
that one. So each rank has a thread that looks at all ranks' control words from time to time, and reports when *any*
rank has waited for long. Waiting ranks say whom they wait for, and the others say what they do. The thread nearly
always sleeps, and reads shared memory only. It needs the interpreter's lock: if a rank never releases that lock, only
its peers describe it.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_LONGEST_NAP = 1.0
_NAPS = 10  # looks per soft limit


class HangReport:
    """Writes reports of one rank, and keeps a thread that decides when to."""

    def __init__(
        self, after: float, directory: Path | None, rank: int, place: Callable[[], str] = str
    ) -> None:
        self.place = place
        self.after = after  # seconds of waiting until the next report; after a reported wait, twice that wait
        self.path = None if directory is None else directory / f"rank{rank}.txt"  # None: to stderr alone
        self._rank = rank
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._watched = 0
        self._writable = True

    def start(self, longest_wait: Callable[[], float], describe: Callable[[], str]) -> None:
        """Begin to look."""
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        arguments = (self._stop, longest_wait, describe)
        self._thread = threading.Thread(
            target=self._watch, args=arguments, name="lightning-odc hang report", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no longer. Idempotent; from the thread that called `start`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def tell(self, text: str) -> None:
        """Write a report, now."""
        note = "(There is no file of it.)"
        if self.path is not None and self._writable:
            try:
                _append(self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n{self._stacks()}\n")
                note = f"Also in {self.path}, with the Python stack."
            except OSError as error:
                self._writable = False
                note = f"(It could not be written to {self.path}: {error.strerror or error}.)"
        sys.stderr.write(f"lightning-odc: {text}\n  {note}\n")
        sys.stderr.flush()

    # -- internals ----------------------------------------------------------------------------------------

    def _watch(
        self, stop: threading.Event, longest_wait: Callable[[], float], describe: Callable[[], str]
    ) -> None:
        told = 0.0
        while not stop.wait(min(self.after / _NAPS, _LONGEST_NAP)):
            waited = longest_wait()
            if told and waited < told:
                sys.stderr.write(f"lightning-odc: rank {self._rank}: the wait is over, training goes on.\n")
                self.after, told = max(self.after, 2 * told), 0.0
            if waited >= max(self.after, 2 * told):
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                self.tell(f"ranks have been waiting for {waited:.1f} s, since {since}.\n{describe()}")
                told = waited

    def _stacks(self) -> str:
        """What all threads do, the one that trains first: on GPUs backward passes run in threads of autograd's."""
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not self._thread}
        frames = sys._current_frames()
        own = () if self._thread is None else (self._thread.ident,)
        order = [self._watched, *(ident for ident in frames if ident not in (self._watched, *own))]
        return "".join(
            f"Python stack of this rank, thread {names.get(ident, 'of another library')!r}:\n"
            + "".join(traceback.format_stack(frames[ident]))
            for ident in order
            if ident in frames
        )


def _append(path: Path, text: str) -> None:
    """Write to the end of a plain file in a plain directory, made if missing; links and pipes there are errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:  # without a reader, a pipe would keep the rank here for ever: hence O_NONBLOCK
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path.name, flags, 0o644, dir_fd=folder), "a") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{path} is not a regular file")
            file.write(text)
    finally:
        os.close(folder)
