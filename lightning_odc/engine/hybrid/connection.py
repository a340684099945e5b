"""A connection to a rank on another host: small messages, and a notice when the other end is gone.

Ranks that wait for each other across hosts wait at a TCP connection and not inside a collective: a rank cannot leave a
collective before its deadline, and a collective does not say who is missing. The kernel answers for a rank that
computes, so a long microbatch is not a silence. A process that ends closes its connection at once. A host that is cut
off or down is found after a *silence* of seconds, by keep-alive probes and by data without acknowledgement. A rank that
fails says why before it closes. Gradients do not use this connection: they use a collective, which begins when all
ranks are there.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from enum import IntEnum

from lightning_odc.errors import ODCError

_LENGTH_BYTES = 8
_HEAD = _LENGTH_BYTES + 1
_CHUNK = 1 << 16
_LONGEST = 1 << 28
_PROBES = 4
_FAREWELL = 0.5


class Kind(IntEnum):
    """What a message is."""

    RECORD = 0
    FAILURE = 1  # the sender has failed; the message says why
    LEAVE = 2  # the sender is done


class Connection:
    """One end of a connection. Nothing here waits, except `say_last` for a moment.

    Args:
        sock: a connected socket, which belongs to this object from now on.
        name: the rank at the other end and its host, for messages.
        silence: seconds without any sign of the other host after which it counts as cut off.

    Attributes:
        failure: why the rank at the other end failed, once it said so.
        has_left: it said that it is done.
        broken: what happened to the connection, once it cannot be used any more.
    """

    def __init__(self, sock: socket.socket, name: str, silence: float) -> None:
        self.name = name
        self.failure: str | None = None
        self.has_left = False
        self.broken = ""
        self._socket = sock
        self._silence = silence
        self._is_over = False
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._records: deque[bytes] = deque()
        _watch(sock, silence)
        sock.setblocking(False)

    def send(self, kind: Kind, message: bytes) -> None:
        """Put a message on its way; `pump` moves what does not go at once."""
        self._outgoing += len(message).to_bytes(_LENGTH_BYTES, "little") + bytes([kind]) + message
        self.pump()

    @property
    def sent(self) -> bool:
        """Everything has gone."""
        self.pump()
        return not self._outgoing

    @property
    def has_come(self) -> bool:
        """A record that was not taken yet, by what `pump` has found so far (other threads must not call that)."""
        return bool(self._records)

    def take(self) -> bytes:
        """The next record."""
        return self._records.popleft()

    def pump(self) -> None:
        """Move what can be moved now, and look whether the connection still holds."""
        if self.broken:
            return
        try:
            self._push()
            self._pull()
        except OSError as error:
            self.broken = self._describe(error)

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

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                gone = self._socket.send(self._outgoing[:_CHUNK])
                del self._outgoing[:gone]

    def _pull(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._socket.recv(_CHUNK)
                if not data:
                    self.broken = "ended without a word (killed, out of memory, or crashed)"
                    return
                self._incoming += data
                self._parse()

    def _parse(self) -> None:
        while len(self._incoming) >= _HEAD:
            length = int.from_bytes(self._incoming[:_LENGTH_BYTES], "little")
            if length > _LONGEST:
                raise ODCError(f"Rank {self.name} sent a message of {length} bytes, more than is allowed.")
            if len(self._incoming) < _HEAD + length:
                return
            kind = self._incoming[_LENGTH_BYTES]
            message = bytes(self._incoming[_HEAD : _HEAD + length])
            del self._incoming[: _HEAD + length]
            if kind == Kind.RECORD:
                self._records.append(message)
            elif kind == Kind.FAILURE:
                self.failure = message.decode(errors="replace")
            else:
                self.has_left = True

    def _describe(self, error: OSError) -> str:
        if isinstance(error, ConnectionError):
            return f"ended without a word (killed, out of memory, or crashed): {error.strerror}"
        return (
            f"cannot be reached any more: its host is down or cut off, with no sign of it for up to "
            f"{self._silence:g} s ({error.strerror})"
        )


def _watch(sock: socket.socket, silence: float) -> None:
    """Let the kernel find out that the other host is gone."""
    pause = max(int(silence / _PROBES), 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
