"""Connections between ranks of different nodes, here between threads of one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from lightning_odc.engine.hybrid import link as link_module
from lightning_odc.engine.hybrid.link import Connection, Kind, ReplicaLink
from lightning_odc.errors import PeerFailedError, WindowError
from notebooks.support.threads import ThreadHub
from tests.support.interleaving import together

SILENCE = 30.0


def eventually(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end, "it did not happen within 10 s"
        time.sleep(0.001)


def has_record(end: Connection) -> bool:
    end.pump()
    return bool(end.records)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        pair = Connection(one, "0 (here)", SILENCE), Connection(other, "1 (there)", SILENCE)
        for end in pair:
            stack.callback(end.close)
        yield pair


def test_records_arrive_whole_and_in_order(ends):
    one, other = ends
    long = b"x" * 5_000_000  # more than fits into the buffers of a socket
    for message in (b"first", long, b""):
        one.send(Kind.RECORD, message)
    assert not one.sent
    received = []
    eventually(lambda: one.sent or has_record(other))
    while len(received) < 3:
        eventually(lambda: one.sent | has_record(other))
        received += [other.records.popleft()] if other.records else []
    assert received == [b"first", long, b""]
    assert not other.broken


def test_a_message_that_is_too_long_ends_the_connection(ends, monkeypatch):
    monkeypatch.setattr(link_module, "_LONGEST", 100)
    one, other = ends
    other.send(Kind.RECORD, b"x" * 101)
    eventually(lambda: one.sent and "longer message than is allowed" in one.broken)


def columns(count: int) -> list[ReplicaLink]:
    hub, ranks = ThreadHub(count), range(count)
    return [
        ReplicaLink(rank, ranks, partial(hub.rendezvous, rank), "127.0.0.1", [0], SILENCE) for rank in ranks
    ]


@pytest.fixture
def three() -> Iterator[list[ReplicaLink]]:
    made = columns(3)
    assert together(*(column.open for column in made)) == [None] * 3
    yield made
    for column in made:
        column.close()


def test_a_column_hears_all_records_in_order(three):
    for meeting in range(2):
        for rank in (2, 0, 1):  # in any order
            three[rank].begin({"kind": "test", "rank": rank, "meeting": meeting})
        eventually(lambda: all(column.complete() for column in three))
        for column in three:
            assert [(r["rank"], r["meeting"]) for r in column.records()] == [
                (0, meeting),
                (1, meeting),
                (2, meeting),
            ]


def test_nobody_goes_on_before_the_last_has_come_and_one_that_leaves_is_named(three):
    three[0].begin({"rank": 0})
    three[1].begin({"rank": 1})
    time.sleep(0.05)
    assert not three[0].complete() and not three[1].complete()
    assert three[0].missing() == "rank 2 (127.0.0.1)"
    three[2].close()
    says = r"Rank 2 \(127.0.0.1\) has left the training while rank 0 still needs"
    with pytest.raises(PeerFailedError, match=says):
        eventually(three[0].complete)


def test_one_that_fails_is_told_with_its_reason(three):
    three[1].fail("stopped after a peer: something")
    three[2].fail("ValueError: the reason")
    eventually(lambda: "the reason" in three[0].trouble())
    told = "Rank 2 (127.0.0.1) failed, so rank 0 stops too. Its error was:\nValueError"
    assert three[0].trouble().startswith(told), "before one that followed"


def test_strangers_are_turned_away(monkeypatch):
    ports: list[int] = []
    listen = link_module._listen

    def listen_and_tell() -> socket.socket:
        listener = listen()
        ports.append(listener.getsockname()[1])
        # Strangers are the first to connect: two that stay silent, one with the wrong proof, one with nothing at all.
        strangers.extend(socket.create_connection(("127.0.0.1", ports[0])) for _ in range(3))
        strangers[2].sendall((1).to_bytes(8, "little") + b"\0" * 64)
        socket.create_connection(("127.0.0.1", ports[0])).close()
        return listener

    strangers: list[socket.socket] = []
    monkeypatch.setattr(link_module, "_listen", listen_and_tell)
    monkeypatch.setattr(link_module, "_GREETING", 0.1)
    made = columns(2)
    assert together(*(column.open for column in made)) == [None, None]
    made[0].begin({"rank": 0})
    made[1].begin({"rank": 1})
    eventually(lambda: all(column.complete() for column in made))
    for stranger in strangers:
        assert len(stranger.recv(100)) == 32, "a challenge and nothing else"
        assert stranger.recv(1) == b"", "the stranger's connection was closed"
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))
    for column in made:
        column.close()


class Relay:
    """Stands between two ranks and writes down what each of them says."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = port
        self.said: list[tuple[str, bytes]] = []

    def run(self) -> None:
        connects, _ = self.listener.accept()
        with connects, socket.create_connection(("127.0.0.1", self.port)) as listens:
            for name, one, other, count in (
                ("challenge", listens, connects, 32),
                ("hello", connects, listens, 72),
                ("welcome", listens, connects, 32),
            ):
                data = link_module._receive(one, count, 5)
                self.said.append((name, data))
                other.sendall(data)
        self.listener.close()


def test_what_was_said_before_proves_nothing_at_either_end():
    """A recorded connection, played back: to the rank that listens, and to the one that connects."""
    first, last = columns(2)
    with ThreadPoolExecutor() as pool, link_module._listen() as listener:
        port = listener.getsockname()[1]
        relay = Relay(port)
        passing = pool.submit(relay.run)
        accepting = pool.submit(first._accept_all, listener, b"secret")
        there = link_module.ListenAddress(["127.0.0.1"], relay.listener.getsockname()[1], b"secret", "host0")
        last._connect(there).close()
        passing.result()
        accepting.result()
        assert [peer.name for peer in first._peers.values()] == ["1 (127.0.0.1)"], "the relay hid nothing"
        first.close()
        recorded = dict(relay.said)

        with socket.create_connection(("127.0.0.1", port)) as thief:
            thief.sendall(recorded["hello"])
            end, (address, *_) = listener.accept()
            with end, pytest.raises(ConnectionError, match="a stranger"):
                first._greet(b"secret", end, address, [1])

        with socket.create_server(("127.0.0.1", 0)) as thief:
            there = link_module.ListenAddress(["127.0.0.1"], thief.getsockname()[1], b"secret", "host0")
            connecting = pool.submit(last._connect, there)
            end, _ = thief.accept()
            with end:
                end.sendall(recorded["challenge"])
                assert link_module._receive(end, 72, 5) != recorded["hello"], "the other challenge is fresh"
                end.sendall(recorded["welcome"])
                with pytest.raises(OSError, match="another program answered"):
                    connecting.result()


def drip(end: socket.socket) -> None:
    """Say something all the time, for four seconds in all."""
    with suppress(OSError), end:
        for _ in range(39):
            end.sendall(b"\0")
            time.sleep(0.1)


def test_one_that_drips_bytes_does_not_make_ranks_wait(monkeypatch):
    monkeypatch.setattr(link_module, "_PATIENCE", 0.5)
    monkeypatch.setattr(link_module, "_ATTEMPT", 0.5)
    monkeypatch.setattr(link_module, "_GREETING", 0.5)
    first, last = columns(2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        address = listener.getsockname()
        begin = time.monotonic()
        pool.submit(drip, socket.create_connection(address))
        with pytest.raises(TimeoutError, match=r"rank 1 did not connect to port \d+ within 0.5 s"):
            first._accept_all(listener, b"secret")
        listener.setblocking(True)
        connecting = pool.submit(
            last._connect, link_module.ListenAddress([address[0]], address[1], b"secret", "host0")
        )
        pool.submit(drip, listener.accept()[0])
        with pytest.raises(OSError, match=r"rank 0 on host0 cannot be reached at port \d+ .*timed out"):
            connecting.result()
        assert time.monotonic() - begin < 3


def test_a_rank_that_cannot_connect_ends_all_with_the_reason(monkeypatch):
    monkeypatch.setattr(link_module, "_PATIENCE", 0.3)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for error in together(*(column.open for column in columns(2))):
        assert isinstance(error, WindowError)
        assert "rank 1: rank 0 on" in str(error)
        assert "no route to host" in str(error)
        assert "Nodes must be able to open TCP connections" in str(error)
