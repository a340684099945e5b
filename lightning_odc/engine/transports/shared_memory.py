"""The shared-memory body of the transport contract: one host, any number of processes of one user.

Windows are anonymous memory (``memfd_create``): no name in any file system, no ``/dev/shm`` quota, nothing left
after ``kill -9``. A peer opens a window through the owner's file-descriptor table in ``/proc``, which the kernel
allows to the same user only, and checks the job's secret, the size and the seals before it maps anything.
Locks are open-file-description byte-range locks. Processes that a rank forks (``DataLoader`` workers) inherit the
descriptors and with them the locks. The kernel frees the locks of a dead rank when these processes have ended, too. No
rank waits for that: every wait ends when a peer has died (`Transport.dead_peers`), whatever its workers do.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from lightning_odc import host_memory
from lightning_odc.engine.transports import host
from lightning_odc.engine.transports.base import Rendezvous, Transport, WindowSpec, check_message, together
from lightning_odc.engine.transports.window import HEADER_BYTES, Address, MappedWindow, RangeLock
from lightning_odc.errors import WindowError
from lightning_odc.host_memory import gib

_SECRET_BYTES = 32

_Answer = TypeVar("_Answer")


class SharedMemoryTransport(Transport):
    """One process's view of all windows on this host.

    Args:
        rank: this process's rank.
        world_size: number of processes.
        rendezvous: exchanges small objects between all ranks; used only while opening.
        job_ranks: where these are a part of the job, their ranks in it, for messages.
    """

    def __init__(
        self, rank: int, world_size: int, rendezvous: Rendezvous, job_ranks: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous
        self._job_ranks = job_ranks or range(world_size)
        self._spec = WindowSpec(units=(), words=0)
        self._regions: dict[int, MappedWindow] = {}
        self._addresses: list[Address] = []
        self._pidfds: dict[int, int] = {}
        self._fence: host.Fence | None = None  # see Note [What orders memory]
        self._seen: dict[tuple[int, int, int], int] = {}  # by thread, owner and word: what was read last

    # -- opening ------------------------------------------------------------------------------------------

    def open(self, spec: WindowSpec) -> None:
        self._spec = spec
        size = HEADER_BYTES + spec.total_bytes
        secret = self._together(lambda: self._check(size))[0]
        self._addresses = self._together(lambda: self._create(size, secret))
        self._together(lambda: self._attach(size, secret))

    def _together(self, stage: Callable[[], _Answer]) -> list[_Answer]:
        return together(self._rendezvous, stage, self.close, self._job_ranks)

    def _check(self, size: int) -> bytes:
        """Look before anything is taken; returns a secret, of which the job uses the first rank's."""
        host.check_platform()
        self._fence = host.make_fence()
        # Refuse before the kernel kills: memory that is promised here is used for sure.
        each = f"{self.world_size} ranks of {gib(size)} GiB: {self._spec.holds}"
        short = host_memory.shortage(
            f"the windows ({each})",
            size * self.world_size,
            'use a smaller model, bf16 (Trainer(precision="bf16-mixed") halves the shards, ODCStrategy('
            'accumulator_dtype=torch.bfloat16) the accumulators), or ODCStrategy(communication="collective")',
        )
        if short:
            raise WindowError(short)
        return secrets.token_bytes(_SECRET_BYTES)

    def _create(self, size: int, secret: bytes) -> Address:
        own = self._regions[self.rank] = MappedWindow.create(size)
        own.write_header(secret, self.job_rank(self.rank))
        return Address(host.boot_id(), os.getpid(), own.fd)

    def _attach(self, size: int, secret: bytes) -> None:
        for peer, address in enumerate(self._addresses):
            if peer != self.rank:
                self._regions[peer] = MappedWindow.attach(self.job_rank(peer), address, secret, size)
                self._pidfds[peer] = os.pidfd_open(address.pid)
            self._regions[peer].map_units(self._spec)

    def close(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    # -- data plane ---------------------------------------------------------------------------------------

    def shard(self, owner: int, unit: int) -> Tensor:
        return self._regions[owner].shards[unit]

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        return self._regions[owner].accumulators[unit][source]

    def lock(self, owner: int, unit: int) -> RangeLock:
        return RangeLock(self._regions[owner].fd, unit, self._fence)

    def claim_lock(self, owner: int) -> RangeLock:
        return self.lock(owner, len(self._spec.units))

    # -- control plane ------------------------------------------------------------------------------------

    def load(self, owner: int, word: int) -> int:
        value = self._regions[owner].words[word]
        if self._fence is not None:
            place = (threading.get_ident(), owner, word)
            if self._seen.get(place) != value:
                self._fence()
                self._seen[place] = value
        return value

    def watch(self, owner: int, word: int) -> Callable[[], int]:
        if self._fence is not None:
            return super().watch(owner, word)
        return partial(self._regions[owner].words.__getitem__, word)

    def store(self, word: int, value: int) -> None:
        if self._fence is not None:
            self._fence()
        self._regions[self.rank].words[word] = value

    def load_claim(self, owner: int) -> int:
        value = self._regions[owner].words[self._spec.words]
        if self._fence is not None:
            self._fence()
        return value

    def store_claim(self, owner: int, value: int) -> None:
        if self._fence is not None:
            self._fence()
        self._regions[owner].words[self._spec.words] = value

    def post(self, box: int, message: bytes) -> None:
        check_message(self._spec, message)
        start = HEADER_BYTES + self._spec.mailbox_offset(box)
        payload = len(message).to_bytes(8, "little") + message
        self._regions[self.rank].bytes[start : start + len(payload)] = payload

    def fetch(self, owner: int, box: int) -> bytes:
        start = HEADER_BYTES + self._spec.mailbox_offset(box)
        memory = self._regions[owner].bytes
        length = int.from_bytes(memory[start : start + 8], "little")
        if length > self._spec.mailbox_bytes:
            raise WindowError(
                f"Rank {self.job_rank(owner)} posted a message of {length} bytes, more than its mailbox holds."
            )
        return bytes(memory[start + 8 : start + 8 + length])

    # -- peers --------------------------------------------------------------------------------------------

    def dead_peers(self) -> list[int]:
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        peers = {fd: peer for peer, fd in self._pidfds.items()}
        for fd in peers:
            poll.register(fd, select.POLLIN)
        return sorted(peers[fd] for fd, _ in poll.poll(0))

    def how_ended(self, peer: int) -> str:
        return host.how_ended(self._addresses[peer].pid, self._pidfds[peer]) if peer in self._pidfds else ""

    def job_rank(self, peer: int) -> int:
        return self._job_ranks[peer]

    def describe(self, peer: int) -> str:
        return f"rank {self.job_rank(peer)} (process {self._addresses[peer].pid})"
