"""The link between ranks that hold the same shards, one on every node (a *column*): connections to the first one.

The first rank of a column listens on a free port until all others have connected. Both ends prove that they belong to
the job. The process group has carried a secret; no connection carries it. Each end sends a random challenge, and each
proof is a keyed hash (HMAC) of both challenges, so what was said on another connection proves nothing::

    listens                                      connects
    challenge                                ->
                                             <-  rank, challenge, HMAC("hello", rank, both challenges)
    HMAC("welcome", rank, both challenges)   ->

Ranks wait for each other across hosts at a TCP connection: a rank cannot leave a collective before its deadline, and a
collective does not say who is missing. The kernel answers for a rank that computes. A process that ends closes its
connection at once. A host that is cut off or down is found after a *silence* of seconds, by keep-alive probes and by
data without acknowledgement.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lightning_odc.engine.peers import FOLLOWED
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.errors import PeerFailedError, WindowError

_SECRET_BYTES = 32
_DIGEST_BYTES = 32
_CHALLENGE_BYTES = 32
_RANK_BYTES = 8
_PATIENCE = 60.0  # seconds to connect in
_ATTEMPT = 10.0  # seconds for one address
_GREETING = 2.0  # seconds for what a connection says first; several strangers must fit into an attempt
_CHUNK = 1 << 16
_LONGEST = 1 << 28  # bytes of a message
_PROBES = 4
_FAREWELL = 0.5


class Kind(IntEnum):
    """What a message is, by its first byte."""

    RECORD = ord("r")
    FAILURE = ord("f")  # the sender has failed; the message says why
    LEAVE = ord("l")  # the sender is done


class Connection:
    """One end of a connection. Nothing here waits, except `say_last` for a moment."""

    def __init__(self, sock: socket.socket, name: str, silence: float) -> None:
        self.name = name  # the rank at the other end and its host, for messages
        self.failure: str | None = None  # why the rank at the other end failed, once it said so
        self.has_left = False  # it said that it is done
        self.broken = ""  # what happened to the connection, once it cannot be used any more
        self._socket = sock
        self._silence = silence  # seconds without any sign of the other host after which it counts as cut off
        self._is_over = False
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.records: deque[bytes] = deque()  # that came and were not taken yet
        # Let the kernel find out that the other host is gone.
        pause = max(int(silence / _PROBES), 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
        sock.setblocking(False)

    def send(self, kind: Kind, message: bytes) -> None:
        """Put a message, which is JSON and so one line, on its way; `pump` moves what does not go at once."""
        self._outgoing += bytes([kind]) + message + b"\n"
        self.pump()

    @property
    def sent(self) -> bool:
        """Everything has gone."""
        self.pump()
        return not self._outgoing

    def pump(self) -> None:
        """Move what can be moved now, and look whether the connection still holds."""
        if self.broken:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._outgoing:
                    gone = self._socket.send(self._outgoing[:_CHUNK])
                    del self._outgoing[:gone]
            with contextlib.suppress(BlockingIOError):
                while data := self._socket.recv(_CHUNK):
                    self._incoming += data
                    if len(self._incoming) > _LONGEST:
                        self.broken = "sent a longer message than is allowed"
                        return
                    if b"\n" in data:
                        *lines, self._incoming = self._incoming.split(b"\n")
                        for line in lines:
                            self._take_in(line[0], bytes(line[1:]))
                self.broken = "ended without a word (killed, out of memory, or crashed)"
        except ConnectionError as error:
            self.broken = f"ended without a word (killed, out of memory, or crashed): {error.strerror}"
        except OSError as error:
            self.broken = (
                f"cannot be reached any more: its host is down or cut off, with no sign of it for up to "
                f"{self._silence:g} s ({error.strerror})"
            )

    def say_last(self, kind: Kind, message: bytes = b"") -> None:
        """Send the last message; what is said after it does not count."""
        if self._is_over or self.broken:
            return
        self._is_over = True
        self.send(kind, message)
        end = time.monotonic() + _FAREWELL
        while not (self.sent or self.broken) and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        self.broken = self.broken or "closed"
        self._socket.close()

    def _take_in(self, kind: int, message: bytes) -> None:
        if kind == Kind.RECORD:
            self.records.append(message)
        elif kind == Kind.FAILURE:
            self.failure = json.loads(message)
        else:
            self.has_left = True


@dataclass(frozen=True)
class ListenAddress:
    """The address and the secret with which the first rank of a column listens."""

    addresses: list[str]
    port: int
    secret: bytes
    host: str


class ReplicaLink:
    """This rank's connections to the others of its column. `open` connects, on all ranks together."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],  # of the column, in ascending order
        rendezvous: Rendezvous,
        main_address: str,  # of the host of rank 0, which all ranks know
        main_ranks: Sequence[int],  # those on that host
        silence: float,
    ) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        self._first = self.ranks[0]
        self._rendezvous = rendezvous
        self._main_address = main_address
        self._is_on_main = rank in main_ranks
        self._silence = silence
        self._peers: dict[int, Connection] = {}
        self._own = b""
        self._all: list[Any] | None = None

    def open(self) -> None:
        """Connect. All ranks of the job together."""
        error = ""
        listener = None
        own = None
        try:
            if self.rank == self._first:
                listener = _listen()
                port = listener.getsockname()[1]
                addresses = [_address_towards(self._main_address)]
                if self._is_on_main:
                    addresses.append(self._main_address)
                secret = secrets.token_bytes(_SECRET_BYTES)
                own = ListenAddress(addresses, port, secret, host=socket.gethostname())
        except OSError as exception:
            error = f"no port to listen on: {exception}"
        with contextlib.ExitStack() as stack:
            if listener is not None:
                stack.enter_context(listener)
            listening = self._agree(own, error)
            first = listening[self._first]
            error = ""
            try:
                if listener is not None and own is not None:
                    self._accept_all(listener, own.secret)
                elif first is not None:
                    self._peers[self._first] = self._connect(first)
            except OSError as exception:
                error = str(exception)
            self._agree(None, error)

    def _agree(self, item: ListenAddress | None, error: str) -> list[ListenAddress | None]:
        answers = self._rendezvous((item, error))
        reasons = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason]
        if reasons:
            self.close()
            raise WindowError("Ranks could not be joined across nodes. " + "\n".join(reasons))
        return [answer for answer, _ in answers]

    def _accept_all(self, listener: socket.socket, secret: bytes) -> None:
        """Greet all that connect, one after the other. A silent stranger is not waited for any longer than 2 s."""
        end = time.monotonic() + _PATIENCE
        while missing := [rank for rank in self.ranks[1:] if rank not in self._peers]:
            listener.settimeout(_until(end))
            try:
                sock, (address, *_) = listener.accept()
            except TimeoutError:
                port = listener.getsockname()[1]
                raise TimeoutError(
                    f"rank {missing[0]} did not connect to port {port} within {_PATIENCE:g} s. "
                    "Nodes must be able to open TCP connections to each other on any port."
                ) from None
            try:
                self._greet(secret, sock, address, missing)
            except OSError:
                sock.close()

    def _greet(self, secret: bytes, sock: socket.socket, address: str, missing: list[int]) -> None:
        """Make a connection that of a peer; an error if it is a stranger's."""
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.sendall(challenge)
        hello = _receive(sock, _RANK_BYTES + _CHALLENGE_BYTES + _DIGEST_BYTES, _GREETING)
        rank = int.from_bytes(hello[:_RANK_BYTES], "little")
        both = challenge + hello[_RANK_BYTES:-_DIGEST_BYTES]
        if rank not in missing or not _is_proof(hello[-_DIGEST_BYTES:], secret, "hello", rank, both):
            raise ConnectionError("a stranger")
        sock.sendall(_proof(secret, "welcome", rank, both))
        host = address.removeprefix("::ffff:")
        self._peers[rank] = Connection(sock, f"{rank} ({host})", self._silence)

    def _connect(self, first: ListenAddress) -> Connection:
        errors = []
        for host in dict.fromkeys(first.addresses):
            sock = None
            try:
                sock = socket.create_connection((host, first.port), timeout=_ATTEMPT)
                challenge = secrets.token_bytes(_CHALLENGE_BYTES)
                both = _receive(sock, _CHALLENGE_BYTES, _ATTEMPT) + challenge
                hello = _proof(first.secret, "hello", self.rank, both)
                sock.sendall(self.rank.to_bytes(_RANK_BYTES, "little") + challenge + hello)
                answer = _receive(sock, _DIGEST_BYTES, _ATTEMPT)
                if not _is_proof(answer, first.secret, "welcome", self.rank, both):
                    raise ConnectionError("another program answered")
                return Connection(sock, f"{self._first} ({host})", self._silence)
            except OSError as error:
                errors.append(f"{host}: {error}")
                if sock is not None:
                    sock.close()
        reasons = "; ".join(errors)
        raise OSError(
            f"rank {self._first} on {first.host} cannot be reached at port {first.port} ({reasons}). "
            "Nodes must be able to open TCP connections to each other on any port."
        )

    def begin(self, record: Any) -> None:
        """Send this rank's record; `complete` tells when all records have come."""
        self._own = json.dumps(record).encode()
        self._all = None
        if self.rank != self._first:
            self._peers[self._first].send(Kind.RECORD, self._own)

    def complete(self) -> bool:
        """Whether all records are here, and on their way to all ranks."""
        peers = self._peers.values()
        for peer in peers:
            peer.pump()
        if self._all is None and all(peer.records for peer in peers):
            if self.rank == self._first:
                others = [self._peers[rank].records.popleft() for rank in self.ranks[1:]]
                everything = b"[" + b",".join([self._own, *others]) + b"]"
                for peer in peers:
                    peer.send(Kind.RECORD, everything)
            else:
                everything = self._peers[self._first].records.popleft()
            self._all = json.loads(everything)
        if self._all is not None:
            return all(peer.sent for peer in peers)
        for peer in peers:
            if peer.has_left and not peer.records:
                raise PeerFailedError(
                    f"Rank {peer.name} has left the training while rank {self.rank} still needs it. Every rank needs "
                    "the same number of Lightning batches and optimizer steps."
                )
        return False

    def records(self) -> list[Any]:
        """The records of all ranks in the order of the column, once they are `complete`."""
        assert self._all is not None
        return self._all

    def missing(self) -> str:
        """The ranks that this rank waits for, other threads included, as messages name them."""
        missing = [f"rank {peer.name}" for peer in self._peers.values() if not peer.records]
        return ", ".join(missing) or "no rank"

    def trouble(self) -> str:
        """Which rank of the column failed or ended out of order, and why; empty if none did."""
        for peer in self._peers.values():
            peer.pump()
        told = [peer for peer in self._peers.values() if peer.failure is not None]
        told.sort(key=lambda peer: (peer.failure or "").startswith(FOLLOWED))
        for peer in told:
            return f"Rank {peer.name} failed, so rank {self.rank} stops too. Its error was:\n{peer.failure}"
        for peer in self._peers.values():
            if peer.broken and not peer.has_left:
                return f"Rank {peer.name} {peer.broken}."
        return ""

    def fail(self, message: str) -> None:
        """Tell the others that this rank has failed, and why."""
        for peer in self._peers.values():
            peer.say_last(Kind.FAILURE, json.dumps(message).encode())

    def close(self) -> None:
        """Leave for good. Idempotent."""
        for peer in self._peers.values():
            peer.say_last(Kind.LEAVE)
            peer.close()
        self._peers.clear()


def _until(end: float) -> float:
    """Seconds until then, for a socket: 0 would mean not to wait at all."""
    return max(end - time.monotonic(), 0.001)


def _receive(sock: socket.socket, count: int, seconds: float) -> bytes:
    """So many bytes, within so many seconds."""
    end = time.monotonic() + seconds
    heard = b""
    while len(heard) < count:
        sock.settimeout(_until(end))
        more = sock.recv(count - len(heard))
        if not more:
            raise ConnectionError("the connection was closed")
        heard += more
    return heard


def _proof(secret: bytes, word: str, rank: int, challenges: bytes) -> bytes:
    return hmac.digest(secret, f"lightning-odc {word} {rank} ".encode() + challenges, "sha256")


def _is_proof(heard: bytes, *proven: Any) -> bool:
    return hmac.compare_digest(heard, _proof(*proven))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _address_towards(host: str) -> str:
    """The address of this host that a host sees with which it would talk. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
