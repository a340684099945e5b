"""Waiting that sleeps, has a deadline, and adds up: how long this rank was idle, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from lightning_odc.engine.hang_report import HangReport
from lightning_odc.engine.tracing import Traced
from lightning_odc.errors import WaitTimeoutError

_SPINS = 3
_FIRST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6
_SLEEP_FRACTION = 1 / 16
_CHECK_EVERY = 0.05


#: Added to the report of a wait that ended at its deadline while another rank was computing.
_HINT = (
    "A rank that computes for so long may itself be waiting, in a collective inside `forward` or `training_step` "
    "(`all_gather`, `all_reduce`, SyncBatchNorm, `generate(synced_gpus=True)`): ranks with different numbers of "
    "microbatches never meet there. Move it out of the microbatch, or run equally many microbatches on every rank."
)


class Cause(StrEnum):
    """Why a rank waited. *Idle* is the sum over all causes."""

    READ = "read"
    LOCK = "lock"
    SETTLE = "settle"
    LOCKSTEP = "lockstep"
    NETWORK = "network"


class Waiter(Traced):
    """Waits for other ranks, and keeps the books.

    Args:
        timeout: seconds after which a wait gives up.
        check: called about 20 times a second in every wait; raises if a peer has failed.
        report: describes where every rank is, for the message of a timeout.
        hang_report: receives a timeout, too.

    Attributes:
        seconds: idle seconds by cause since the start.
        waiting_for: while it waits, says for what.
    """

    def __init__(
        self,
        timeout: float,
        check: Callable[[], None],
        report: Callable[[], str],
        hang_report: HangReport | None = None,
    ) -> None:
        self.timeout = timeout
        self.seconds: dict[Cause, float] = dict.fromkeys(Cause, 0.0)
        self._check = check
        self.waiting_for: Callable[[], str] | None = None
        self._report = report
        self._hang_report = hang_report

    def until(
        self,
        ready: Callable[[], bool],
        cause: Cause | None,
        what: Callable[[], str],
        peer: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> float:
        """Sleep until ``ready()``; returns the seconds waited.

        Sleeps grow with the time already waited (a sixteenth of it, from 20 to 500 microseconds): a short wait
        ends within microseconds of its cause, a long one costs less than 2 percent of a core.

        Args:
            ready: Tells whether the wait is over.
            cause: What the seconds are entered as. ``None`` for this rank's own device, which is work, not idle time.
            what: Says what this rank waits for, for messages.
            peer: The rank of the job that is waited for, for traces.
            check: Raises if this wait can never end (`Peers.check_not_left`, `Peers.check_not_past`). Called as often
                as the check of all waits.

        Raises:
            WaitTimeoutError: after ``timeout`` seconds, with ``what()`` and where every rank is.
        """
        if ready():
            return 0.0
        begin = time.monotonic()
        with self.during(cause, what, peer):
            self._sleep_until(ready, what, check)
        return time.monotonic() - begin

    @contextmanager
    def during(self, cause: Cause | None, what: Callable[[], str], peer: int | None = None) -> Iterator[None]:
        """Enter the time inside as a wait. `until` does it; so does a rank in a collective, which has its own end.

        Args:
            cause: See `until`.
            what: See `until`.
            peer: See `until`.
        """
        if cause is not None and self.tracer is not None:
            self.tracer.begin_wait(str(cause))
        begin = time.monotonic_ns()
        self.waiting_for = what
        try:
            yield
        finally:  # a wait that failed was a wait, too
            self.waiting_for = None
            if cause is not None:
                self.seconds[cause] += (time.monotonic_ns() - begin) / 1e9
            if cause is not None and self.tracer is not None:
                self.tracer.record("wait", begin, cause=str(cause), peer=peer)

    def _sleep_until(
        self, ready: Callable[[], bool], what: Callable[[], str], check: Callable[[], None] | None
    ) -> None:
        begin = time.monotonic()
        next_check = begin + _CHECK_EVERY
        spins = _SPINS
        while not ready():
            now = time.monotonic()
            if now >= next_check:
                self._check_on_peers(ready, check)
                next_check = now + _CHECK_EVERY
            if now - begin > self.timeout:
                message = f"Gave up after {self.timeout:g} s of {what()}.\n{self._report()}"
                message += f"\n{_HINT}" * ("computing" in message)
                if self._hang_report is not None:
                    self._hang_report.tell(message)
                raise WaitTimeoutError(message)
            if spins > 0:
                spins -= 1
                time.sleep(0)
            else:
                time.sleep(min(_LONGEST_SLEEP, max(_FIRST_SLEEP, (now - begin) * _SLEEP_FRACTION)))

    def _check_on_peers(self, ready: Callable[[], bool], check: Callable[[], None] | None) -> None:
        # A peer may finish its part and leave between the two looks: only a wait that still fails is pointless.
        try:
            self._check()
            if check is not None:
                check()
        except Exception:
            if not ready():
                raise
