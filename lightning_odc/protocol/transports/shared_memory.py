"""The shared-memory body of the transport contract: one host, any number of processes of one user.

Windows are anonymous memory (``memfd_create``): no name in any file system, no ``/dev/shm`` quota, nothing left
after ``kill -9``. A peer opens a window through the owner's file-descriptor table in ``/proc``, which the kernel
allows to the same user only, and checks the job's secret before it maps anything.
Locks are open-file-description byte-range locks. Processes that a rank forks (``DataLoader`` workers) inherit the
descriptors and with them the locks. The kernel frees the locks of a dead rank when these processes have ended, too. No
rank waits for that: every wait ends when a peer has died (`Transport.dead_peers`), whatever its workers do.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import TypeVar

import torch
from torch import Tensor

from lightning_odc import host_memory
from lightning_odc.errors import WindowError
from lightning_odc.host_memory import gib
from lightning_odc.protocol.transports import host
from lightning_odc.protocol.transports.base import ReadWord, Rendezvous, Transport, WindowSpec

#: Bytes before the window's own layout begins.
HEADER_BYTES = 4096
_HEADER = struct.Struct("<32sq")  # secret, rank
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_PAGE = 4096
_SECRET_BYTES = 32

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Address:
    """The address of a rank's window, for its peers: the process and the descriptor."""

    pid: int
    fd: int


class MappedWindow:
    """One mapped window."""

    def __init__(self, fd: int, size: int) -> None:
        # It carries the locks: nothing else in this process may keep a copy; forked processes have one.
        self.fd = fd
        try:  # where this fails, torch would fail, too, and leave a descriptor open
            mmap.mmap(fd, size).close()
        except OSError as error:
            raise _limited(fd, size, "mapped", error) from error
        path = f"/proc/self/fd/{fd}"
        # 1-D; the mapping lasts as long as any view of it.
        self.memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
        self.memory[::_PAGE].sum()  # map every page now, not in the first step
        self.bytes = self.memory.numpy().data  # all of it, for headers and mailboxes
        self.words = self.bytes[:0]  # once `map_units` was called
        self.shards: list[Tensor] = []
        self.accumulators: list[list[Tensor]] = []

    @classmethod
    def create(cls, size: int) -> MappedWindow:
        """A zeroed window whose memory is claimed."""
        fd = os.memfd_create("lightning-odc", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise _limited(fd, size, "allocated", error) from error
        return cls(fd, size)

    @classmethod
    def attach(cls, peer: int, address: Address, secret: bytes, size: int) -> MappedWindow:
        """A peer's window, trusting nothing it said until it was checked."""
        fd = _open(peer, address)
        if os.pread(fd, _HEADER.size, 0) != _HEADER.pack(secret, peer):
            os.close(fd)
            raise WindowError(f"the window of rank {peer} does not belong to this job")
        return cls(fd, size)

    def write_header(self, secret: bytes, rank: int) -> None:
        """Sign the window: whose it is, in which job."""
        self.bytes[: _HEADER.size] = _HEADER.pack(secret, rank)

    def map_units(self, spec: WindowSpec) -> None:
        """Make the views that ``spec`` lays out."""
        self.words = self.bytes[HEADER_BYTES : HEADER_BYTES + spec.words * 8].cast("q")
        self.shards, self.accumulators = spec.views(self.memory[HEADER_BYTES + spec.control_bytes :])

    def close(self) -> None:
        """Close the descriptor and release the locks and the memory. The last view that dies unmaps it."""
        self.shards.clear()
        self.accumulators.clear()
        self.words = self.bytes = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class RangeLock:
    """The lock of one byte of a region, which excludes all other open file descriptions of it."""

    def __init__(self, fd: int, byte: int, fence: host.Fence | None = None) -> None:
        self._fd = fd
        self._fence = fence
        self._take = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        self._give = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)

    def take(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._take)
        except BlockingIOError:
            return False
        if self._fence is not None:
            self._fence()
        return True

    def give(self) -> None:
        if self._fence is not None:
            self._fence()
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._give)


def _limited(fd: int, size: int, what: str, error: OSError) -> WindowError:
    os.close(fd)
    return WindowError(
        f"a window of {gib(size)} GiB could not be {what}: {error.strerror}. Look at the limits of the process "
        "(`ulimit -a`) and of its container."
    )


def _open(peer: int, address: Address) -> int:
    try:
        return os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WindowError(
            f"the window of rank {peer} (process {address.pid}) cannot be opened: {error.strerror}. All ranks "
            "of a node must run on one host, under one user, and in one container (one process-id namespace). Under "
            "SLURM, write `#SBATCH --distribution=block`."
        ) from error


class SharedMemoryTransport(Transport):
    """One process's view of all windows on this host."""

    def __init__(
        self, rank: int, world_size: int, rendezvous: Rendezvous, job_ranks: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous  # used only while opening
        self._job_ranks = job_ranks or range(world_size)  # for messages, where these are a part of the job
        self._spec = WindowSpec(units=(), words=0)
        self._windows: dict[int, MappedWindow] = {}
        self._addresses: list[Address] = []
        self._pidfds: dict[int, int] = {}
        self._fence: host.Fence | None = None  # see Note [What orders memory]

    def open(self, spec: WindowSpec) -> None:
        self._spec = spec
        size = HEADER_BYTES + spec.total_bytes
        secret = self._together(lambda: self._check(size))[0]
        self._addresses = self._together(lambda: self._create(size, secret))
        self._together(lambda: self._attach(size, secret))

    def _together(self, stage: Callable[[], _Answer]) -> list[_Answer]:
        """Do one stage of `open` on all ranks; returns what it returned on every rank."""
        # No rank creates before every rank has checked: a rank that looked later would count the windows that are there
        # already and the room for all of them, and refuse a job that fits.
        answer = None
        error = ""
        try:
            answer = stage()
        except (OSError, RuntimeError) as exception:
            error = str(exception)
        answers = self._rendezvous((answer, error))  # all ranks continue, or all raise the same error
        for rank, (_, reason) in zip(self._job_ranks, answers, strict=True):
            if reason:
                self.close()
                raise WindowError(f"Rank {rank} could not share memory with its peers: {reason}")
        return [answer for answer, _ in answers]

    def _check(self, size: int) -> bytes:
        """Look before anything is taken; returns a secret, of which the job uses the first rank's."""
        if not sys.platform.startswith("linux"):
            raise WindowError(
                'the shared-memory transport needs Linux; elsewhere use ODCStrategy(communication="collective").'
            )
        self._fence = host.make_fence()
        # Refuse before the kernel kills: memory that is promised here is used for sure.
        each = f"{self.world_size} ranks of {gib(size)} GiB: published shards and gradient accumulators"
        advice = (
            'use a smaller model, bf16 (Trainer(precision="bf16-mixed") halves the shards, ODCStrategy('
            'accumulator_dtype=torch.bfloat16) the accumulators), or ODCStrategy(communication="collective")'
        )
        short = host_memory.shortage(f"the windows ({each})", size * self.world_size, advice)
        if short:
            raise WindowError(short)
        return secrets.token_bytes(_SECRET_BYTES)

    def _create(self, size: int, secret: bytes) -> Address:
        own = MappedWindow.create(size)
        self._windows[self.rank] = own
        own.write_header(secret, self.job_rank(self.rank))
        return Address(os.getpid(), own.fd)

    def _attach(self, size: int, secret: bytes) -> None:
        for peer, address in enumerate(self._addresses):
            if peer != self.rank:
                self._windows[peer] = MappedWindow.attach(self.job_rank(peer), address, secret, size)
                self._pidfds[peer] = os.pidfd_open(address.pid)
            self._windows[peer].map_units(self._spec)

    def close(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        for region in self._windows.values():
            region.close()
        self._windows.clear()

    # -- data plane ---------------------------------------------------------------------------------------

    def shard(self, owner: int, unit: int) -> Tensor:
        return self._windows[owner].shards[unit]

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        return self._windows[owner].accumulators[unit][source]

    def lock(self, owner: int, unit: int) -> RangeLock:
        return RangeLock(self._windows[owner].fd, unit, self._fence)

    # -- control plane ------------------------------------------------------------------------------------

    def load(self, owner: int, word: int) -> int:
        value = self._windows[owner].words[word]
        if self._fence is not None:
            self._fence()
        return value

    def watch(self, owner: int, word: int) -> ReadWord:
        if self._fence is not None:
            return super().watch(owner, word)
        return partial(self._windows[owner].words.__getitem__, word)

    def store(self, word: int, value: int, owner: int | None = None) -> None:
        if self._fence is not None:
            self._fence()
        if owner is None:
            owner = self.rank
        self._windows[owner].words[word] = value

    def post(self, box: int, message: bytes) -> None:
        assert len(message) <= self._spec.mailbox_bytes
        start = HEADER_BYTES + self._spec.mailbox_offset(box)
        payload = len(message).to_bytes(8, "little") + message
        memory = self._windows[self.rank].bytes
        memory[start : start + len(payload)] = payload

    def fetch(self, owner: int, box: int) -> bytes:
        start = HEADER_BYTES + self._spec.mailbox_offset(box)
        memory = self._windows[owner].bytes
        begin = start + 8
        length = int.from_bytes(memory[start:begin], "little")
        return bytes(memory[begin : begin + length])

    def dead_peers(self) -> list[int]:
        ended = connection.wait(self._pidfds.values(), 0)  # takes descriptors above 1023
        return [peer for peer, fd in self._pidfds.items() if fd in ended]

    def how_ended(self, peer: int) -> str:
        return host.how_ended(self._addresses[peer].pid, self._pidfds[peer])

    def job_rank(self, peer: int) -> int:
        return self._job_ranks[peer]

    def describe(self, peer: int) -> str:
        return f"rank {self.job_rank(peer)} (process {self._addresses[peer].pid})"
