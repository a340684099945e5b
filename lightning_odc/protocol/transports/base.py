"""The contract between the protocol and the memory that ranks share.

Every rank owns one *window*. Its **data plane** holds, per unit, the published shard and the gradient
accumulators; its **control plane** holds 64-bit words and mailboxes. The rules that every body keeps:

- only its owner writes a control word or mailbox, and all ranks read it; other ranks write a word of work that they
  claim, under the lock of claims;
- only its owner writes a published shard, and all ranks read it;
- all ranks add to an accumulator, under the lock of its (owner, unit) unless each source has its own;
- when a rank `Transport.load`-s a value, it sees everything written before the `Transport.store` of that value.

When a shard may be read or written is not decided here: see the Notes in ``lightning_odc/protocol/protocol.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

#: Gives every rank's object to every rank, in rank order; all ranks must call it together.
Rendezvous = Callable[[Any], list[Any]]

#: Whether something that is waited for is there.
Ready = Callable[[], bool]
#: Reads a control word.
ReadWord = Callable[[], int]
#: The dtype of sums of gradients; by default fp32, or wider if the parameters are.
SumDtype = torch.dtype | None
#: Begin and end of elements in a row.
Run = tuple[int, int]

_ALIGNMENT = 4096
_LENGTH_BYTES = 8  # before every message


@dataclass(frozen=True)
class UnitSpec:
    """The size of one unit in one rank's window (the same on every rank)."""

    name: str  # of the unit's module, for messages
    shard_numel: int  # elements of one rank's padded parameter shard
    shard_dtype: torch.dtype  # the compute dtype
    grad_numel: int  # elements of one rank's padded gradient shard; 0 for a unit without trainable parameters
    grad_dtype: torch.dtype  # of the accumulators
    # Begin and end of what every optimizer step changes in a shard.
    grad_ranges: tuple[Run, ...] = ()

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.shard_dtype.itemsize

    @property
    def chunk_dtype(self) -> torch.dtype:
        """The dtype of gradients as ``fully_shard`` passes them on, unless the user told it another one."""
        if self.shard_dtype.is_floating_point:
            return self.shard_dtype
        return self.grad_dtype

    @property
    def grad_bytes(self) -> int:
        return self.grad_numel * self.grad_dtype.itemsize


@dataclass(frozen=True)
class WindowSpec:
    """The layout of a window: words, mailboxes, then per unit one shard and its accumulators."""

    units: tuple[UnitSpec, ...]  # in publishing order
    words: int  # 64-bit control words
    mailboxes: int = 0
    mailbox_bytes: int = 0  # capacity of one of them
    sources: int = 1  # accumulators per unit: 1, which all share, or the world size, one per source rank

    def mailbox_offset(self, box: int) -> int:
        return self.words * 8 + box * (_LENGTH_BYTES + self.mailbox_bytes)

    @property
    def control_bytes(self) -> int:
        return _align(self.mailbox_offset(self.mailboxes))

    def grad_stride(self, unit: int) -> int:
        return _align(self.units[unit].grad_bytes, 64)

    @property
    def data_bytes(self) -> int:
        """Size of the shards and accumulators in one rank's window."""
        return sum(self._unit_bytes(index) for index in range(len(self.units)))

    @property
    def total_bytes(self) -> int:
        """Size of one rank's window."""
        return self.control_bytes + self.data_bytes

    def views(self, data: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The shard of each unit, and its accumulators by source, in the bytes behind the control plane."""
        shards = []
        accumulators = []
        for index, (unit, (shard, first)) in enumerate(zip(self.units, self.offsets(), strict=True)):
            shards.append(data[shard : shard + unit.shard_bytes].view(unit.shard_dtype))
            of_unit = []
            for source in range(self.sources):
                begin = first + source * self.grad_stride(index)
                of_unit.append(data[begin : begin + unit.grad_bytes].view(unit.grad_dtype))
            accumulators.append(of_unit)
        return shards, accumulators

    def _unit_bytes(self, index: int) -> int:
        return _align(self.units[index].shard_bytes) + _align(self.grad_stride(index) * self.sources)

    def offsets(self) -> list[tuple[int, int]]:
        """Where each unit's shard and first accumulator begin in `views`; source ``s`` follows ``s`` strides later."""
        found = []
        begin = 0
        for index, unit in enumerate(self.units):
            found.append((begin, begin + _align(unit.shard_bytes)))
            begin += self._unit_bytes(index)
        return found


@dataclass(frozen=True)
class Segment:
    """A run of gradient elements: ``numel`` elements from ``source`` in a chunk to ``target`` in an accumulator."""

    target: int
    source: int
    numel: int


def joined(parts: Iterable[Run]) -> list[Run]:
    """Runs without overlap: ``(0, 6), (4, 6), (6, 7), (9, 12)`` become ``(0, 7), (9, 12)``."""
    runs: list[Run] = []
    for begin, end in sorted(parts):
        if runs and begin <= runs[-1][1]:
            begin, before = runs.pop()
            end = max(before, end)
        runs.append((begin, end))
    return runs


def packed(parts: Iterable[Run]) -> list[Segment]:
    """Where parts of an accumulator lie in a chunk: ``(0, 4), (6, 9)`` are ``(0, 0, 4), (6, 4, 3)``."""
    segments = []
    source = 0
    for begin, end in joined(parts):
        numel = end - begin
        segments.append(Segment(begin, source, numel))
        source += numel
    return segments


class Lock(Protocol):
    """Excludes the other ranks; a rank does not take it twice."""

    def take(self) -> bool:
        """Take it without waiting; ``False`` if another rank holds it."""

    def give(self) -> None:
        """Give it back."""


class Transport(ABC):
    """One rank's view of all windows. Opened once, closed once, used by one thread at a time."""

    rank: int
    world_size: int  # ranks that share windows
    # The host asks a device and continues: `read`, `add_rows` and what is done with a view of a window are done later,
    # in the order of their stream. See Note [When the host waits for its device].
    runs_ahead: bool = False
    needs_locks: bool = True  # accumulators that sources share may only be added to under their lock

    def why_not_shared(self, units: Sequence[UnitSpec]) -> str:
        """Why sources cannot add into one accumulator of these units; empty if they can. All ranks ask it together."""
        return ""

    @abstractmethod
    def open(self, spec: WindowSpec) -> None:
        """Make this rank's zeroed window and attach every peer's. All ranks together; if one fails, all raise."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; peers that are still attached keep their view."""

    # -- data plane ---------------------------------------------------------------------------------------

    @abstractmethod
    def shard(self, owner: int, unit: int) -> Tensor:
        """The published shard of ``unit`` in ``owner``'s window: a 1-D view, ``shard_numel`` elements.

        Args:
            owner: A rank of those that share windows.
            unit: The number of a unit.
        """

    @abstractmethod
    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        """An accumulator of ``unit`` in ``owner``'s window: a 1-D view, ``grad_numel`` elements.

        Args:
            owner: A rank of those that share windows.
            unit: The number of a unit.
            source: Whose additions it takes, where sources do not share one.
        """

    @abstractmethod
    def lock(self, owner: int, unit: int) -> Lock:
        """The lock of an accumulator, valid until `close`; that of claims has the number behind the last unit.

        Args:
            owner: A rank of those that share windows.
            unit: The number of a unit.
        """

    def read(self, shards: Sequence[Tensor], out: Tensor) -> None:
        """Copy published shards (views from `shard`), one after the other, into ``out`` (1-D, same dtype).

        Args:
            shards: Views from `shard`.
            out: 1-D, of the same dtype, with as many elements as all shards.
        """
        torch.cat(list(shards), out=out)

    def add(self, accumulator: Tensor, values: Tensor) -> None:
        """Add to an accumulator or a part of it; the caller holds its lock if it has one. Only where `needs_locks`.

        Args:
            accumulator: A view from `accumulator`, or a part of it.
            values: Numbers of the same shape, in any floating dtype.
        """
        assert self.needs_locks, "this transport adds by rows"
        accumulator.add_(values)

    def add_rows(self, unit: int, source: int, start: int, rows: Tensor) -> None:
        """Add row ``r`` to the accumulator of rank ``r``, from element ``start`` on; only where no locks are needed.

        Args:
            unit: The number of a unit.
            source: The rank that adds.
            start: The first element of the accumulators.
            rows: ``[world_size, numel]``, each row contiguous.
        """
        # ``rows``: ``[world_size, numel]``, each row contiguous.
        raise NotImplementedError("this transport adds under locks")

    def on_another_stream(self) -> AbstractContextManager[None]:
        """A context in which work of the device goes to another stream, behind what was asked of the current one."""
        return nullcontext()

    def drain(self) -> Ready:
        """An object that tells whether all reads, adds and writes that this rank has requested so far are done."""
        return lambda: True

    # -- control plane ------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, owner: int, word: int) -> int:
        """Read a control word of ``owner``; later reads see at least what its writer had written before it.

        Args:
            owner: A rank of those that share windows.
            word: The number of a control word.
        """

    def watch(self, owner: int, word: int) -> ReadWord:
        """`load` of one word, prepared for frequent reads; valid until `close`.

        Args:
            owner: A rank of those that share windows.
            word: The number of a control word.
        """
        return partial(self.load, owner, word)

    @abstractmethod
    def store(self, word: int, value: int, owner: int | None = None) -> None:
        """Write a control word, by default an own one, after everything this rank wrote before.

        Args:
            word: The number of a control word.
            value: 64 bits.
            owner: The rank whose word it is; by default this one.
        """

    def announce(self, word: int, value: int) -> None:
        """`store` a word after everything on the current stream so far is done. Need not wait.

        Args:
            word: The number of an own control word.
            value: 64 bits.
        """
        self.store(word, value)

    @abstractmethod
    def post(self, box: int, message: bytes) -> None:
        """Put a message that fits into an own mailbox, over the last one. Announce it with `store`.

        Args:
            box: The number of a mailbox.
            message: Bytes, at most as many as a mailbox holds, see `WindowSpec`.
        """

    @abstractmethod
    def fetch(self, owner: int, box: int) -> bytes:
        """The message in a mailbox of ``owner``.

        Args:
            owner: A rank of those that share windows.
            box: The number of a mailbox.
        """

    @abstractmethod
    def dead_peers(self) -> list[int]:
        """Ranks known to have ended, in order or not. Cheap enough to call ten times a second."""

    def how_ended(self, peer: int) -> str:
        """How a dead peer ended, such as ``"SIGKILL"`` or ``"exit code 1"``; empty where that is not known."""
        return ""

    def job_rank(self, peer: int) -> int:
        """The rank of a peer in the job, of which those who share windows may be a part."""
        return peer

    def describe(self, peer: int) -> str:
        """How to call a peer in a message."""
        return f"rank {self.job_rank(peer)}"


def _align(size: int, to: int = _ALIGNMENT) -> int:
    return math.ceil(size / to) * to


def single_process(item: Any) -> list[Any]:
    """The rendezvous of a world of one."""
    return [item]


def process_group_rendezvous(group: Any) -> Rendezvous:
    """The rendezvous of a process group (pickles small objects between ranks of one job)."""

    def rendezvous(item: Any) -> list[Any]:
        items: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(items, item, group=group)
        return items

    return rendezvous
