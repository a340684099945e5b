"""The protocol of on-demand communication: publish, gather, accumulate, meet.

Note [Versions instead of barriers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All shared state of optimizer step ``v`` carries the version ``v``, and ranks wait for versions, not for each other:

1. An owner *publishes*: writes its shard of a unit, then the unit's version word ``v``.
2. A reader *gathers*: waits until the version word of the peer's unit is ``v``, then copies.
3. A rank that ran its last microbatch says "done with ``v``" and waits until every peer said so: they *meet*.
4. After the meeting the owner takes the sums out of its accumulators, zeroes them, updates its shard, and
   publishes ``v + 1``.

No further barrier is needed:

- *No torn or stale read.* A shard is overwritten (4) only after every peer said "done with ``v``" (3). Between (3) and
  its own (4) a rank has no version, and may not gather (`Protocol.end_version`). The first version is 1, words start at
  0.
- *No lost or doubled add.* Gradients of ``v + 1`` exist only after a gather of ``v + 1`` of the same unit from every
  owner, which publishes it after it took out the sums of ``v``. So every unit is resharded in every step.

Note [Meetings are at most one ahead]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank posts its record of meeting ``m`` into mailbox ``m % 2``. It can post ``m + 2`` over it only after meeting
``m + 1``, to which every peer came, and a peer comes to ``m + 1`` only after it has read all records of ``m``. So two
mailboxes are enough, and no rank reads a record that is being overwritten.

Note [When the host waits for its device]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On GPUs the host only asks: copies, adds and optimizer steps are done later, in the order of their streams. Words and
mailboxes are written by the host, and must not overtake the device. There are two such places in a minibatch:

1. *Before a meeting* (`Protocol.finish`): all own reads and adds are done, on all streams. A peer overwrites its shard
   and takes its sums out as soon as it has my record. Here the host waits, once per minibatch.
2. *Before a version* (`Transport.announce`): my accumulators are zeroed and my shard is written. The host does not
   wait for that. It records an event behind the writes, and a thread writes the word when the event has happened.

The other direction needs nothing: a host reads a peer's word before it asks its device for what depends on it. Own adds
follow own reads in the order of the streams, which ``fully_shard`` keeps.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.peers import MAILBOXES, RECORD_BOXES, Activity, Peers, Signals, Word
from lightning_odc.protocol.tracing import Tracer
from lightning_odc.protocol.transports.base import Transport, UnitSpec, WindowSpec
from lightning_odc.protocol.unit_window import RankState, Traffic, UnitWindow
from lightning_odc.protocol.waiting import Cause, HangReport, Waiter

_MAILBOX_BYTES = 64 * 1024 - 8
_LENGTH_BYTES = 8
_FIRST_VERSION = 1
#: What ranks come to a meeting for that drop gradients.
DISCARD = "discard gradients"


def exchange(record: Any, most: int, meet: Callable[[bytes], list[bytes]]) -> list[Any]:
    """The records of all that ``meet``, with messages of at most so many bytes."""
    # A longer record takes several meetings in a row. Its length comes first, so after the first of them all know how
    # many more they come to.
    text = json.dumps(record).encode()
    own = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    heard = meet(own[:most])
    longest = max(int.from_bytes(begin[:_LENGTH_BYTES], "little") for begin in heard) + _LENGTH_BYTES
    for start in range(most, longest, most):
        more = meet(own[start : start + most])
        heard = [before + behind for before, behind in zip(heard, more, strict=True)]
    return [json.loads(whole[_LENGTH_BYTES:]) for whole in heard]


class Protocol(RankState):
    """One rank's side of the protocol over any `Transport`."""

    def __init__(
        self,
        transport: Transport,  # not yet opened
        units: Sequence[UnitSpec],  # what every window holds, equal on all ranks
        *,
        timeout: float,  # seconds after which any wait gives up
        deterministic: bool = False,  # one accumulator per source rank, summed in rank order
        hang_report: HangReport | None = None,
        signals: Signals | None = None,
        tracers: list[Tracer] | None = None,  # of what this rank does
        nodes: int = 1,  # how many ranks' shards this rank's window holds, one per node
        node: int = 0,  # place of this rank among them
    ) -> None:
        peers = Peers(transport, units)
        waiter = Waiter(timeout, peers.check, peers.report, hang_report, tracers)
        super().__init__(transport, _FIRST_VERSION, peers, waiter)
        self.nodes = nodes
        self.node = node
        self.device_waits = 0  # of the host for its own device, which is not idle time
        self.signals = signals or Signals()
        self.deterministic = deterministic
        self.windows: list[UnitWindow] = []  # of each unit; from `open` to `close`
        # Called where some ranks have met for `DISCARD`, with their items and what this rank came for.
        self.drop_together: Callable[[list[str], str], None] = lambda *_: None
        self._hang_report = hang_report
        self._units = tuple(units)
        self._meetings = 0
        self.queues = 0  # how often work was opened for other ranks to take; see `WorkQueues`
        self.stolen = 0  # how much of it this rank has taken from others
        self._ends = 0
        why_staged = transport.why_not_shared(self._units)
        if why_staged and not deterministic and transport.rank == 0:
            warnings.warn(
                "Gradients are added into one accumulator per source rank instead of a shared one, which takes "
                f"{transport.world_size} times the memory for accumulators: {why_staged}.",
                stacklevel=2,
            )
        sources = 1
        if deterministic or why_staged:
            sources = transport.world_size
        # The shards and the sums of the whole column, one after the other.
        of_column = [
            replace(unit, shard_numel=nodes * unit.shard_numel, grad_numel=nodes * unit.grad_numel)
            for unit in self._units
        ]
        self.spec = WindowSpec(
            units=tuple(of_column),
            words=Word.COUNT + 2 * len(self._units),
            mailboxes=MAILBOXES,
            mailbox_bytes=_MAILBOX_BYTES,
            sources=sources,
        )

    @property
    def _job_rank(self) -> int:
        return self.transport.job_rank(self.transport.rank)

    def open(self) -> None:
        """Make and attach the windows; all ranks together."""
        self.transport.open(self.spec)
        self.peers.begin(Activity.COMPUTE)
        self.transport.store(Word.VERSION, self.version)
        self.windows = [
            UnitWindow(self, index, spec, self.spec.sources) for index, spec in enumerate(self._units)
        ]
        if self._hang_report is not None:
            self._hang_report.start(self.peers.longest_wait, self._describe)

    def close(self) -> None:
        """Leave for good. Peers that still wait for this rank get an error."""
        if self._hang_report is not None:
            self._hang_report.stop()
        self.peers.leave()
        self.windows = []  # they hold views of the windows, and a window lives as long as its views
        self.transport.close()

    def total(self, unit: int) -> Tensor:
        """The gradients of the minibatch for this rank's shard of a unit, 1-D. After `end_version`, unit by unit."""
        return self.windows[unit].summed()

    def count_anew(self) -> None:
        """Count traffic and waits from 0."""
        self.traffic = Traffic()
        self.device_waits = 0
        self.waiter.seconds = dict.fromkeys(Cause, 0.0)

    def go_on_from(self, other: Protocol) -> None:
        """Take over the counts of a protocol that was closed."""
        self.traffic = other.traffic
        self.device_waits = other.device_waits
        self.waiter.seconds = other.waiter.seconds

    def finish(self) -> None:
        if self.finished or not self.transport.runs_ahead:
            return
        self.device_waits += 1
        self.waiter.until(self.transport.drain(), None, lambda: "waiting for its own device")
        self.finished = True

    def meet(self, kind: str, item: Any = None) -> list[Any]:
        """Wait until all ranks have come to this meeting; returns their JSON-serialisable items, in rank order.

        Args:
            kind: What ranks meet for, the same on all of them.
            item: What this rank tells, JSON-serialisable.
        """
        # Ranks that want to drop gradients (`DISCARD`) may come while others come for something else: see Note [Who
        # drops a gradient]. All drop them, and the others meet again for what they came for.
        while True:
            self.finish()
            records = self._exchange(kind, [kind, item, sorted(self.signals.raised)])
            kinds, items, raised = zip(*records, strict=True)
            self.signals.agreed.update(*raised)
            if DISCARD not in kinds:
                break
            dropped = [theirs for reason, theirs, _ in records if reason == DISCARD]
            self.drop_together(dropped, kind)
            if kind == DISCARD:
                return list(items)
        for peer, other in zip(self._ranks, kinds, strict=True):
            if other != kind:
                raise DisagreementError(
                    f"Rank {self._job_rank} is at {kind!r} of synchronization {self._meetings}, rank {peer} at "
                    f"{other!r}. Every rank needs the same number of Lightning batches and optimizer steps; unequal "
                    "work belongs inside a Minibatch (0 to k microbatches), and `trainer.should_stop` is set on all "
                    "ranks."
                )
        return list(items)

    @property
    def _ranks(self) -> Sequence[int]:
        """The ranks of the job that meet, in the order of their records."""
        return [self.transport.job_rank(peer) for peer in range(self.transport.world_size)]

    def _exchange(self, kind: str, record: Any) -> list[Any]:
        """The records of all ranks; see Note [Meetings are at most one ahead]. ``kind`` is for messages."""
        return exchange(record, _MAILBOX_BYTES, lambda message: self.meet_once(message, kind))

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        """`meet`, and from then on no rank uses this version any more: owners update their shards at once.

        Args:
            kind: What ranks meet for, the same on all of them.
            item: What this rank tells, JSON-serialisable.
        """
        items = self.meet(kind, item)
        self.ended = True
        return items

    def next_version(self) -> None:
        """Begin the next version, after a meeting that ended a step."""
        self.ended = False
        self.version += 1
        self.transport.store(Word.VERSION, self.version)
        self.transport.store(Word.MICROBATCH, 0)

    def announce_end(self) -> None:
        """This rank has come to the end of a batch, an epoch or training, with all that peers may wait for there."""
        self._ends += 1
        self.transport.store(Word.ENDS, self._ends)  # see Note [Who has left]

    def begin_microbatch(self, index: int) -> None:
        """Record the microbatch, for reports only."""
        self.transport.store(Word.MICROBATCH, index + 1)

    def fail(self, message: str) -> None:
        """Tell every peer that this rank has failed, and why. Of a long message, the middle is left out."""
        told = message.encode(errors="backslashreplace")
        if len(told) > _MAILBOX_BYTES:
            # It begins with who is to blame, and ends with what happened.
            gap = b"\n...\n"
            told = told[: _MAILBOX_BYTES // 2 - len(gap)] + gap + told[-_MAILBOX_BYTES // 2 :]
        self.peers.fail(told)

    def _describe(self) -> str:
        """Describe where this rank is, and where every rank is."""
        assert self._hang_report is not None
        waiting = self.waiter.waiting_for
        mine = "does not wait" if waiting is None else f"is {waiting()}"
        place = self._hang_report.place()
        return f"  This is rank {self._job_rank}{place}; it {mine}.\n{self.peers.report()}"

    def meet_once(self, message: bytes, kind: str) -> list[bytes]:
        """The messages of all ranks that share windows, in rank order; none is longer than a mailbox.

        Args:
            message: It fits into a mailbox.
            kind: What ranks meet for, for messages.
        """
        self._meetings += 1
        box = self._meetings % RECORD_BOXES
        self.peers.begin(Activity.MEET)
        self.transport.post(box, message)
        self.transport.store(Word.MEETING, self._meetings)
        place = f"at synchronization {self._meetings} ({kind})"
        self.await_all(
            Word.MEETING, self._meetings, place, lambda _: self.peers.check_not_past(place=f" {place}")
        )
        messages = [self.transport.fetch(peer, box) for peer in range(self.transport.world_size)]
        self.peers.begin(Activity.COMPUTE)
        return messages
