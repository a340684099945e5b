"""Work stealing: a rank that has finished runs microbatches, or samples prompts, that a loaded peer has not begun.

Note [Every microbatch runs exactly once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank's microbatches are a queue: its owner takes from the front, thieves take from the back. One word of the
owner's window holds front, back and the number of the minibatch. It is changed under one lock, so no microbatch is
taken twice. The owner comes to the meeting only when its queue is empty, so none is left.

Two ranks, costs ``[[1], [5, 4, 3, 2]]`` (in seconds, say), minibatch number 7. The queue of rank 1::

    front back  left         time
      0    4    0, 1, 2, 3    0   rank 1 opens its queue: the word is 7 << 24 | 0 << 12 | 4
      1    4    1, 2, 3       0   rank 1 takes 0, rank 0 its only one
      1    3    1, 2          1   rank 0 is done. Rank 1 has 5 / 2 + 4 + 3 + 2 = 11.5 s to go (half of what is under
                                  way counts as done), and number 3 takes 2 s here: rank 0 takes it
      1    2    1             3   2.5 + 4 + 3 = 9.5 s there, number 2 takes 3 s here: rank 0 takes it
      2    2    none          5   rank 1 takes 1; rank 0, done at 6, finds the queue empty and goes to the meeting

Rank 1 is done at 9 instead of 14. Prompts to be sampled are such queues, too, also under ``deterministic=True``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_odc.protocol.peers import Word
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.sample_group import Claims, SampleGroup
from lightning_odc.protocol.waiting import Cause

Costs = Sequence[Sequence[float]]
"""The costs of items, by place, in any unit."""

_BITS = 12
_MASK = (1 << _BITS) - 1

#: A steal must shorten the victim's remaining time by at least this fraction, or it does not pay.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Queue:
    """A rank's microbatches at one moment: ``front`` to ``back - 1`` are not begun."""

    front: int
    back: int


class WorkQueues:
    """All ranks' queues of a minibatch, or of prompts to be sampled: see Note [Every microbatch runs exactly once]."""

    def __init__(self, protocol: Protocol, number: int, costs: Costs) -> None:
        if max(map(len, costs)) > _MASK:
            raise ValueError(
                f"Stealing works with up to {_MASK} microbatches per rank, or prompts: use larger microbatches, or "
                "batches of prompts."
            )
        self._protocol = protocol
        self._transport = protocol.transport
        self._number = number  # of these queues, counted from 1 on every rank
        self._costs = costs  # planned, of every microbatch or prompt, by rank, in any unit
        self._rank = protocol.transport.rank
        self._write(self._rank, Queue(0, len(costs[self._rank])))

    def take(self) -> int | None:
        """The next microbatch of this rank's own, if one is left."""
        with self._locked(self._rank) as queue:
            if queue.front >= queue.back:
                return None
            self._write(self._rank, Queue(queue.front + 1, queue.back))
            return queue.front

    def steal(self) -> tuple[int, int] | None:
        """Rank and number of a microbatch that is better run here, if there is one."""
        # A peer that has not come so far has a queue yet to show, and there is nothing else to do meanwhile.
        opened = self._number << (2 * _BITS)
        check = self._protocol.peers.check_not_past
        self._protocol.await_all(Word.CLAIM, opened, "to open its queue", check)
        while True:
            victim = self._most_loaded()
            if victim is None:
                return None
            with self._locked(victim) as queue:
                if self._pays(victim, queue):  # still
                    last = queue.back - 1
                    self._write(victim, Queue(queue.front, last))
                    return victim, last

    def _most_loaded(self) -> int | None:
        """The peer with the most work left, of those from which it pays to steal."""
        loaded = []
        for peer in range(len(self._costs)):
            if peer == self._rank:
                continue
            queue = self._read(peer)
            if self._pays(peer, queue):
                loaded.append((self._remaining(peer, queue), peer))
        if not loaded:
            return None
        _, victim = max(loaded)
        return victim

    def report_rate(self, seconds_per_cost: float) -> None:
        """Tell the peers how fast this rank works, so that they know whether stealing pays."""
        (word,) = struct.unpack("<q", struct.pack("<d", seconds_per_cost))
        self._transport.store(Word.RATE, word)

    def claims(self) -> Claims:
        """Rank and number of all that this rank is to run: its own, then what it steals."""
        for number in iter(self.take, None):
            yield self._rank, number
        yield from iter(self.steal, None)

    def _pays(self, victim: int, queue: Queue) -> bool:
        """Whether this rank would finish the victim's last microbatch before the victim finished everything."""
        if queue.front >= queue.back:
            return False
        here = self._costs[victim][queue.back - 1] * self._rate(self._rank)  # in the example 2 < 11.5 * 0.98
        return here < self._remaining(victim, queue) * (1 - _LEAST_GAIN)

    def _remaining(self, rank: int, queue: Queue) -> float:
        """Seconds until a rank has run its queue; of the microbatch under way half is taken as done."""
        costs = self._costs[rank]
        left = sum(costs[queue.front : queue.back])
        if queue.front:
            left += costs[queue.front - 1] / 2  # in the example 5 / 2
        return left * self._rate(rank)

    def _rate(self, rank: int) -> float:
        """Measured seconds per cost; ranks that have measured nothing yet count as average."""
        words = [self._transport.load(peer, Word.RATE) for peer in range(len(self._costs))]
        rates: list[float] = [struct.unpack("<d", struct.pack("<q", word))[0] for word in words]
        known = [rate for rate in rates if rate] or [1.0]
        return rates[rank] or sum(known) / len(known)

    @contextmanager
    def _locked(self, owner: int) -> Iterator[Queue]:
        """A queue, which changes by this rank alone in this context. One of another minibatch is empty here."""
        transport = self._transport
        lock = transport.lock(owner, len(self._protocol.windows))
        self._protocol.waiter.until(
            lock.take,
            Cause.LOCK,
            lambda: f"waiting to look at the queue of {transport.describe(owner)}",
            transport.job_rank(owner),
        )
        try:
            yield self._read(owner)
        finally:
            lock.give()

    def _read(self, owner: int) -> Queue:
        # Number of the minibatch, 12 bits of front, 12 bits of back.
        word = self._transport.load(owner, Word.CLAIM)
        if word >> (2 * _BITS) != self._number:
            return Queue(0, 0)
        return Queue(word >> _BITS & _MASK, word & _MASK)

    def _write(self, owner: int, queue: Queue) -> None:
        word = self._number << (2 * _BITS) | queue.front << _BITS | queue.back
        self._transport.store(Word.CLAIM, word, owner)


def claims(
    protocol: Protocol,
    costs: Costs,
    trains: bool = False,
    sample_group: SampleGroup | None = None,
) -> Claims:
    """Place and number of all items for this rank to do: its own, then those of loaded peers of its node.

    Args:
        protocol: It has been opened.
        costs: The cost of every item, by place.
        trains: Whether items are microbatches, from whose time peers learn how fast this rank is.
        sample_group: Ranks that run the same microbatches as this one.
    """
    if trains and protocol.deterministic:
        raise ValueError(
            "Stealing decides by time who runs a microbatch, and so the order of sums, which deterministic=True "
            'fixes. Use BalancedDataLoader(balance="lb_mini"), the same plan without stealing, or '
            "ODCStrategy(deterministic=False)."
        )
    transport = protocol.transport
    places = [transport.job_rank(peer) for peer in range(transport.world_size)]
    size = 1
    if len(costs) <= len(places):  # else ranks of other nodes have places, too
        size = len(places) // len(costs)
        places = list(range(len(costs)))
    by_rank = []
    for place in places:
        by_rank.append(costs[place])
        by_rank += [[]] * (size - 1)  # of ranks that compute a sample together, the first has the queue
    protocol.queues += 1
    # Opened before anything is taken, so that peers can help a rank that takes nothing itself.
    queues = WorkQueues(protocol, protocol.queues, by_rank)
    claimed = queues.claims()
    if sample_group is not None:
        claimed = sample_group.follow(claimed)

    def now() -> float:
        """Seconds of a clock that stands still while this rank waits."""
        return time.monotonic() - sum(protocol.waiter.seconds.values())

    def taken() -> Claims:
        seconds = cost = 0.0  # own work, and its planned cost
        for rank, number in claimed:
            protocol.peers.check()
            place = places[rank // size]
            protocol.stolen += rank // size != transport.rank // size
            begin = now()
            yield place, number
            protocol.finish()  # a host that runs ahead would claim all there is before its device has begun
            seconds += now() - begin
            cost += costs[place][number]
            if trains and cost:
                queues.report_rate(seconds / cost)

    return taken()
