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

- *No torn or stale read.* A shard is overwritten (4) only after every peer said "done with ``v``" (3), and a peer that
  said so reads no more of version ``v``: between (3) and its own (4) a rank has no version, and may not gather
  (`Protocol.end_version`). The first version is 1 while words start at 0, so nothing reads a shard that was never
  written.
- *No lost or doubled add.* Gradients of ``v + 1`` exist only after a gather of version ``v + 1`` of the same unit from
  every owner, and an owner publishes that version after it took out and zeroed the sums of ``v``. This needs every
  unit to be resharded, hence gathered again, in every step (see ``OnDemandEngine.publish``).

Note [Meetings are at most one ahead]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank posts its record of meeting ``m`` into mailbox ``m % 2``. It can post ``m + 2`` over it only after meeting
``m + 1``, to which every peer came, and a peer comes to ``m + 1`` only after it has read all records of ``m``. So two
mailboxes are enough, and nobody reads a record that is being overwritten.

A record that is longer than a mailbox takes several meetings in a row, one for each part. Its length comes first, so
after the first of them every rank knows the longest record and with it how many more meetings all come to; a rank with
nothing left to say posts nothing into its mailbox.

Note [When the host waits for its device]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On GPUs the host only asks: copies, adds and optimizer steps are done later, in the order of their streams. Words and
mailboxes are written by the host. So wherever Note [Versions instead of barriers] says that something is announced
*after* something was done, the host's word must not overtake the device. There are two such places in a minibatch:

1. *Before a meeting* (`Protocol.finish`): all own reads and adds are done, on all streams. A peer overwrites its shard
   and takes its sums out as soon as it has my record. This is where the host waits, once per minibatch. It would wait
   here anyway, for its peers, and everything that it wants to know of the step (losses, counts, comparisons of
   contents) can be read then.
2. *Before a version* (`Transport.announce`): my accumulators are zeroed and my shard is written. Nobody here needs to
   wait for that: an event is recorded behind the writes, and a thread writes the word when the event has happened,
   while the host prepares the next minibatch.

The other direction needs nothing: a peer's word is read by the host before it asks its device for anything that
depends on it, and what the word announces was done on the other device before it was written. Between an own read of a
version and the own adds that follow from it the order is that of the streams, which ``fully_shard`` keeps.

Everything that is written into a window outside of `Protocol.gather` and `Protocol.accumulate` is written on the stream
that is current when the next announcement or meeting is, which for a training loop is always the same one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_odc.engine.hang_report import HangReport
from lightning_odc.engine.peers import Activity, Peers, Word
from lightning_odc.engine.signals import Signals
from lightning_odc.engine.tracing import Traced, Tracer
from lightning_odc.engine.transports.base import Segment, Transport, UnitSpec, WindowSpec
from lightning_odc.engine.waiting import Cause, Waiter
from lightning_odc.errors import DisagreementError, StaleShardError

Record = dict[str, Any]

_RECORD_BOXES = 2
_MAILBOXES = _RECORD_BOXES + 1  # the last one is for failures
_MAILBOX_BYTES = 64 * 1024 - 8
_LENGTH_BYTES = 8
_FIRST_VERSION = 1
_SIGNALS = "signals"


class Protocol(Traced):
    """One rank's side of the protocol over any `Transport`.

    Args:
        transport: not yet opened.
        units: what every window holds, equal on all ranks.
        timeout: seconds after which any wait gives up.
        deterministic: keep one accumulator per source rank and sum them in rank order.
        lockstep: put a barrier at every gather and every accumulate: the control experiment that has this
            transport's cheap bytes and a collective's waits.
        hang_report: says where this rank is when ranks have waited for long.

    Attributes:
        lockstep: the same, for as long as all ranks run the same microbatches.
        version: the version this rank works on, from 1.
        deterministic: sums are taken in rank order.
        peers: how the ranks are.
        signals: what this rank and the others were sent by the operating system.
        waiter: idle seconds by cause.
        bytes_read: bytes copied out of peers' windows so far.
        bytes_added: bytes of gradients added into windows of peers and own.
        bytes_reduced: bytes of gradients summed over nodes so far.
        reads: number of shards read from peers.
        adds: number of gradient chunks added into peers' accumulators.
        device_waits: how often the host waited for its own device, which is not idle time.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[UnitSpec],
        *,
        timeout: float,
        deterministic: bool = False,
        lockstep: bool = False,
        hang_report: HangReport | None = None,
    ) -> None:
        self.lockstep = lockstep
        self.transport = transport
        self.version = _FIRST_VERSION
        self.bytes_read = self.bytes_added = self.bytes_reduced = self.reads = self.adds = (
            self.device_waits
        ) = 0
        self.signals = Signals()
        self.peers = Peers(transport, units)
        self.waiter = Waiter(timeout, self.peers.check, self.peers.report, hang_report)
        self._hang_report = hang_report
        self._units = tuple(units)
        self.deterministic = deterministic
        self._barriers = 0
        self._meetings = 0
        self._ends = 0
        self._ended = False
        self._finished = False
        world = transport.world_size
        self._readers_order = [(transport.rank + i) % world for i in range(1, world)]
        self._adders_order = [(transport.rank + i) % world for i in range(world)]
        self._spec = WindowSpec(
            units=self._units,
            words=Word.COUNT + len(self._units),
            mailboxes=_MAILBOXES,
            mailbox_bytes=_MAILBOX_BYTES,
            sources=world if self._is_staged() else 1,
        )

    @property
    def _job_rank(self) -> int:
        return self.transport.job_rank(self.transport.rank)

    @property
    def window_bytes(self) -> int:
        """Size of this rank's window."""
        return self._spec.total_bytes

    def listen(self, tracer: Tracer | None) -> None:
        """Let somebody trace what this rank does, or nobody."""
        self.tracer = self.waiter.tracer = tracer

    def open(self) -> None:
        """Make and attach the windows; all ranks together."""
        self.transport.open(self._spec)
        if self._hang_report is not None:
            self._hang_report.start(self.peers.longest_wait, self._describe)

    def close(self) -> None:
        """Leave for good. Peers that still wait for this rank are told so."""
        if self._hang_report is not None:
            self._hang_report.stop()
        self.peers.leave()
        self.transport.close()

    def _is_staged(self) -> bool:
        """Whether every source rank gets accumulators of its own."""
        reason = self.transport.why_not_shared(self._units)
        if reason and not self.deterministic and self.transport.rank == 0:
            warnings.warn(
                "Gradients are added into one accumulator per source rank instead of a shared one, which takes "
                f"{self.transport.world_size} times the memory for accumulators: {reason}.",
                stacklevel=2,
            )
        return self.deterministic or bool(reason)

    # -- the data plane -----------------------------------------------------------------------------------

    def own_shard(self, unit: int) -> Tensor:
        """The place to write this rank's shard of ``unit`` before `publish`."""
        return self.transport.shard(self.transport.rank, unit)

    def publish(self, unit: int) -> None:
        """Make `own_shard` readable as the current version. See Note [Versions instead of barriers]."""
        self._finished = False
        self.transport.announce(Word.COUNT + unit, self.version)

    def gather(self, unit: int, out: Tensor) -> None:
        """Fill the peers' slices of ``out`` (shape ``[world_size, shard_numel]``) with their current shards.

        Raises:
            StaleShardError: between `end_version` and `next_version`.
        """
        self.check_not_ended(unit)
        self._finished = False
        begin = self.peers.begin(Activity.GATHER, unit)
        if self.lockstep:
            self._barrier()
        rows = out.unbind()
        for owner in self._readers_order:
            self._await_version(owner, unit)
            self.transport.read(owner, unit, rows[owner])
        self.reads += len(self._readers_order)
        self.bytes_read += len(self._readers_order) * self._units[unit].shard_bytes
        self.peers.begin(Activity.COMPUTE, unit)
        if self.tracer is not None:
            self.tracer.record("read", begin, unit=self._units[unit].name)

    def accumulate(self, unit: int, chunks: Tensor, segments: Sequence[Segment]) -> None:
        """Add row ``p`` of ``chunks`` (shape ``[world_size, numel]``) into rank ``p``'s accumulator of ``unit``.

        Starts with its own and goes round; an owner whose lock is taken is passed over and tried again later.

        Raises:
            StaleShardError: between `end_version` and `next_version`.
        """
        self.check_not_ended(unit)
        self._finished = False
        begin = self.peers.begin(Activity.ACCUMULATE, unit)
        rows = chunks.unbind()
        if self._spec.sources > 1 or not self.transport.needs_locks:
            self._add_in_turn(unit, rows, segments)
        else:
            self._add_under_locks(unit, rows, segments)
        self.adds += len(self._readers_order)
        self.bytes_added += chunks.numel() * chunks.element_size()
        if self.lockstep:
            self._barrier()
        self.peers.begin(Activity.COMPUTE, unit)
        if self.tracer is not None:
            self.tracer.record("add", begin, unit=self._units[unit].name)

    def summed(self, unit: int) -> Tensor:
        """The gradients that all ranks added for this rank's shard of ``unit``: 1-D, ``grad_numel`` elements.

        Read it only between `end_version` and `clear`. Summed in rank order if ``deterministic``, else a view.
        """
        rank = self.transport.rank
        total = self.transport.accumulator(rank, unit)
        if self._spec.sources > 1:
            total = total.clone()
            for source in range(1, self._spec.sources):
                total += self.transport.accumulator(rank, unit, source)
        return total

    def total(self, unit: int) -> Tensor:
        """The gradients of the whole minibatch for this rank's shard of ``unit``, once after `end_version`."""
        return self.summed(unit)

    def clear(self, unit: int, start: int = 0, numel: int | None = None) -> None:
        """Zero this rank's accumulators of ``unit``, or a part of them, before the next `publish`."""
        self._finished = False
        end = None if numel is None else start + numel
        for source in range(self._spec.sources):
            self.transport.accumulator(self.transport.rank, unit, source)[start:end].zero_()

    def own_accumulator(self, unit: int) -> Tensor:
        """The accumulator of this rank's own gradients for its shard of ``unit``; others may add to the same one."""
        rank = self.transport.rank
        return self.transport.accumulator(rank, unit, rank if self._spec.sources > 1 else 0)

    def go_on_from(self, other: Protocol) -> None:
        """Take over the books and the listener of a protocol that was closed."""
        self.reads, self.adds = other.reads, other.adds
        self.bytes_read, self.bytes_added = other.bytes_read, other.bytes_added
        self.signals = other.signals
        self.bytes_reduced = other.bytes_reduced
        self.device_waits = other.device_waits
        for cause, seconds in other.waiter.seconds.items():
            self.waiter.seconds[cause] += seconds
        self.listen(other.tracer)

    def _await_version(self, owner: int, unit: int) -> None:
        word, version, load = Word.COUNT + unit, self.version, self.transport.load
        if load(owner, word) == version:
            return
        self.waiter.until(
            lambda: load(owner, word) >= version,
            Cause.READ,
            lambda: (
                f"waiting to read unit {self._units[unit].name!r} (version {version}) "
                f"from {self.transport.describe(owner)}"
            ),
            self.transport.job_rank(owner),
            lambda: self.peers.check_not_left(owner),
        )
        found = load(owner, word)
        if found != version:
            raise DisagreementError(
                f"Rank {self.transport.job_rank(owner)} has published version {found} of unit "
                f"{self._units[unit].name!r} while rank {self._job_rank} still works on version {version}: the ranks "
                "took different numbers of optimizer steps. Every rank must call the same optimizer steps in the same "
                "order."
            )

    def _add_in_turn(self, unit: int, chunks: Sequence[Tensor], segments: Sequence[Segment]) -> None:
        source = self.transport.rank if self._spec.sources > 1 else 0
        for owner in self._adders_order:
            self.transport.add(owner, unit, chunks[owner], segments, source)

    def _add_under_locks(self, unit: int, chunks: Sequence[Tensor], segments: Sequence[Segment]) -> None:
        waiting = self._add_where_free(self._adders_order, unit, chunks, segments)
        while waiting:
            self._await_any_lock(unit, waiting)
            waiting = self._add_where_free(waiting, unit, chunks, segments)

    def _add_where_free(
        self, owners: list[int], unit: int, chunks: Sequence[Tensor], segments: Sequence[Segment]
    ) -> list[int]:
        """Returns the owners that are left, because others hold their locks."""
        taken = []
        for owner in owners:
            if not self.transport.try_lock(owner, unit):
                taken.append(owner)
                continue
            try:
                self.transport.add(owner, unit, chunks[owner], segments)
            finally:
                self.transport.unlock(owner, unit)
        return taken

    def _await_any_lock(self, unit: int, owners: list[int]) -> None:
        """Sleep until one of the owners' locks is free, without keeping it."""

        def free() -> bool:
            for owner in owners:
                if self.transport.try_lock(owner, unit):
                    self.transport.unlock(owner, unit)
                    return True
            return False

        names = ", ".join(self.transport.describe(owner) for owner in owners)
        self.waiter.until(
            free,
            Cause.LOCK,
            lambda: f"waiting to add gradients of unit {self._units[unit].name!r} to {names}",
            self.transport.job_rank(owners[0]),
        )

    def _barrier(self) -> None:
        self.finish()
        self._barriers += 1
        self.transport.store(Word.LOCKSTEP, self._barriers)
        for peer in self._readers_order:
            self.waiter.until(
                lambda peer=peer: self.transport.load(peer, Word.LOCKSTEP) >= self._barriers,  # type: ignore[misc]
                Cause.LOCKSTEP,
                lambda peer=peer: f"waiting in lockstep for {self.transport.describe(peer)}",  # type: ignore[misc]
                self.transport.job_rank(peer),
                self.peers.check_none_past,
            )

    # -- the control plane --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until what this rank has asked of its device is done. See Note [When the host waits for its device]."""
        if self._finished or not self.transport.runs_ahead:
            return
        self.device_waits += 1
        self.waiter.until(self.transport.drain(), None, lambda: "waiting for its own device")
        self._finished = True

    def meet(self, record: Record) -> list[Record]:
        """Wait until every rank has come to this meeting; returns everybody's record, in rank order.

        Args:
            record: JSON-serialisable; ``record["kind"]`` must be the same on every rank.

        Raises:
            DisagreementError: the ranks met for different reasons.
        """
        self.finish()
        signals = sorted(self.signals.raised)
        records = self._exchange({**record, _SIGNALS: signals} if signals else record)
        self.signals.agreed.update(*(said.pop(_SIGNALS, ()) for said in records))
        records[self._ranks.index(self._job_rank)] = record
        self._agree({rank: r["kind"] for rank, r in zip(self._ranks, records, strict=True)})
        return records

    @property
    def _ranks(self) -> Sequence[int]:
        """Who meets, as ranks of the job, in the order of their records."""
        return [self.transport.job_rank(peer) for peer in range(self.transport.world_size)]

    def _exchange(self, record: Record) -> list[Record]:
        """Everybody's record; see Note [Meetings are at most one ahead]."""
        message = json.dumps(record).encode()
        said = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        heard = self._meet_once(said[:_MAILBOX_BYTES], record)
        longest = max(int.from_bytes(part[:_LENGTH_BYTES], "little") for part in heard) + _LENGTH_BYTES
        for start in range(_MAILBOX_BYTES, longest, _MAILBOX_BYTES):
            parts = self._meet_once(said[start : start + _MAILBOX_BYTES], record)
            heard = [before + part for before, part in zip(heard, parts, strict=True)]
        return [json.loads(part[_LENGTH_BYTES:]) for part in heard]

    def end_version(self, record: Record) -> list[Record]:
        """`meet`, and from then on nobody uses this version any more: owners update their shards at once."""
        records = self.meet(record)
        self._ended = True
        return records

    def check_not_ended(self, unit: int) -> None:
        """Refuse to use a version that has ended.

        Raises:
            StaleShardError: between `end_version` and `next_version`.
        """
        if self._ended:
            raise StaleShardError(
                f"The model ran (unit {self._units[unit].name!r}) between the end of an optimizer step and its "
                "publishing, while peers change their shards. Run it before or after `optimizer.step()`, not in hooks "
                "in between such as `on_before_optimizer_step`. To leave out a step after `settle_gradients()`, call "
                "`optimizer.zero_grad()` and `trainer.strategy.publish_parameters()` instead. Optimizers that call "
                "their closure several times in one step (LBFGS) cannot work on demand: use one that calls it once, "
                "such as AdamW."
            )

    def next_version(self) -> None:
        """After a meeting that ended a step: from now on this rank works on the next version."""
        self._ended = False
        self.version += 1
        self.transport.store(Word.VERSION, self.version)
        self.transport.store(Word.MICROBATCH, 0)

    def come_to_end(self) -> None:
        """This rank has come to the end of a batch, an epoch or training, with all that peers may wait for there."""
        self._ends += 1
        self.peers.come_to_end(self._ends)

    def begin_microbatch(self, index: int) -> None:
        """For reports only."""
        self.transport.store(Word.MICROBATCH, index + 1)

    def fail(self, message: str) -> None:
        """Tell every peer that this rank has failed, and why."""
        self.peers.fail(message.encode()[-_MAILBOX_BYTES:])

    def _describe(self) -> str:
        """Where this rank is, and where every rank is."""
        assert self._hang_report is not None
        waiting = self.waiter.waiting_for
        mine = "does not wait" if waiting is None else f"is {waiting()}"
        place, report = self._hang_report.place(), self.peers.report()
        return f"  This is rank {self._job_rank}{place}; it {mine}.\n{report}"

    def _meet_once(self, message: bytes, record: Record) -> list[bytes]:
        """Everybody's message, in rank order; none is longer than a mailbox."""
        self._meetings += 1
        box = self._meetings % _RECORD_BOXES
        self.peers.begin(Activity.MEET)
        self.transport.post(box, message)
        self.transport.store(Word.MEETING, self._meetings)
        for peer in self._readers_order:
            self._await_meeting(peer, record)
        messages = [
            message if peer == self.transport.rank else self.transport.fetch(peer, box)
            for peer in range(self.transport.world_size)
        ]
        self.peers.begin(Activity.COMPUTE)
        return messages

    def _await_meeting(self, peer: int, record: Record) -> None:
        self.waiter.until(
            lambda: self.transport.load(peer, Word.MEETING) >= self._meetings,
            Cause.SETTLE,
            lambda: (
                f"waiting for {self.transport.describe(peer)} at meeting {self._meetings} ({record['kind']})"
            ),
            self.transport.job_rank(peer),
            self.peers.check_none_past,
        )

    def _agree(self, kinds: dict[int, Any]) -> None:
        """Compare for what ranks (of the job) have come to this meeting."""
        mine = kinds[self._job_rank]
        for peer, kind in kinds.items():
            if kind != mine:
                raise DisagreementError(
                    f"Rank {self._job_rank} is at {mine!r} of meeting {self._meetings}, rank {peer} at {kind!r}. "
                    "Every rank needs the same number of Lightning batches and optimizer steps; unequal work belongs "
                    "inside a Minibatch (0 to k microbatches)."
                )
