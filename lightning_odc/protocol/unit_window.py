"""One unit in the windows of all ranks: publish, gather, accumulate. Everything that repeats is prepared once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from lightning_odc.errors import PUBLISH, DisagreementError, StaleShardError
from lightning_odc.protocol.peers import Activity, Peers, Word
from lightning_odc.protocol.tracing import Traced
from lightning_odc.protocol.transports.base import Lock, ReadWord, Segment, Transport, UnitSpec
from lightning_odc.protocol.waiting import Cause, Waiter

#: A unit of at most this many bytes is read by one call, own shard included: calls take longer than copying.
_SMALL = 64 * 1024


@dataclass
class Traffic:
    """What went over the transport so far, on this rank."""

    reads: int = 0  # shards of other ranks that were read
    adds: int = 0  # gradient chunks added for other ranks
    bytes_read: int = 0  # bytes of other ranks' shards that were read
    bytes_added: int = 0  # bytes of gradients added into the windows of peers and into the own one
    bytes_reduced: int = 0  # bytes of gradients summed over nodes
    bytes_shared: int = 0  # bytes of published shards that came from other nodes


class RankState(Traced):
    """What all units of one rank share: how far it is, how it waits, what it has moved."""

    def __init__(self, transport: Transport, version: int, peers: Peers, waiter: Waiter) -> None:
        super().__init__(waiter.tracers)
        self.transport = transport
        self.version = version
        self.peers = peers
        self.waiter = waiter
        # How many ranks' shards each window holds, and the place of its owner among them: on several nodes it may be
        # one rank per node, see Note [A copy per node].
        self.nodes = 1
        self.node = 0
        self.ended = False  # the version has ended on all ranks, and the next one has not begun here
        self.finished = False  # nothing was asked of the device since the host waited for it last
        self.traffic = Traffic()

    def finish(self) -> None:
        """Wait until what this rank has asked of its device is done. See Note [When the host waits for its device]."""

    def publish(self, window: UnitWindow, edited: bool) -> None:
        """The own shard in a window is written: let it be read as the current version, now or later."""
        window.announce(self.version, edited)

    def await_all(self, word: Word, count: int, what: str, check: Callable[[int], None]) -> None:
        """Wait until a control word of every rank has come so far; ``check``: whether that of one still can."""
        transport = self.transport
        for step in range(1, transport.world_size):  # the ranks behind this one first
            peer = (transport.rank + step) % transport.world_size
            self.waiter.until(
                lambda peer=peer: transport.load(peer, word) >= count,  # type: ignore[misc]
                Cause.SETTLE,
                lambda peer=peer: f"waiting for {transport.describe(peer)} {what}",  # type: ignore[misc]
                transport.job_rank(peer),
                partial(check, peer),
            )


class _Published(NamedTuple):
    """What one window holds of other ranks."""

    owner: int
    version: ReadWord  # reads the version word of the unit
    edited: ReadWord  # reads in which version frozen parameters of the unit changed last
    parts: list[tuple[list[Tensor], int]]  # each shard in a list by itself, and its begin in the whole unit


class _Accumulator(NamedTuple):
    """Where this rank adds gradients to one window."""

    owner: int
    totals: Sequence[Tensor]  # view of the window for each rank of the column that will take the sum
    lock: Lock | None  # ``None`` if no other rank adds to this place, or additions are atomic


class UnitWindow:
    """One unit as this rank sees it in the windows of all ranks, which must be open."""

    def __init__(self, state: RankState, index: int, spec: UnitSpec, sources: int) -> None:
        self.index = index
        self.spec = spec
        self.gathers = 0  # number of gathers of the unit since it was last set to 0
        self._state = state
        self._transport = transport = state.transport
        self._world_size = transport.world_size
        rank = transport.rank
        # Two nodes of two ranks, seen from rank 1: transport ranks 0 and 1, 2 nodes of which the own one is 0. The
        # unit has 4 owners, 0 to 3. Window 0 holds the shards of ranks 0 and 2, window 1 those of ranks 1 and 3:
        # ``by_window`` is [[s0, s2], [s1, s3]], and transposed and joined it is in rank order, [s0, s1, s2, s3].
        self.owners = state.nodes * self._world_size  # ranks over which the unit is sharded
        self.own = state.node * self._world_size + rank  # 1: place of this rank among them
        # [1, 0]: ranks begin at different windows, so that they do not all wait for one lock.
        own_first = [(rank + step) % self._world_size for step in range(self._world_size)]
        self.word = Word.COUNT + 2 * index
        self._edited_word = self.word + 1
        self._is_small = not transport.runs_ahead and self.owners * spec.shard_bytes <= _SMALL
        windows = [transport.shard(owner, index) for owner in range(self._world_size)]
        by_window = [shards.view(state.nodes, spec.shard_numel) for shards in windows]
        self.shards = by_window[rank]  # what this rank's window holds, ``[nodes, shard_numel]``
        self.own_shard = self.shards[state.node]
        self._shards = [shard for shards in zip(*by_window, strict=True) for shard in shards]
        # Window 0 with [s0] at 0 and [s2] at 2 * shard_numel; then the own one with [s3] alone, since s1 is here.
        self._published = []
        for owner in [*own_first[1:], rank]:
            others = [peer for peer in range(owner, self.owners, self._world_size) if peer != self.own]
            if others:
                parts = [([self._shards[peer]], peer * spec.shard_numel) for peer in others]
                version = transport.watch(owner, self.word)
                edited = transport.watch(owner, self._edited_word)
                self._published.append(_Published(owner, version, edited, parts))
        # One accumulator per source, which needs no lock; else one for all sources.
        source = 0
        locked = transport.needs_locks
        if sources > 1:
            source = rank
            locked = False
        self._source = source
        self._accumulators: list[_Accumulator] = []
        for owner in own_first:
            totals = self.by_node(transport.accumulator(owner, index, source)).unbind()
            lock = transport.lock(owner, index) if locked else None
            self._accumulators.append(_Accumulator(owner, totals, lock))
        self._sums = [transport.accumulator(rank, index, source) for source in range(sources)]

    def publish(self, edited: bool = True) -> None:
        """Make `own_shard` readable as the current version. ``edited``: more than what is trained may have changed."""
        self._state.finished = False
        self._state.publish(self, edited)

    def announce(self, version: int, edited: bool) -> None:
        """Say that all shards in this rank's window are those of a version."""
        if edited:
            self._transport.store(self._edited_word, version)
        self._transport.announce(self.word, version)

    def gather(self, out: Tensor, since: int = 0) -> None:
        """Copy the current shards of all other ranks into ``out``, ``[owners * shard_numel]`` with the own one."""
        # If ``out`` has all of version ``since`` already, only what is trained is read, unless an owner has edited more
        # since then.
        state = self._state
        read = self._transport.read
        numel = self.spec.shard_numel
        self.check_not_ended()
        self.gathers += 1
        at_once = self._is_small and not since
        spared = 0  # elements that need not be read
        begin = time.monotonic_ns()
        for window in self._published:
            if window.version() != state.version:
                self._await_version(window)
            if since and window.edited() <= since:
                for (shard,), place in window.parts:
                    spared += numel
                    for start, end in self.spec.grad_ranges:
                        read([shard[start:end]], out[place + start : place + end])
                        spared -= end - start
            elif not at_once:
                for parts, place in window.parts:
                    read(parts, out.narrow(0, place, numel))
        if at_once:
            read(self._shards, out)
        others = self.owners - 1
        elements = others * numel - spared
        if elements:
            state.traffic.reads += others
            state.traffic.bytes_read += elements * self.spec.shard_dtype.itemsize
        self._go_on("read", begin)

    def accumulate(self, chunks: Tensor, segments: Sequence[Segment]) -> None:
        """Add each owner's chunk into its accumulator. ``chunks``: ``[owners * numel]``, in rank order."""
        state = self._state
        self.check_not_ended()
        begin = time.monotonic_ns()
        if self._transport.needs_locks:
            rows = chunks.split_with_sizes([chunks.numel() // self.owners] * self.owners)
            # It starts with its own window and goes round, and comes back later to windows whose locks are taken.
            waiting = self._add_where_free(self._accumulators, rows, segments)
            while waiting:
                self._await_any_lock(waiting)
                waiting = self._add_where_free(waiting, rows, segments)
        else:
            by_node = chunks.view(state.nodes, self._world_size, -1)
            for node, of_node in enumerate(by_node):
                for part in segments:
                    start = node * self.spec.grad_numel + part.target
                    addends = of_node.narrow(1, part.source, part.numel)
                    self._transport.add_rows(self.index, self._source, start, addends)
        state.traffic.adds += self.owners - 1
        state.traffic.bytes_added += chunks.nbytes
        self._go_on("add", begin)

    def summed(self) -> Tensor:
        """What all ranks added here, between a version's end and `clear`: ``[nodes * grad_numel]``."""
        if len(self._sums) == 1:
            return self._sums[0]
        total = self._sums[0].clone()  # of one accumulator per source, in rank order
        for of_source in self._sums[1:]:
            total += of_source
        return total

    def by_node(self, accumulator: Tensor) -> Tensor:
        """An accumulator of a window, or `summed`, as ``[nodes, grad_numel]``."""
        return accumulator.view(self._state.nodes, self.spec.grad_numel)

    def clear(self, start: int = 0, numel: int | None = None) -> None:
        """Zero this rank's accumulators before the next `publish`, or a part of each shard's."""
        self._state.finished = False
        for total in self._sums:
            if numel is None:
                total.zero_()
            else:
                self.by_node(total).narrow(1, start, numel).zero_()

    def check_not_ended(self) -> None:
        """Refuse to use a version that has ended."""
        if self._state.ended:
            raise StaleShardError(
                f"The model ran (unit {self.spec.name!r}) between the end of an optimizer step and its publishing, "
                "while peers change their shards. Run it before or after `optimizer.step()`, not in hooks in between "
                "such as `on_before_optimizer_step`. To leave out a step after `settle_gradients()`, call "
                f"`optimizer.zero_grad()` and {PUBLISH} instead. Optimizers that call their "
                "closure several times in one step (LBFGS) cannot work on demand: use one that calls it once, "
                "such as AdamW."
            )

    def _go_on(self, done: str, begin: int) -> None:
        """The unit has been read, or added to."""
        state = self._state
        state.finished = False
        state.peers.begin(Activity.COMPUTE, self.index)
        state.record(done, begin, unit=self.spec.name)

    def _await_version(self, window: _Published) -> None:
        state = self._state
        owner = window.owner
        rank = self._transport.job_rank
        describe = self._transport.describe

        def until(word: ReadWord, activity: Activity, cause: Cause, what: str) -> None:
            state.peers.begin(activity, self.index)
            state.waiter.until(
                lambda: word() >= state.version,
                cause,
                lambda: f"waiting {what}",
                rank(owner) if cause == Cause.READ else None,
                lambda: state.peers.check_not_left(owner),
            )

        unit = f"unit {self.spec.name!r} (version {state.version})"
        published = window.version
        if state.nodes > 1:  # the owner publishes its own shard, then the shards of other nodes come
            published = self._transport.watch(owner, Word.VERSION)
        until(published, Activity.GATHER, Cause.READ, f"to read {unit} from {describe(owner)}")
        if state.nodes > 1:
            shared = f"for {unit} from other nodes"
            if owner != self._transport.rank:
                shared += f" through {describe(owner)}"
            until(window.version, Activity.NETWORK, Cause.NETWORK, shared)
        found = window.version()
        if found != state.version:
            raise DisagreementError(
                f"Rank {rank(owner)} has published version {found} of unit {self.spec.name!r} while rank "
                f"{rank(self._transport.rank)} still works on version {state.version}: the ranks took different "
                "numbers of optimizer steps. Every rank must call the same optimizer steps in the same order."
            )

    def _add_where_free(
        self, targets: Sequence[_Accumulator], rows: Sequence[Tensor], segments: Sequence[Segment]
    ) -> list[_Accumulator]:
        """Returns what is left, because others hold the locks."""
        taken = []
        for target in targets:
            lock = target.lock
            if lock is None:
                self._add(target, rows, segments)
            elif lock.take():
                try:
                    self._add(target, rows, segments)
                finally:
                    lock.give()
            else:
                taken.append(target)
        return taken

    def _add(self, target: _Accumulator, rows: Sequence[Tensor], segments: Sequence[Segment]) -> None:
        add = self._transport.add
        whole = len(segments) == 1 and segments[0].numel == self.spec.grad_numel
        # With 2 ranks per node, those of window 1 are rows 1, 3, 5, ...
        for total, row in zip(target.totals, rows[target.owner :: self._world_size], strict=True):
            if whole:
                add(total, row)
                continue
            for segment in segments:
                numel = segment.numel
                add(total.narrow(0, segment.target, numel), row.narrow(0, segment.source, numel))

    def _await_any_lock(self, targets: Sequence[_Accumulator]) -> None:
        """Sleep until one of the locks is free, without keeping it."""

        def free() -> bool:
            for target in targets:
                if target.lock is not None and target.lock.take():
                    target.lock.give()
                    return True
            return False

        def what() -> str:
            owners = ", ".join(self._transport.describe(target.owner) for target in targets)
            return f"waiting to add gradients of unit {self.spec.name!r} to {owners}"

        self._state.peers.begin(Activity.ACCUMULATE, self.index)
        self._state.waiter.until(free, Cause.LOCK, what, self._transport.job_rank(targets[0].owner))
