"""What nodes tell each other through a store, here between threads of one process, with a connection each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from lightning_odc.protocol.nodes import leaders as module
from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.protocol.nodes.leaders import Leaders
from notebooks.support.threads import ThreadHub
from tests.support.interleaving import together

SILENCE = 1.0


def eventually(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end, "it did not happen within 10 s"
        time.sleep(0.001)


def met(one: Leaders, message: bytes) -> list[bytes]:
    heard = one.meet(message)
    eventually(lambda: bool(heard))
    return heard


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def made(store: TCPStore, nodes: int, silence: float = SILENCE) -> list[Leaders]:
    """Of ranks 0, 2, 4, ...: each leads a node of two, and the other rank is not there."""
    hub = ThreadHub(nodes)

    def answers(node: int, own: object) -> list[object]:
        return [answer for answer in hub.rendezvous(node, own) for _ in range(2)]

    everybody = [
        Leaders(Layout(nodes, 2, 2 * node), partial(answers, node), store, "127.0.0.1", silence)
        for node in range(nodes)
    ]
    assert together(*(one.open for one in everybody)) == [None] * nodes
    return everybody


@pytest.fixture
def three(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Leaders]]:
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.05)
    everybody = made(store, 3)
    yield everybody
    for one in everybody:
        one.close()


def test_leaders_hear_all_messages_in_order_and_leave_none_behind(store, three):
    heard: dict[int, list[list[bytes]]] = {node: [] for node in range(3)}

    def meet(node: int) -> None:
        for meeting in range(1, 4):
            time.sleep(0.01 * ((node + meeting) % 3))
            encoded = f"{meeting} of {node}".encode()
            heard[node].append(met(three[node], encoded))

    before = store.num_keys()
    assert together(*(partial(meet, node) for node in range(3))) == [None] * 3
    expected = [[f"{meeting} of {node}".encode() for node in range(3)] for meeting in range(1, 4)]
    assert heard == dict.fromkeys(range(3), expected)
    eventually(
        lambda: store.num_keys() <= before + 3 + 3 + 2
    )  # lives, the last meeting, its count, and no trouble


def test_long_messages(three):
    long = b"x" * module.MOST_BYTES
    found: list[list[bytes]] = []
    meets = [partial(lambda one: found.append(met(one, long)), one) for one in three]
    assert together(*meets) == [None] * 3
    assert found == [[long] * 3] * 3


def test_a_leader_waits_for_the_last_one_and_names_its_ranks(three):
    first = three[0].meet(b"0")
    three[2].meet(b"2")
    eventually(lambda: three[0].missing == "ranks 2 to 3 (127.0.0.1)")
    assert not first
    met(three[1], b"1")
    eventually(lambda: first == [b"0", b"1", b"2"])


def test_one_that_leaves_is_named(three):
    three[1].close()
    three[2].close()
    assert three[0].trouble() == ""
    three[0].meet(b"0")
    eventually(lambda: bool(three[0].trouble()))
    says = "One of ranks 2 to 3 (127.0.0.1) has left the training while rank 0 still needs it"
    assert three[0].trouble().startswith(says)


def test_a_collective_that_broke_has_the_reason_that_is_known_soon_or_names_who_took_part(three, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    three[0].broke("A sum", RuntimeError("connection closed"))
    three[1].broke("A sum", RuntimeError("connection closed"))
    three[1].of_node = lambda: "rank 3 ended"
    eventually(lambda: bool(three[0].trouble()))
    assert three[0].trouble() == three[1].trouble() == "On 127.0.0.1: rank 3 ended"


def test_a_collective_that_broke_without_a_known_reason_names_who_took_part(three, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    three[1].broke("A sum", RuntimeError("timed out"))
    eventually(lambda: bool(three[1].trouble()))
    says = "A sum over nodes broke on rank 2. The reason is not known. Ranks [0, 2, 4] took part in it.\ntimed out"
    assert three[1].trouble() == says


@pytest.mark.parametrize("late", [0, 1], ids=["looks late", "publishes late"])
def test_all_publish_before_shards_are_sent_and_hear_whether_one_has_edited(store, late):
    hub = ThreadHub(4)
    found: list[list[bool]] = [[], [], [], []]

    def publish(rank: int) -> None:
        one = Leaders(Layout(2, 2, rank), partial(hub.rendezvous, rank), store, "127.0.0.1", SILENCE)
        one.open()
        until = one.until

        def until_and_later(condition: Callable[[], bool]) -> None:
            until(condition)
            time.sleep(0.3)  # others have published the next version by then

        if rank == late == 0:
            one.until = until_and_later  # type: ignore[method-assign]
        for version in (1, 2, 3):
            if rank == late == 1:
                time.sleep(0.1)
                assert [len(heard) for heard in found] == [version - 1] * 4, "they wait for this rank"
            edited = rank == 3 and version == 2
            one.begin(lambda: found[rank].append(one.all_have_published(version, edited)))  # noqa: B023
            eventually(lambda: len(found[rank]) == version)  # noqa: B023
        one.close()

    assert together(*(partial(publish, rank) for rank in range(4))) == [None] * 4
    assert found == [[False, True, False]] * 4


def test_what_happened_first_on_a_node_is_told_with_its_address(three):
    three[1].of_node = lambda: "rank 3 (process 77) ended without an error message"
    eventually(lambda: bool(three[2].trouble()))
    three[2].of_node = lambda: "Rank 5 failed, too"
    for one in three:
        eventually(lambda one=one: bool(one.trouble()))  # type: ignore[misc]
        assert one.trouble() == "On 127.0.0.1: rank 3 (process 77) ended without an error message"


def test_what_happened_just_before_a_rank_leaves_is_told(three):
    three[2].of_node = lambda: "Rank 4 failed"
    three[2].close()
    eventually(lambda: three[0].trouble() == "On 127.0.0.1: Rank 4 failed")


@pytest.fixture
def is_over(three: list[Leaders]) -> Iterator[threading.Event]:
    """Set at the end of a test, also of one that fails: a thread that waits for it ends then."""
    event = threading.Event()
    yield event
    event.set()


def test_a_silent_host_is_named_with_its_address(three, is_over):
    begin = time.monotonic()
    # It is not looking. Of the ranks of the node that looks for it, every other one is not there.
    three[1].begin(is_over.wait)
    eventually(lambda: bool(three[2]._trouble))
    assert "no sign of ranks 2 to 3 (127.0.0.1) for 1 s: their host is down or cut off" in three[2].trouble()
    assert time.monotonic() - begin >= 2 * SILENCE


def test_a_host_that_only_computes_is_not_silent(store):
    """Other ranks of its node show that it lives."""
    hub = ThreadHub(4)
    four = [
        Leaders(Layout(2, 2, rank), partial(hub.rendezvous, rank), store, "127.0.0.1", SILENCE)
        for rank in range(4)
    ]
    assert together(*(one.open for one in four)) == [None] * 4
    four[2].begin(partial(time.sleep, 2 * SILENCE))
    time.sleep(2 * SILENCE)
    assert [one.trouble() for one in four] == [""] * 4
    for one in four:
        one.close()


class Silent:
    """A store that does not answer any more, as if its host was cut off, until the test is over."""

    def __init__(self, is_over: threading.Event) -> None:
        self._is_over = is_over

    def __getattr__(self, _: str) -> Callable[..., None]:
        return self.request

    def request(self, *_: object) -> None:
        self._is_over.wait()
        raise ConnectionError("the connection has ended")


def test_a_store_that_does_not_answer_is_named(three, is_over):
    assert three[1].trouble() == ""
    three[1]._store = Silent(is_over)
    eventually(lambda: bool(three[1].trouble()))
    says = "no sign of the store by which ranks find each other, on 127.0.0.1, for 1 s: its host is down or cut off"
    assert says in three[1].trouble()
