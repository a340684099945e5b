"""The shared-memory body of the transport contract: one host, any number of processes of one user.

Windows are anonymous memory (``memfd_create``): no name in any file system, no ``/dev/shm`` quota, nothing left
after ``kill -9``. A peer opens a window through the owner's file-descriptor table in ``/proc``, which the kernel
allows to the same user only, and checks the job's secret, the size and the seals before it maps anything.
Locks are open-file-description byte-range locks, which the kernel gives back when their holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import select
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import Rendezvous, Transport, WindowSpec, check_message
from lightning_odc.errors import WindowError

_SEALS = "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"
_SECRET_BYTES = 32
_STRONGLY_ORDERED = platform.machine() in ("x86_64", "AMD64")
_HEADER = struct.Struct("<32sqq")  # secret, rank, total bytes
_HEADER_BYTES = 4096
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


@dataclass(frozen=True)
class _Address:
    """What a rank tells its peers about its window."""

    host: str
    pid: int
    fd: int
    size: int


class SharedMemoryTransport(Transport):
    """One process's view of all windows on this host.

    Args:
        rank: this process's rank.
        world_size: number of processes.
        rendezvous: exchanges small objects between all ranks; used only while opening.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: Rendezvous) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous
        self._spec = WindowSpec(units=(), words=0)
        self._regions: list[_Region] = []
        self._addresses: list[_Address] = []
        self._pidfds: dict[int, int] = {}
        self._fence = threading.Lock()

    def open(self, spec: WindowSpec) -> None:
        self._spec = spec
        size = _HEADER_BYTES + spec.total_bytes
        own, address, error = self._create(size)
        offers = self._rendezvous((address, secrets.token_bytes(_SECRET_BYTES), error))
        self._addresses = [offer[0] for offer in offers]
        secret: bytes = offers[0][1]
        failed = {rank: offer[2] for rank, offer in enumerate(offers) if offer[2]}
        if not failed:
            assert own is not None
            own.write_header(secret, self.rank)
            self._rendezvous(None)
            failed = self._attach_all(own, secret, size)
        if failed:
            if own is not None and own not in self._regions:
                own.close()
            self.close()
            rank, reason = min(failed.items())
            raise WindowError(f"Rank {rank} could not share memory with its peers: {reason}")

    def _create(self, size: int) -> tuple[_Region | None, _Address | None, str]:
        try:
            _check_platform()
            _check_memory(size, self.world_size)
            own = _Region.create(size)
        except (OSError, WindowError) as error:
            return None, None, str(error)
        return own, _Address(_boot_id(), os.getpid(), own.fd, size), ""

    def _attach_all(self, own: _Region, secret: bytes, size: int) -> dict[int, str]:
        error = ""
        try:
            for peer, address in enumerate(self._addresses):
                region = own if peer == self.rank else _attach(peer, address, secret, size)
                self._regions.append(region)
                region.map_units(self._spec)
                if peer != self.rank:
                    self._pidfds[peer] = os.pidfd_open(address.pid)
        except (OSError, WindowError) as exception:
            error = str(exception)
        reports = self._rendezvous(error)
        return {rank: report for rank, report in enumerate(reports) if report}

    def close(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        for region in self._regions:
            region.close()
        self._regions.clear()

    # -- data plane ---------------------------------------------------------------------------------------

    def shard(self, owner: int, unit: int) -> Tensor:
        return self._regions[owner].shards[unit]

    def accumulator(self, owner: int, unit: int, source: int = 0) -> Tensor:
        return self._regions[owner].accumulators[unit][source]

    def try_lock(self, owner: int, unit: int) -> bool:
        return self._regions[owner].lock(unit, fcntl.F_WRLCK)

    def unlock(self, owner: int, unit: int) -> None:
        self._regions[owner].lock(unit, fcntl.F_UNLCK)

    # -- control plane ------------------------------------------------------------------------------------

    def load(self, owner: int, word: int) -> int:
        value = self._regions[owner].words[word]
        self._order_memory()
        return value

    def store(self, word: int, value: int) -> None:
        self._order_memory()
        self._regions[self.rank].words[word] = value

    @property
    def claim_lock(self) -> int:
        return len(self._spec.units)

    def load_claim(self, owner: int) -> int:
        return self.load(owner, self._spec.words)

    def store_claim(self, owner: int, value: int) -> None:
        self._order_memory()
        self._regions[owner].words[self._spec.words] = value

    def post(self, box: int, message: bytes) -> None:
        check_message(self._spec, message)
        start = _HEADER_BYTES + self._spec.mailbox_offset(box)
        payload = len(message).to_bytes(8, "little") + message
        self._regions[self.rank].bytes[start : start + len(payload)] = payload

    def fetch(self, owner: int, box: int) -> bytes:
        start = _HEADER_BYTES + self._spec.mailbox_offset(box)
        memory = self._regions[owner].bytes
        length = int.from_bytes(memory[start : start + 8], "little")
        if length > self._spec.mailbox_bytes:
            raise WindowError(
                f"Rank {owner} posted a message of {length} bytes, more than its mailbox holds."
            )
        return bytes(memory[start + 8 : start + 8 + length])

    def _order_memory(self) -> None:
        # x86-64 orders stores with stores and loads with loads. Weaker machines (aarch64) need a fence between
        # data and the word that announces it: an uncontended lock is one release and one acquire operation.
        if not _STRONGLY_ORDERED:
            with self._fence:
                pass

    # -- peers --------------------------------------------------------------------------------------------

    def dead_peers(self) -> list[int]:
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        peers = {fd: peer for peer, fd in self._pidfds.items()}
        for fd in peers:
            poll.register(fd, select.POLLIN)
        return sorted(peers[fd] for fd, _ in poll.poll(0))

    def describe(self, peer: int) -> str:
        return f"rank {peer} (process {self._addresses[peer].pid})"


class _Region:
    """One mapped window: its memory as bytes, words, and tensors."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = memoryview(self._map)
        self.words = self.bytes[_HEADER_BYTES:_HEADER_BYTES]
        self.shards: list[Tensor] = []
        self.accumulators: list[list[Tensor]] = []

    @classmethod
    def create(cls, size: int) -> _Region:
        fd = os.memfd_create("lightning-odc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, seal) for seal in _SEALS))
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    def write_header(self, secret: bytes, rank: int) -> None:
        self.bytes[: _HEADER.size] = _HEADER.pack(secret, rank, len(self.bytes))

    def map_units(self, spec: WindowSpec) -> None:
        self.words = self.bytes[_HEADER_BYTES : _HEADER_BYTES + (spec.words + 1) * 8].cast("q")
        memory = torch.frombuffer(self.bytes, dtype=torch.uint8)[_HEADER_BYTES:]
        for index, (unit, shard, grad) in enumerate(
            zip(spec.units, spec.shard_offsets(), spec.grad_offsets(), strict=True)
        ):
            self.shards.append(memory[shard : shard + unit.shard_bytes].view(unit.shard_dtype))
            starts = [grad + source * spec.grad_stride(index) for source in range(spec.sources)]
            self.accumulators.append([memory[s : s + unit.grad_bytes].view(unit.grad_dtype) for s in starts])

    def lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last tensor that looks at it is freed."""
        self.shards.clear()
        self.accumulators.clear()
        self.words.release()
        self.bytes.release()
        self._map = None
        os.close(self.fd)


def _attach(peer: int, address: _Address, secret: bytes, size: int) -> _Region:
    """Open a peer's window, trusting nothing it said until it was checked."""
    if address.host != _boot_id():
        raise WindowError(
            f"rank {peer} runs on another host, and shared memory ends at the host. Across hosts use "
            'ODCStrategy(communication="collective").'
        )
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WindowError(
            f"the window of rank {peer} (process {address.pid}) cannot be opened: {error.strerror}. All ranks must "
            "run under one user in one container (one process-id namespace)."
        ) from error
    try:
        actual = os.fstat(fd).st_size
        if actual != size or address.size != size:
            raise WindowError(f"the window of rank {peer} has {actual} bytes, expected {size}")
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not sealed & fcntl.F_SEAL_SHRINK:
            raise WindowError(f"the window of rank {peer} is not sealed against shrinking")
        if os.pread(fd, _HEADER.size, 0) != _HEADER.pack(secret, peer, size):
            raise WindowError(f"the window of rank {peer} does not belong to this job")
        return _Region(fd, size)
    except BaseException:
        os.close(fd)
        raise


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        raise WindowError(
            'the shared-memory transport needs Linux; elsewhere use ODCStrategy(communication="collective").'
        )


def _check_memory(size: int, world_size: int) -> None:
    """Refuse before the kernel kills: memory that is promised here is used for sure."""
    available = available_memory()
    needed = size * world_size
    if needed > available:
        raise WindowError(
            f"the windows need {_gib(needed)} GiB ({world_size} ranks of {_gib(size)} GiB: published shards and "
            f"gradient accumulators), but {_gib(available)} GiB are free. Use fewer ranks per host, a smaller model, "
            'bf16 (Trainer(precision="bf16-mixed") halves the shards), or ODCStrategy(communication="collective").'
        )


def available_memory() -> int:
    """Bytes that processes here may still take: the host's, or the control group's if that is less."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free.append(max(limit - used + int(stat["inactive_file"]), 0))
    return min(free)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
