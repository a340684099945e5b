"""A column: the ranks that hold the same shards, one on every node, joined by lines to the first of them.

Note [Who may connect]
~~~~~~~~~~~~~~~~~~~~~~
The first rank of a column listens on a free port until all others have connected, and then never again. Both ends prove
that they belong to the job by a keyed hash of a secret, which the process group has carried and which no line carries:
somebody else's connection is dropped, and somebody else's answer is not trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_odc.engine.hybrid.connection import Kind, Line
from lightning_odc.engine.peers import FOLLOWED
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.errors import PeerFailedError, WindowError

_SECRET_BYTES = 32
_DIGEST_BYTES = 32
_RANK_BYTES = 8
_PATIENCE = 60.0  # seconds to connect in
_ATTEMPT = 10.0  # seconds for one address


@dataclass(frozen=True)
class Meeting:
    """Where the first rank of a column listens, and what it answers to."""

    addresses: list[str]
    port: int
    secret: bytes
    host: str


class Column:
    """This rank's lines to the others of its column. Made by `Column(...)`, connected by `open`, all ranks together.

    Args:
        rank: of this process.
        ranks: of the column, in ascending order.
        rendezvous: gives every rank's object to every rank of the job; used only while opening.
        main_address: of the host of rank 0, as all ranks know it.
        main_ranks: the ranks on that host.
        silence: see `Line`.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        main_address: str,
        main_ranks: Sequence[int],
        silence: float,
    ) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        self._rendezvous = rendezvous
        self._main_address = main_address
        self._is_on_main = rank in main_ranks
        self._silence = silence
        self._lines: dict[int, Line] = {}
        self._own = b""
        self._all: list[Any] | None = None

    @property
    def _first(self) -> int:
        return self.ranks[0]

    # -- connecting: see Note [Who may connect] -----------------------------------------------------------

    def open(self) -> None:
        """Connect. All ranks of the job together.

        Raises:
            WindowError: on every rank if any rank could not.
        """
        error, listener, own = "", None, None
        try:
            if self.rank == self._first:
                listener = _listen()
                addresses = [_address_towards(self._main_address)]
                addresses += [self._main_address] if self._is_on_main else []
                secret = secrets.token_bytes(_SECRET_BYTES)
                own = Meeting(addresses, listener.getsockname()[1], secret, socket.gethostname())
        except OSError as exception:
            error = f"no port to listen on: {exception}"
        with contextlib.ExitStack() as stack:
            if listener is not None:
                stack.enter_context(listener)
            meetings = self._agree(own, error)
            error = ""
            try:
                if listener is not None and own is not None:
                    self._accept_all(listener, own.secret)
                elif meetings[self._first] is not None:
                    self._lines[self._first] = self._connect(meetings[self._first])
            except OSError as exception:
                error = str(exception)
            self._agree(None, error)

    def _agree(self, item: Meeting | None, error: str) -> list[Any]:
        answers = self._rendezvous((item, error))
        reasons = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason]
        if reasons:
            self.close()
            raise WindowError("Ranks could not be joined across nodes. " + "\n".join(reasons))
        return [answer for answer, _ in answers]

    def _accept_all(self, listener: socket.socket, secret: bytes) -> None:
        end = time.monotonic() + _PATIENCE
        while missing := [rank for rank in self.ranks[1:] if rank not in self._lines]:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection, (address, *_) = listener.accept()
            except TimeoutError:
                raise TimeoutError(
                    f"rank {missing[0]} did not connect to port {listener.getsockname()[1]} within {_PATIENCE:g} s. "
                    "Nodes must be able to open TCP connections to each other on any port."
                ) from None
            try:
                connection.settimeout(_ATTEMPT)
                hello = _receive(connection, _DIGEST_BYTES + _RANK_BYTES)
                rank = int.from_bytes(hello[_DIGEST_BYTES:], "little")
                if rank not in missing or not hmac.compare_digest(
                    hello[:_DIGEST_BYTES], _proof(secret, "hello", rank)
                ):
                    raise ConnectionError("a stranger")
                connection.sendall(_proof(secret, "welcome", rank))
            except OSError:
                connection.close()
                continue
            self._lines[rank] = Line(connection, f"{rank} ({address.removeprefix('::ffff:')})", self._silence)

    def _connect(self, meeting: Meeting) -> Line:
        errors = []
        for address in dict.fromkeys(meeting.addresses):
            connection = None
            try:
                connection = socket.create_connection((address, meeting.port), timeout=_ATTEMPT)
                hello = _proof(meeting.secret, "hello", self.rank)
                connection.sendall(hello + self.rank.to_bytes(_RANK_BYTES, "little"))
                answer = _receive(connection, _DIGEST_BYTES)
                if not hmac.compare_digest(answer, _proof(meeting.secret, "welcome", self.rank)):
                    raise ConnectionError("somebody else answered")
                return Line(connection, f"{self._first} ({address})", self._silence)
            except OSError as error:
                errors.append(f"{address}: {error}")
                if connection is not None:
                    connection.close()
        raise OSError(
            f"rank {self._first} on {meeting.host} cannot be reached at port {meeting.port} ({'; '.join(errors)}). "
            "Nodes must be able to open TCP connections to each other on any port."
        )

    # -- meeting ------------------------------------------------------------------------------------------

    def begin(self, record: Any) -> None:
        """Say this rank's record; `complete` tells when everybody's has come."""
        self._own, self._all = json.dumps(record).encode(), None
        if self.rank != self._first:
            self._lines[self._first].send(Kind.RECORD, self._own)

    def complete(self) -> bool:
        """Whether everybody's record is here, and on its way to everybody.

        Raises:
            PeerFailedError: somebody left without saying a record.
        """
        for line in self._lines.values():
            line.pump()
        if self._all is None and all(line.has_come for line in self._lines.values()):
            if self.rank == self._first:
                records = [self._own, *(self._lines[rank].take() for rank in self.ranks[1:])]
                everything = b"[" + b",".join(records) + b"]"
                for line in self._lines.values():
                    line.send(Kind.RECORD, everything)
            else:
                everything = self._lines[self._first].take()
            self._all = json.loads(everything)
        if self._all is None:
            self._check_nobody_left()
        return self._all is not None and all(line.sent for line in self._lines.values())

    def records(self) -> list[Any]:
        """Everybody's record in the order of the column, once it is `complete`."""
        assert self._all is not None
        return self._all

    # -- how the others are -------------------------------------------------------------------------------

    def missing(self) -> str:
        """For whom this rank waits, for messages; also for those of other threads."""
        return (
            ", ".join(f"rank {line.name}" for line in self._lines.values() if not line.has_come) or "nobody"
        )

    def trouble(self) -> str:
        """Which rank of the column failed or ended out of order, and why; empty if none did."""
        for line in self._lines.values():
            line.pump()
        told = [line for line in self._lines.values() if line.failure is not None]
        told.sort(key=lambda line: (line.failure or "").startswith(FOLLOWED))
        for line in told:
            return f"Rank {line.name} failed, so rank {self.rank} stops too. Its error was:\n{line.failure}"
        gone = [line for line in self._lines.values() if line.broken and not line.has_left]
        return f"Rank {gone[0].name} {gone[0].broken}." if gone else ""

    def _check_nobody_left(self) -> None:
        for line in self._lines.values():
            if line.has_left and not line.has_come:
                raise PeerFailedError(
                    f"Rank {line.name} has left the training while rank {self.rank} still needs it. Every rank needs "
                    "the same number of Lightning batches and optimizer steps."
                )

    def fail(self, message: str) -> None:
        """Tell the others that this rank has failed, and why."""
        self._say_last(Kind.FAILURE, message.encode())

    def close(self) -> None:
        """Leave for good. Idempotent."""
        self._say_last(Kind.LEAVE)
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _say_last(self, kind: Kind, message: bytes = b"") -> None:
        for line in self._lines.values():
            line.say_last(kind, message)


def _proof(secret: bytes, word: str, rank: int) -> bytes:
    return hmac.digest(secret, f"lightning-odc {word} {rank}".encode(), "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


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
