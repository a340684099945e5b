"""Waiting that sleeps, has a deadline, and adds up: how long this rank was idle, and why. And reports of long waits.

Reports say where every rank is: on stderr and, with the Python stack, in a file. The rank that hangs is the one that
does not wait. So each rank has a thread that looks at all ranks' control words, and reports when *any* rank has waited
for long.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path

from lightning_odc.background import Background
from lightning_odc.errors import WaitTimeoutError
from lightning_odc.protocol.tracing import Traced, Tracer
from lightning_odc.protocol.transports.base import Ready

Describe = Callable[[], str]
"""Makes a part of a message, when it is needed."""

Check = Callable[[], None]
"""Raises if a wait can never end."""

_SPINS = 3
_FIRST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6
_SLEEP_FRACTION = 1 / 16
CHECK_EVERY = 0.05
_LONGEST_NAP = 1.0  # between two looks of the thread that reports
_NAPS = 10  # looks per soft limit
_PATIENCE = 10.0  # seconds for the end of that thread


#: Added to the report of a wait that ended at its deadline while another rank was computing.
_HINT = (
    "A rank that computes for so long may itself be waiting, in a collective inside `forward` or `training_step` "
    "(`all_gather`, `all_reduce`, SyncBatchNorm, `generate(synced_gpus=True)`): ranks with different numbers of "
    "microbatches block each other there. Move it out of the microbatch, or run equally many microbatches on every "
    "rank."
)


class Cause(StrEnum):
    """Why a rank waited. *Idle* is the sum over all causes."""

    READ = "read"
    LOCK = "lock"
    SETTLE = "settle"
    NETWORK = "network"


class Waiter(Traced):
    """Waits for other ranks, and adds the seconds up."""

    def __init__(
        self,
        timeout: float,  # seconds after which a wait gives up
        check: Check,  # called 20 times a second in every wait; raises if a peer has failed
        report: Describe,  # where every rank is, for the message of a timeout
        hang_report: HangReport | None = None,  # receives a timeout, too
        tracers: list[Tracer] | None = None,
    ) -> None:
        super().__init__(tracers)
        self.timeout = timeout
        self.seconds: dict[Cause, float] = dict.fromkeys(Cause, 0.0)  # of idle time since the start
        self.waiting_for: Describe | None = None  # while it waits
        self._check = check
        self._report = report
        self._hang_report = hang_report

    def until(
        self,
        ready: Ready,
        cause: Cause | None,
        what: Describe,
        peer: int | None = None,
        check: Check | None = None,
    ) -> None:
        """Sleep until ``ready()``.

        Args:
            ready: Whether it is so.
            cause: The cause of idle time; ``None`` for the own device, which is work.
            what: Returns what this rank waits for, for messages.
            peer: The rank of the job that is waited for, for traces.
            check: Raises if this wait can never end.
        """
        if not ready():
            with self.during(cause, what, peer):
                self._sleep_until(ready, what, check)

    @contextmanager
    def during(self, cause: Cause | None, what: Describe, peer: int | None = None) -> Iterator[None]:
        """Enter the time inside as a wait, as `until` does; for a rank in a collective, which has its own end.

        Args:
            cause: The cause of idle time; ``None`` for the own device, which is work.
            what: Returns what this rank waits for, for messages.
            peer: The rank of the job that is waited for, for traces.
        """
        if cause is not None:
            for tracer in self.tracers:
                tracer.begin_wait(str(cause))
        begin = time.monotonic_ns()
        self.waiting_for = what
        try:
            yield
        finally:  # a wait that failed was a wait, too
            self.waiting_for = None
            if cause is not None:
                self.seconds[cause] += (time.monotonic_ns() - begin) / 1e9
                self.record("wait", begin, cause=str(cause), peer=peer)

    def _sleep_until(self, ready: Ready, what: Describe, check: Check | None) -> None:
        begin = time.monotonic()
        next_check = begin + CHECK_EVERY
        spins = _SPINS
        while not ready():
            now = time.monotonic()
            if now >= next_check:
                next_check = now + CHECK_EVERY
                try:
                    self._check()
                    if check is not None:
                        check()
                except Exception:  # a peer may finish its part and leave between the two looks
                    if not ready():
                        raise
            if now - begin > self.timeout:
                message = f"Gave up after {self.timeout:g} s of {what()}.\n{self._report()}"
                if "computing" in message:
                    message += f"\n{_HINT}"
                if self._hang_report is not None:
                    self._hang_report.tell(message)
                raise WaitTimeoutError(message)
            # Sleeps grow with the time already waited: a short wait ends within microseconds of its cause, a long one
            # costs less than 2 percent of a core.
            nap = min(_LONGEST_SLEEP, max(_FIRST_SLEEP, (now - begin) * _SLEEP_FRACTION))
            if spins > 0:
                nap = 0
                spins -= 1
            time.sleep(nap)


class HangReport:
    """Writes reports of one rank, and keeps a thread that decides when to."""

    def __init__(self, after: float, directory: Path | None, rank: int, place: Describe = str) -> None:
        self.place = place
        self.after = after  # seconds of waiting until the next report; after a reported wait, twice that wait
        self.path = None if directory is None else directory / f"rank{rank}.txt"  # None: to stderr alone
        self._rank = rank
        self._told = 0.0  # the seconds of a wait that was reported and is not over
        self._thread: Background | None = None

    def start(self, longest_wait: Callable[[], float], describe: Describe) -> None:
        """Begin to look."""
        look = partial(self._look, longest_wait, describe)
        every = min(self.after / _NAPS, _LONGEST_NAP)
        self._thread = Background("hang report", self.stop, idle=look, every=every)

    def stop(self) -> None:
        """Look no longer. Idempotent; from the thread that called `start`."""
        if self._thread is not None:
            self._thread.stop(_PATIENCE)
        self._thread = None

    def tell(self, text: str) -> None:
        """Write a report, now."""
        note = "(There is no file of it.)"
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
                    file.flush()
                    # Of all threads: on GPUs backward passes have their own.
                    faulthandler.dump_traceback(file)
                note = f"Also in {self.path}, with the Python stack."
            except OSError as error:
                note = f"(It could not be written to {self.path}: {error}.)"
                self.path = None
        sys.stderr.write(f"lightning-odc: {text}\n  {note}\n")
        sys.stderr.flush()

    def _look(self, longest_wait: Callable[[], float], describe: Describe) -> None:
        waited = longest_wait()
        if self._told and waited < self._told:
            sys.stderr.write(f"lightning-odc: rank {self._rank}: the wait is over, training continues.\n")
            self.after = max(self.after, 2 * self._told)
            self._told = 0.0
        if waited >= max(self.after, 2 * self._told):
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
            self.tell(f"ranks have been waiting for {waited:.1f} s, since {since}.\n{describe()}")
            self._told = waited
