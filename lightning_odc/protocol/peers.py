"""How the ranks are: what each of them does, whether it still takes part, which signals it was sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from lightning_odc.errors import DisagreementError, PeerFailedError
from lightning_odc.host_memory import Kills
from lightning_odc.protocol.transports.base import Transport, UnitSpec
from lightning_odc.protocol.waiting import Describe


@dataclass
class Signals:
    """Signals of the operating system, which ranks act on together."""

    raised: set[int] = field(default_factory=set)  # numbers of this rank's own, told at every meeting
    agreed: set[int] = field(default_factory=set)  # of any rank, at the last meeting; equal on all ranks

    def forget(self, number: int) -> None:
        """All ranks have acted on it."""
        self.raised.discard(number)
        self.agreed.discard(number)


#: Mailboxes of a rank: two for records (see Note [Meetings are at most one ahead]), one for the message of a failure.
RECORD_BOXES = 2
FAILURE_BOX = RECORD_BOXES
MAILBOXES = FAILURE_BOX + 1

#: How the failure message of a rank begins that stopped only because another one had failed.
FOLLOWED = "stopped after a peer: "


class Word(IntEnum):
    """Control words of a rank, before two per unit: its version, and that in which frozen parameters changed last."""

    MEETING = 0  # number of the last meeting this rank came to
    STATE = 1  # a State
    VERSION = 2  # for reports: the version this rank works on
    DOING = 3  # for reports: an Activity, its unit and when it began; see `Doing`
    MICROBATCH = 4  # for reports: microbatches begun in this minibatch
    RATE = 5  # measured seconds per planned cost, as the bits of a float: for stealing
    ENDS = 6  # of batches, epochs and training, that this rank has come to
    CLAIM = 7  # what is left of its queue, which others change, too: see `WorkQueues`
    COUNT = 8


_DOING = int(Word.DOING)  # an attribute of an enumeration is slow to look up, and this word is written most


class State(IntEnum):
    """Whether a rank still takes part."""

    RUNNING = 0
    LEFT = 1
    FAILED = 2


class Activity(IntEnum):
    """What a rank does, for reports."""

    COMPUTE = 0
    GATHER = 1
    ACCUMULATE = 2
    MEET = 3
    NETWORK = 4


class Doing(NamedTuple):
    """The activity of a rank, in one control word. It is written several times per unit and microbatch."""

    activity: Activity
    unit: int  # number of the unit, below 2**21
    since: int  # begin in milliseconds of the monotonic clock, below 2**39 (17 years)

    @classmethod
    def of(cls, word: int) -> Doing:
        return cls(Activity(word & 7), word >> 3 & 0x1FFFFF, word >> 24)

    @staticmethod
    def word(activity: Activity, unit: int, nanoseconds: int) -> int:
        return nanoseconds // 1_000_000 << 24 | unit << 3 | activity

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return max(time.monotonic_ns() // 1_000_000 - self.since, 0) / 1e3


_ACTIVITY_TEXT = {
    Activity.COMPUTE: "computing (last communicated for unit {unit!r})",
    Activity.GATHER: "reading shards of unit {unit!r}",
    Activity.ACCUMULATE: "adding gradients of unit {unit!r}",
    Activity.MEET: "waiting until all ranks synchronize",
    Activity.NETWORK: "waiting for other nodes, for unit {unit!r}",
}


class Peers:
    """The state that this rank shows the others, and what it knows of them."""

    def __init__(self, transport: Transport, units: Sequence[UnitSpec]) -> None:
        self._transport = transport
        self._units = units
        self.beyond: Describe = str  # trouble with ranks that share no windows with this one
        self._kills = Kills()
        self._others = [rank for rank in range(transport.world_size) if rank != transport.rank]

    def begin(self, activity: Activity, unit: int = 0) -> None:
        """This rank begins to do something else."""
        self._transport.store(_DOING, Doing.word(activity, unit, time.monotonic_ns()))

    def fail(self, message: bytes) -> None:
        """This rank has failed; ``message`` says why and fits its mailbox."""
        if self._state(self._transport.rank) == State.RUNNING:
            self._transport.post(FAILURE_BOX, message)
            self._transport.store(Word.STATE, State.FAILED)

    def leave(self) -> None:
        """This rank is done, unless it had failed."""
        if self._state(self._transport.rank) == State.RUNNING:
            self._transport.store(Word.STATE, State.LEFT)

    def failures(self) -> dict[int, str]:
        """Messages of the peers that have failed so far. Once this rank has closed its windows, there are none."""
        messages = {}
        for peer in self._others:
            if self._state(peer) == State.FAILED:
                messages[peer] = self._transport.fetch(peer, FAILURE_BOX).decode(errors="replace")
        return messages

    def check(self) -> None:
        """Find out whether all peers are alive and well."""
        trouble = self.trouble()
        if trouble:
            raise PeerFailedError(trouble)

    def check_not_left(self, *peers: int) -> None:
        """Find out whether these peers still take part. See Note [Who has left]."""
        for peer in peers:
            if self._state(peer) != State.LEFT:
                continue
            gone, own = self._job_ranks(peer)
            raise PeerFailedError(
                f"Rank {gone} has left the training while rank {own} still needs it. Every rank needs the same number "
                "of Lightning batches and optimizer steps."
            )

    def check_not_past(self, *peers: int, place: str = "") -> None:
        """Find out whether these peers, by default all, can still come to this place. See Note [Who has left]."""
        peers = peers or tuple(self._others)
        self.check_not_left(*peers)
        ended = self._transport.load(self._transport.rank, Word.ENDS)
        for peer in peers:
            if self._transport.load(peer, Word.ENDS) > ended:
                gone, own = self._job_ranks(peer)
                raise DisagreementError(
                    f"Rank {gone} has ended a batch or an epoch in which rank {own} waits for it{place}. Every rank "
                    "must call the same optimizer steps in the same batches, and leave the loop together with all "
                    "others."
                )

    def _job_ranks(self, peer: int) -> tuple[int, int]:
        """The ranks of a peer and of this process in the job."""
        return self._transport.job_rank(peer), self._transport.job_rank(self._transport.rank)

    def trouble(self) -> str:
        """Which rank failed or died first, and of what as far as it is known; empty if none did."""
        return self.trouble_here() or self.beyond()

    def trouble_here(self) -> str:
        """`trouble` with the peers, which share windows with this rank."""
        ended = self._transport.dead_peers()  # the failures later: who failed says so before it ends
        failures = self.failures()
        # The first to fail, or to die, has the reason that matters; the others only followed it.
        first = [peer for peer, message in failures.items() if not message.startswith(FOLLOWED)]
        dead = [peer for peer in ended if self._state(peer) != State.LEFT and peer not in failures]
        if dead and not first:
            names = ", ".join(self._transport.describe(peer) for peer in dead)
            endings = [self._transport.how_ended(peer) or "unknown" for peer in dead]
            how = f"(killed, out of memory, or crashed). How it ended: {', '.join(endings)}."
            verdict = self._kills.verdict()  # see Note [Whom the kernel ended]
            return f"{names} ended without an error message {how} {verdict}".rstrip() + f"\n{self.report()}"
        for peer in [*first, *failures]:
            failed, own = self._job_ranks(peer)
            return f"Rank {failed} failed, so rank {own} stops too. Its error was:\n{failures[peer]}"
        return ""

    def longest_wait(self) -> float:
        """Seconds for which some rank has been communicating, which in effect is waiting, by now."""
        longest = 0.0
        for rank in range(self._transport.world_size):
            if self._state(rank) != State.RUNNING:
                continue
            doing = Doing.of(self._transport.load(rank, Word.DOING))
            if doing.activity != Activity.COMPUTE:
                longest = max(longest, doing.seconds)
        return longest

    def report(self) -> str:
        """A report on every rank: version, microbatch, activity, and its time."""
        transport = self._transport
        lines = []
        for rank in range(transport.world_size):
            name = transport.describe(rank)
            if rank == transport.rank:
                name = f"rank {transport.job_rank(rank)} (this one)"
            state = self._state(rank)
            if state != State.RUNNING:
                lines.append(f"  {name}: has {State(state).name.lower()}")
                continue
            version = transport.load(rank, Word.VERSION)
            microbatch = transport.load(rank, Word.MICROBATCH)
            doing = Doing.of(transport.load(rank, Word.DOING))
            text = _ACTIVITY_TEXT[doing.activity].format(unit=self._units[doing.unit].name)
            step = f"version {version}, microbatch {microbatch}"
            lines.append(f"  {name}: {step}, {text} for {doing.seconds:.1f} s")
        return "\n".join(lines)

    def _state(self, rank: int) -> int:
        try:
            return self._transport.load(rank, Word.STATE)
        except LookupError:  # windows are not open yet, or not any more
            return State.LEFT
