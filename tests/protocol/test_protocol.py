"""The protocol's invariants under random interleavings, and proof that the explorer sees broken protocols."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from lightning_odc.errors import DisagreementError, PeerFailedError, StaleShardError, WaitTimeoutError
from lightning_odc.protocol import protocol as protocol_module
from lightning_odc.protocol.peers import FOLLOWED, Word
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.stealing import WorkQueues
from lightning_odc.protocol.transports.base import Segment, UnitSpec
from lightning_odc.protocol.waiting import Cause, HangReport
from notebooks.support.threads import ThreadHub
from tests.support.interleaving import Interleaved, Scheduler, interleave, together

UNITS = (
    UnitSpec("first", 4, torch.float32, 4, torch.float32),
    UnitSpec("second", 2, torch.float32, 2, torch.float32),
)
STEPS = 4


class ViolationError(AssertionError):
    """A rank saw something that the protocol forbids."""


def text_length(rank: int, version: int) -> int:
    """How much a rank says: another one has most to say in every step."""
    return 200 * ((rank + version) % 3)


def value_of(version: int, rank: int, unit: int) -> float:
    return 100.0 * version + 10 * rank + unit


def play(protocol: Protocol, microbatches: list[list[int]]) -> None:
    """One rank of a toy training run that checks everything it reads; ``microbatches[step][rank]`` is how many."""
    rank = protocol.transport.rank
    world = protocol.transport.world_size
    protocol.open()
    publish(protocol)
    for counts in microbatches:
        for _ in range(counts[rank]):
            for unit in range(len(UNITS)):
                check_gather(protocol, unit)
            for unit in reversed(range(len(UNITS))):
                chunks = torch.full((world, UNITS[unit].grad_numel), 1.0 + rank)
                protocol.windows[unit].accumulate(chunks.view(-1), [Segment(0, 0, UNITS[unit].grad_numel)])
        name = str(protocol.version) * text_length(rank, protocol.version)
        records = protocol.end_version("step", {"count": counts[rank], "text": name})
        if [record["count"] for record in records] != counts:
            raise ViolationError(f"records of another meeting: {records}, expected {counts}")
        for peer, record in enumerate(records):
            if record["text"] != str(protocol.version) * text_length(peer, protocol.version):
                raise ViolationError(f"torn record: {record}")
        expected = sum((1.0 + peer) * count for peer, count in enumerate(counts))
        for unit in range(len(UNITS)):
            total = protocol.windows[unit].summed().unique().tolist()
            if total != [expected]:
                raise ViolationError(f"lost or doubled add: {total} instead of {expected}")
            protocol.windows[unit].clear()
        protocol.next_version()
        publish(protocol)
    protocol.meet("end")


def publish(protocol: Protocol) -> None:
    for unit, spec in enumerate(UNITS):
        value = value_of(protocol.version, protocol.transport.rank, unit)
        half = spec.shard_numel // 2
        protocol.windows[unit].own_shard[:half] = value
        protocol.transport.load(protocol.transport.rank, Word.VERSION)  # let others in between
        protocol.windows[unit].own_shard[half:] = value
        protocol.windows[unit].publish()


def check_gather(protocol: Protocol, unit: int) -> None:
    rank = protocol.transport.rank
    world = protocol.transport.world_size
    out = torch.zeros(world, UNITS[unit].shard_numel)
    protocol.windows[unit].gather(out.view(-1))
    for peer in set(range(world)) - {rank}:
        seen = out[peer].unique().tolist()
        expected = value_of(protocol.version, peer, unit)
        if seen != [expected]:
            raise ViolationError(f"torn or stale read of rank {peer}: {seen} instead of {expected}")


def explore(
    seed: int, world_size: int = 3, protocol_class: type[Protocol] = Protocol, **options: Any
) -> list[BaseException | None]:
    """Play with one interleaving; returns each rank's exception."""
    rng = random.Random(seed)
    counts = [[rng.choice([0, 1, 2, 3]) for _ in range(world_size)] for _ in range(STEPS)]
    hub = ThreadHub(world_size, timeout=20)
    errors: list[BaseException | None] = [None] * world_size

    def work(rank: int, scheduler: Scheduler) -> None:
        protocol = protocol_class(Interleaved(hub.transport(rank), scheduler), UNITS, timeout=10, **options)
        try:
            play(protocol, counts)
        except Exception as error:  # a broken protocol fails in many ways
            errors[rank] = error
            protocol.transport._scheduled = False  # type: ignore[attr-defined]
            protocol.fail(str(error))

    scheduler = interleave(world_size, seed, work)
    assert scheduler.operations > 100, errors
    return errors


@pytest.mark.parametrize(
    ("options", "mailbox"),
    [({}, 2**16), ({"deterministic": True}, 2**16), ({}, 64)],
    ids=["locked", "deterministic", "records longer than a mailbox"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_invariants_hold_in_random_interleavings(monkeypatch, world_size, options, mailbox):
    monkeypatch.setattr(protocol_module, "_MAILBOX_BYTES", mailbox)
    for seed in range(15):
        errors = explore(seed, world_size, **options)
        assert errors == [None] * world_size, f"seed {seed}: {errors}"


class WithoutVersions(Protocol):
    """Reads without waiting for the version."""

    def open(self) -> None:
        super().open()
        for window in self.windows:
            window._await_version = lambda *_: None  # type: ignore[method-assign]


class WithoutMeeting(Protocol):
    """Takes its sums without waiting for the others to be done."""

    def await_all(self, *_: Any) -> None:
        pass


class WithoutLocks(Protocol):
    """Adds without taking the lock."""

    def open(self) -> None:
        super().open()
        for window in self.windows:
            window._accumulators = [target._replace(lock=None) for target in window._accumulators]


class PublishesEarly(Protocol):
    """Announces the next version before it is written."""

    def next_version(self) -> None:
        super().next_version()
        for unit in range(len(UNITS)):
            self.windows[unit].publish()


class ForgetsToClear(Protocol):
    """Leaves the sums of the last step in the accumulators."""

    def open(self) -> None:
        super().open()
        for window in self.windows:
            window.clear = lambda *_: None  # type: ignore[method-assign]


class OneMailbox(Protocol):
    """Posts every part of a record over the last one, which others may still be reading."""

    def meet_once(self, message: bytes, kind: str) -> list[bytes]:
        self._meetings += 1  # so that the mailbox is always the same
        return super().meet_once(message, kind)


#: Protocols that are broken, by their class or by another constant.
BROKEN: list[tuple[type[Protocol], dict[str, int]]] = [
    (WithoutVersions, {}),
    (WithoutMeeting, {}),
    (WithoutLocks, {}),
    (PublishesEarly, {}),
    (ForgetsToClear, {}),
    (OneMailbox, {"_MAILBOX_BYTES": 64}),
    (Protocol, {"_FIRST_VERSION": 0}),  # which words start with
]


@pytest.mark.parametrize(("broken", "constants"), BROKEN)
def test_the_explorer_finds_broken_protocols(monkeypatch, broken, constants):
    for name, value in constants.items():
        monkeypatch.setattr(protocol_module, name, value)
    assert breaks(broken)


def add_ones(protocol: Protocol, unit: int) -> None:
    numel = UNITS[unit].grad_numel
    chunks = torch.ones(protocol.transport.world_size, numel).view(-1)
    segments = [Segment(0, 0, numel)]
    protocol.windows[unit].accumulate(chunks, segments)


class GathersTooLate(Protocol):
    """Reads version ``v`` when peers may be writing ``v + 1`` already."""

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        records = super().end_version(kind, item)
        if self.version == STEPS:
            check_gather(self, 0)
        return records


class AddsTooLate(Protocol):
    """Adds gradients of version ``v`` when peers may have taken out their sums already."""

    def end_version(self, kind: str, item: Any = None) -> list[Any]:
        records = super().end_version(kind, item)
        if self.version == STEPS:
            add_ones(self, 0)
        return records


@pytest.mark.parametrize("late", [GathersTooLate, AddsTooLate], ids=lambda c: c.__name__)
def test_nobody_uses_a_version_that_has_ended(late):
    for seed in range(5):
        for e in explore(seed, 3, late):
            assert isinstance(e, StaleShardError), f"seed {seed}"

    class Unguarded(late):  # type: ignore[misc, valid-type]
        def open(self) -> None:
            super().open()
            for window in self.windows:
                window.check_not_ended = lambda: None

    assert breaks(Unguarded)


def breaks(protocol_class: type[Protocol]) -> bool:
    """Some interleaving ends in a violation, or in a record that is not there (not in a mere time-out)."""
    found = (e for seed in range(25) for e in explore(seed, 3, protocol_class))
    return any(isinstance(e, ViolationError | ValueError) for e in found)


# -- failures and waits -------------------------------------------------------------------------------------


def opened(world_size: int = 2, timeout: float = 20, **options: Any) -> tuple[ThreadHub, list[Protocol]]:
    hub = ThreadHub(world_size)
    protocols = [
        Protocol(hub.transport(rank), UNITS, timeout=timeout, **options) for rank in range(world_size)
    ]
    together(*(protocol.open for protocol in protocols))
    return hub, protocols


def test_a_wait_gives_up_at_its_deadline_and_says_where_everybody_is(tmp_path):
    _, (first, second) = opened(timeout=0.3)
    first.waiter._hang_report = HangReport(60.0, tmp_path, 0)
    second.begin_microbatch(3)
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError) as error:
        first.windows[1].gather(torch.zeros(4))
    assert 0.3 <= time.monotonic() - begin < 3
    message = str(error.value)
    assert "Gave up after 0.3 s of waiting to read unit 'second' (version 1) from rank 1." in message
    assert "rank 0 (this one): version 1, microbatch 0, reading shards of unit 'second'" in message
    assert "rank 1: version 1, microbatch 4, computing" in message
    assert first.waiter.seconds[Cause.READ] >= 0.3
    written = (tmp_path / "rank0.txt").read_text()
    assert message in written
    assert "(most recent call first)" in written


def test_the_first_failure_ends_the_wait_not_those_that_followed():
    _, (first, second, third) = opened(3)
    third.fail("Traceback: ValueError: the cause")
    second.fail(FOLLOWED + "whatever")
    begin = time.monotonic()
    for wait in (lambda: first.meet("step"), lambda: first.windows[0].gather(torch.zeros(12))):
        with pytest.raises(PeerFailedError, match=r"Rank 2 failed, so rank 0 stops too.*\n.*the cause"):
            wait()
    assert time.monotonic() - begin < 3


def test_a_peer_that_left_or_died_stops_the_wait_unless_its_part_is_there():
    hub, (first, second) = opened()
    publish(second)
    second.close()
    check_gather(first, 0)
    hub.dead.add(1)
    check_gather(first, 0)
    hub, (first, second) = opened()
    second.close()
    for wait in (lambda: first.meet("step"), lambda: first.windows[0].gather(torch.zeros(8))):
        with pytest.raises(PeerFailedError, match="Rank 1 has left the training while rank 0 still needs it"):
            wait()
    hub, (first, second) = opened()
    hub.dead.add(1)
    with pytest.raises(PeerFailedError, match="rank 1 ended without an error message"):
        first.meet("step")
    _, (first, second) = opened()

    def ended() -> list[int]:
        second.fail("ValueError: the last word")
        return [1]

    first.transport.dead_peers = ended  # type: ignore[method-assign]
    with pytest.raises(PeerFailedError, match=r"Rank 1 failed.*\n.*the last word"):
        first.meet("step")


def steal(protocol: Protocol) -> Any:
    return WorkQueues(protocol, 1, COSTS).steal()


def await_device(protocol: Protocol, done: threading.Event) -> None:
    protocol.transport.runs_ahead = True
    protocol.transport.drain = lambda: done.is_set  # type: ignore[method-assign]
    protocol.finish()


COSTS = [[], [], [1.0, 1.0]]
GONE = {
    "another rank has ended a batch": lambda ranks: ranks[1].announce_end(),
    "another rank has left": lambda ranks: ranks[1].close(),
    "the owner has ended a batch": lambda ranks: ranks[2].announce_end(),  # before its device has published
}


@pytest.mark.parametrize("case", ["read", "lock", "device", "queue", "lock of a queue"])
def test_a_wait_goes_on_while_those_it_needs_can_end_it(case):
    """Between two meetings ranks may be apart by batches: gradients are accumulated, or shares are empty."""
    for gone in GONE:
        if (case, gone) != ("queue", "the owner has ended a batch"):  # it opens its queue before
            check_wait_goes_on(case, gone)


def check_wait_goes_on(case: str, gone: str) -> None:
    hub, ranks = opened(3)
    first, second, third = ranks
    done = threading.Event()
    publish(second)
    WorkQueues(second, 1, COSTS)
    if case == "lock of a queue":
        WorkQueues(third, 1, COSTS)
    place = 0
    if case == "lock of a queue":
        place = -1
    lock = hub.windows[2].locks[place]
    assert lock.take()
    GONE[gone](ranks)
    read = (lambda: first.windows[0].gather(torch.zeros(12)), lambda: publish(third))
    waits = {
        "read": read,
        "lock": (lambda: add_ones(first, 0), lock.give),
        "device": (lambda: await_device(first, done), done.set),
        "queue": (lambda: steal(first), lambda: WorkQueues(third, 1, COSTS)),
        "lock of a queue": (lambda: steal(first), lock.give),
    }
    begin, end = waits[case]
    looks = []

    def look() -> list[int]:
        looks.append(case)
        if len(looks) == 3:
            end()
        return []

    first.transport.dead_peers = look  # type: ignore[method-assign]
    begin()
    assert len(looks) == 3


@pytest.mark.parametrize("case", ["meeting", "queue"])
def test_a_rank_that_has_gone_on_is_named_by_those_that_wait_for_it(case):
    """By its rank in the job: these three may be the second node of two."""
    _, ranks = opened(3)
    first, second, third = ranks
    first.transport.job_rank = lambda peer: 3 + peer  # type: ignore[method-assign]
    waits = {
        "meeting": lambda: first.meet("step"),  # waits for the second, and would for the third
        "queue": lambda: steal(first),
    }
    WorkQueues(second, 1, COSTS)
    third.announce_end()
    message = "Rank 5 has ended a batch or an epoch in which rank 3 waits for it"
    with pytest.raises(DisagreementError, match=message):
        waits[case]()


def test_a_rank_that_fell_behind_in_versions_is_told():
    _, (first, second) = opened()
    publish(second)
    second.next_version()
    publish(second)
    with pytest.raises(
        DisagreementError, match="Rank 1 has published version 2 of unit 'first' while rank 0"
    ):
        first.windows[0].gather(torch.zeros(8))
