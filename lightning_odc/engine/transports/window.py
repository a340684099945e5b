"""One window in anonymous memory: made by its owner, attached by peers, seen as words, bytes and tensors."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import WindowSpec
from lightning_odc.engine.transports.host import Fence, boot_id
from lightning_odc.errors import WindowError
from lightning_odc.host_memory import gib

#: Bytes before the window's own layout begins.
HEADER_BYTES = 4096
_HEADER = struct.Struct("<32sqq")  # secret, rank, total bytes
#: Looked up by name: other systems, where this module is imported but not used, do not have them.
_SEALS = sum(getattr(fcntl, name, 0) for name in ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"))
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_PAGE = 4096


@dataclass(frozen=True)
class Address:
    """The address of a rank's window, for its peers: the host, the process and the descriptor."""

    host: str
    pid: int
    fd: int


class MappedWindow:
    """One mapped window."""

    def __init__(self, fd: int, size: int) -> None:
        # It carries the locks: nothing else in this process may keep a copy; forked processes have one.
        self.fd = fd
        self.memory = _map(fd, size)  # 1-D, ``uint8``; the mapping lasts as long as any view of it
        self.bytes = self.memory.numpy().data  # all of it, for headers and mailboxes
        self.words = self.bytes[:0]  # the control words and the claim word, once `map_units` was called
        self.shards: list[Tensor] = []
        self.accumulators: list[list[Tensor]] = []

    @classmethod
    def create(cls, size: int) -> MappedWindow:
        """A zeroed window whose memory is claimed and whose size is final."""
        fd = os.memfd_create("lightning-odc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            _allocate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, peer: int, address: Address, secret: bytes, size: int) -> MappedWindow:
        """A peer's window, trusting nothing it said until it was checked."""
        fd = _open(peer, address)
        try:
            _check(fd, peer, secret, size)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    def write_header(self, secret: bytes, rank: int) -> None:
        """Sign the window: whose it is, in which job."""
        self.bytes[: _HEADER.size] = _HEADER.pack(secret, rank, len(self.bytes))

    def map_units(self, spec: WindowSpec) -> None:
        """Make the views that ``spec`` lays out."""
        self.words = self.bytes[HEADER_BYTES : HEADER_BYTES + (spec.words + 1) * 8].cast("q")
        self.shards, self.accumulators = spec.views(self.memory[HEADER_BYTES:])

    def close(self) -> None:
        """Close the descriptor and release the locks and the memory. The last view that dies unmaps it."""
        self.shards.clear()
        self.accumulators.clear()
        self.words = self.bytes = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class RangeLock:
    """The lock of one byte of a region, which excludes all other open file descriptions of it."""

    def __init__(self, fd: int, byte: int, fence: Fence | None = None) -> None:
        self._fd = fd
        self._fence = fence
        self._take, self._give = (
            _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
        )

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


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise WindowError(_limited(size, "allocated", error)) from error


def _map(fd: int, size: int) -> Tensor:
    try:
        mmap.mmap(fd, size).close()  # where this fails, torch would fail, too, and leave a descriptor open
    except OSError as error:
        raise WindowError(_limited(size, "mapped", error)) from error
    path = f"/proc/self/fd/{fd}"
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
    memory[::_PAGE].sum()  # map every page now, not in the first step
    return memory


def _limited(size: int, what: str, error: OSError) -> str:
    return (
        f"a window of {gib(size)} GiB could not be {what}: {error.strerror}. Look at the limits of the process "
        "(`ulimit -a`) and of its container."
    )


def _open(peer: int, address: Address) -> int:
    if address.host != boot_id():
        raise WindowError(
            f"rank {peer} runs on another host, and shared memory ends at the host. Ranks of a node need neighbouring "
            "numbers (SLURM: --distribution=block), and Trainer(num_nodes=...) must be the number of hosts. Or write "
            'ODCStrategy(communication="collective").'
        )
    try:
        return os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WindowError(
            f"the window of rank {peer} (process {address.pid}) cannot be opened: {error.strerror}. All ranks must "
            "run under one user in one container (one process-id namespace)."
        ) from error


def _check(fd: int, peer: int, secret: bytes, size: int) -> None:
    actual = os.fstat(fd).st_size
    if actual != size:
        raise WindowError(f"the window of rank {peer} has {actual} bytes, expected {size}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise WindowError(f"the window of rank {peer} is not sealed: its size could change under its readers")
    if os.pread(fd, _HEADER.size, 0) != _HEADER.pack(secret, peer, size):
        raise WindowError(f"the window of rank {peer} does not belong to this job")
