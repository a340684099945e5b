"""One unit in the windows of all ranks: publish, gather, accumulate, sum. Everything that repeats is prepared once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_odc.engine.peers import Activity, Peers, Word
from lightning_odc.engine.tracing import Traced
from lightning_odc.engine.transports.base import Lock, Segment, Transport, UnitSpec
from lightning_odc.engine.waiting import Cause, Waiter
from lightning_odc.errors import DisagreementError, StaleShardError

#: Up to so many bytes a unit is read by one call, own shard included: calls take longer than copying.
_SMALL = 64 * 1024


@dataclass
class Traffic:
    """What went over the transport so far, on this rank.

    Attributes:
        reads: Shards read from peers.
        adds: Gradient chunks added into peers' accumulators.
        bytes_read: Bytes copied out of peers' windows.
        bytes_added: Bytes of gradients added into the windows of peers and into the own one.
        bytes_reduced: Bytes of gradients summed over nodes.
    """

    reads: int = 0
    adds: int = 0
    bytes_read: int = 0
    bytes_added: int = 0
    bytes_reduced: int = 0


class RankState(Traced):
    """What all units of one rank share: how far it is, how it waits, what it has moved.

    Args:
        transport: not yet opened.
        version: the version that this rank works on.
        lockstep: a barrier at every gather and every accumulate.
        peers: the other ranks.
        waiter: how this rank waits.

    Attributes:
        ended: the version has ended on all ranks, and the next one has not begun here.
        finished: nothing was asked of the device since the host waited for it last.
        traffic: what this rank has moved.
    """

    def __init__(
        self, transport: Transport, version: int, lockstep: bool, peers: Peers, waiter: Waiter
    ) -> None:
        self.transport = transport
        self.version = version
        self.lockstep = lockstep
        self.peers = peers
        self.waiter = waiter
        self.ended = self.finished = False
        self.traffic = Traffic()
        self._barriers = 0

    def finish(self) -> None:
        """Wait until what this rank has asked of its device is done. See Note [When the host waits for its device]."""

    def barrier(self) -> None:
        """Wait for all ranks: ``communication="lockstep"``."""
        self.finish()
        self.peers.begin(Activity.MEET)
        self._barriers += 1
        transport = self.transport
        transport.store(Word.LOCKSTEP, self._barriers)
        for step in range(1, transport.world_size):
            peer = (transport.rank + step) % transport.world_size
            self.waiter.until(
                lambda peer=peer: transport.load(peer, Word.LOCKSTEP) >= self._barriers,  # type: ignore[misc]
                Cause.LOCKSTEP,
                lambda peer=peer: f"waiting in lockstep for {transport.describe(peer)}",  # type: ignore[misc]
                transport.job_rank(peer),
                self.peers.check_none_past,
            )


class _Published(NamedTuple):
    """A peer's shard.

    Attributes:
        owner: the peer.
        version: reads the version word of the unit.
        shards: the only one, a view of the peer's window.
    """

    owner: int
    version: Callable[[], int]
    shards: list[Tensor]


class _Accumulator(NamedTuple):
    """Where this rank adds gradients for an owner.

    Attributes:
        owner: the rank that will take the sum.
        total: the view of the owner's window.
        lock: to hold while adding; ``None`` where no other rank adds to this place, or additions are atomic.
    """

    owner: int
    total: Tensor
    lock: Lock | None


class UnitWindow:
    """One unit as this rank sees it in the windows of all ranks, which must be open.

    Args:
        state: of this rank.
        index: the number of the unit.
        spec: its sizes.
        sources: accumulators per owner: 1, or one for every rank.
    """

    def __init__(self, state: RankState, index: int, spec: UnitSpec, sources: int) -> None:
        self.index = index
        self.spec = spec
        self._state = state
        self._transport = transport = state.transport
        rank, self._world_size = transport.rank, transport.world_size
        own_first = [(rank + step) % self._world_size for step in range(self._world_size)]
        word = Word.COUNT + index
        self._is_small = not transport.runs_ahead and self._world_size * spec.shard_bytes <= _SMALL
        self._shards = [transport.shard(owner, index) for owner in range(self._world_size)]
        self._published = [
            _Published(owner, transport.watch(owner, word), [self._shards[owner]]) for owner in own_first[1:]
        ]
        source, locked = (rank, False) if sources > 1 else (0, transport.needs_locks)
        self._source = source
        self._accumulators = [
            _Accumulator(
                owner,
                transport.accumulator(owner, index, source),
                transport.lock(owner, index) if locked else None,
            )
            for owner in own_first
        ]
        self._sums = [transport.accumulator(rank, index, source) for source in range(sources)]
        self.own_shard = self._shards[rank]
        self.own_accumulator = self._sums[source]

    def publish(self) -> None:
        """Make `own_shard` readable as the current version. See Note [Versions instead of barriers]."""
        self._state.finished = False
        self._transport.announce(Word.COUNT + self.index, self._state.version)

    def gather(self, out: Tensor) -> None:
        """Copy the peers' current shards into ``out``.

        Args:
            out: 1-D, ``world_size * shard_numel`` elements, in rank order; the own part is there already.

        Raises:
            StaleShardError: between the end of a version and the next one.
        """
        state, read, numel = self._state, self._transport.read, self.spec.shard_numel
        self.check_not_ended()
        begin = time.monotonic_ns()
        if state.lockstep:
            state.barrier()
        for peer in self._published:
            if peer.version() != state.version:
                self._await_version(peer)
            if not self._is_small:
                read(peer.shards, out.narrow(0, peer.owner * numel, numel))
        if self._is_small:
            read(self._shards, out)
        traffic, peers = state.traffic, self._world_size - 1
        traffic.reads += peers
        traffic.bytes_read += peers * self.spec.shard_bytes
        self._go_on("read", begin)

    def accumulate(self, chunks: Tensor, segments: Sequence[Segment]) -> None:
        """Add each owner's chunk into its accumulator.

        Starts with its own and goes round. Leaves out an owner whose lock is taken, and comes back to it later.

        Args:
            chunks: 1-D, ``world_size * numel`` elements: one chunk for every owner, in rank order.
            segments: which elements of a chunk go where in the accumulator.

        Raises:
            StaleShardError: between the end of a version and the next one.
        """
        state = self._state
        self.check_not_ended()
        begin = time.monotonic_ns()
        if self._transport.needs_locks:
            self._add_under_locks(chunks, segments)
        else:
            rows = chunks.view(self._world_size, -1)
            for part in segments:
                self._transport.add_rows(
                    self.index, self._source, part.target, rows.narrow(1, part.source, part.numel)
                )
        state.traffic.adds += self._world_size - 1
        state.traffic.bytes_added += chunks.nbytes
        if state.lockstep:
            state.barrier()
        self._go_on("add", begin)

    def summed(self) -> Tensor:
        """The gradients that all ranks added for this rank's shard: 1-D, ``grad_numel`` elements.

        Read it only after the version has ended and before `clear`. A view, or the sum in rank order of one
        accumulator per source.
        """
        if len(self._sums) == 1:
            return self._sums[0]
        total = self._sums[0].clone()
        for one in self._sums[1:]:
            total += one
        return total

    def clear(self, start: int = 0, numel: int | None = None) -> None:
        """Zero this rank's accumulators, or a part of them, before the next `publish`."""
        self._state.finished = False
        for total in self._sums:
            (total if numel is None else total.narrow(0, start, numel)).zero_()

    def check_not_ended(self) -> None:
        """Refuse to use a version that has ended.

        Raises:
            StaleShardError: between the end of a version and the next one.
        """
        if self._state.ended:
            raise StaleShardError(
                f"The model ran (unit {self.spec.name!r}) between the end of an optimizer step and its publishing, "
                "while peers change their shards. Run it before or after `optimizer.step()`, not in hooks in between "
                "such as `on_before_optimizer_step`. To leave out a step after `settle_gradients()`, call "
                "`optimizer.zero_grad()` and `trainer.strategy.publish_parameters()` instead. Optimizers that call "
                "their closure several times in one step (LBFGS) cannot work on demand: use one that calls it once, "
                "such as AdamW."
            )

    def _go_on(self, done: str, begin: int) -> None:
        state = self._state
        state.finished = False
        state.peers.begin(Activity.COMPUTE, self.index)
        if state.tracer is not None:
            state.tracer.record(done, begin, unit=self.spec.name)

    def _await_version(self, peer: _Published) -> None:
        state, name, rank = self._state, self.spec.name, self._transport.job_rank
        state.peers.begin(Activity.GATHER, self.index)
        state.waiter.until(
            lambda: peer.version() >= state.version,
            Cause.READ,
            lambda: (
                f"waiting to read unit {name!r} (version {state.version}) from {self._transport.describe(peer.owner)}"
            ),
            rank(peer.owner),
            lambda: state.peers.check_not_left(peer.owner),
        )
        found = peer.version()
        if found != state.version:
            raise DisagreementError(
                f"Rank {rank(peer.owner)} has published version {found} of unit {name!r} while rank "
                f"{rank(self._transport.rank)} still works on version {state.version}: the ranks took different "
                "numbers of optimizer steps. Every rank must call the same optimizer steps in the same order."
            )

    def _add_under_locks(self, chunks: Tensor, segments: Sequence[Segment]) -> None:
        rows = chunks.split_with_sizes([chunks.numel() // self._world_size] * self._world_size)
        waiting = self._add_where_free(self._accumulators, rows, segments)
        while waiting:
            self._await_any_lock(waiting)
            waiting = self._add_where_free(waiting, rows, segments)

    def _add_where_free(
        self, targets: Sequence[_Accumulator], rows: Sequence[Tensor], segments: Sequence[Segment]
    ) -> list[_Accumulator]:
        """Returns what is left, because others hold the locks."""
        taken = []
        for target in targets:
            lock = target.lock
            if lock is None:
                self._add(target.total, rows[target.owner], segments)
            elif lock.take():
                try:
                    self._add(target.total, rows[target.owner], segments)
                finally:
                    lock.give()
            else:
                taken.append(target)
        return taken

    def _add(self, total: Tensor, row: Tensor, segments: Sequence[Segment]) -> None:
        add = self._transport.add
        if len(segments) == 1 and segments[0].numel == self.spec.grad_numel:
            add(total, row)
            return
        for segment in segments:
            numel = segment.numel
            add(total.narrow(0, segment.target, numel), row.narrow(0, segment.source, numel))

    def _await_any_lock(self, targets: Sequence[_Accumulator]) -> None:
        """Sleep until one of the locks is free, without keeping it."""

        def free() -> bool:
            for lock in (target.lock for target in targets if target.lock is not None):
                if lock.take():
                    lock.give()
                    return True
            return False

        describe = self._transport.describe
        self._state.peers.begin(Activity.ACCUMULATE, self.index)
        self._state.waiter.until(
            free,
            Cause.LOCK,
            lambda: (
                f"waiting to add gradients of unit {self.spec.name!r} to "
                f"{', '.join(describe(target.owner) for target in targets)}"
            ),
            self._transport.job_rank(targets[0].owner),
        )
