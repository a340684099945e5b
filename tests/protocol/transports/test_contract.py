"""One contract suite over all transports.

Ranks are threads for the in-process transport, real processes for shared memory, and threads on an asynchronous fake
device for the CUDA transport, which ``tests/gpu`` runs on a real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_odc.protocol.transports.base import Transport, UnitSpec, WindowSpec, process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from notebooks.support.threads import ThreadHub
from tests.support.fake_device import fake_cuda
from tests.support.interleaving import on_threads
from tests.support.models import init_gloo
from tests.support.ranks import run_ranks

SPEC = WindowSpec(
    units=(
        UnitSpec("a", 5, torch.bfloat16, 3, torch.float32),
        UnitSpec("frozen", 2, torch.float32, 0, torch.float32),
        UnitSpec("b", 1000, torch.float32, 1000, torch.float64),
    ),
    words=8,
    mailboxes=2,
    mailbox_bytes=100,
    sources=1,
)

Scenario = Callable[[Transport, Callable[[Any], list[Any]]], Any]


def in_threads(scenario: Scenario, world_size: int) -> list[Any]:
    hub = ThreadHub(world_size, timeout=20)
    return on_threads(world_size, lambda rank, meet: scenario(hub.transport(rank), meet))


def on_a_fake_device(scenario: Scenario, world_size: int) -> list[Any]:
    def on_device(transport: Transport, meet: Callable[[Any], list[Any]]) -> Any:
        return scenario(fake_cuda(transport.rank, world_size, meet, delays=0), meet)

    return in_threads(on_device, world_size)


def in_one_process(rank: int, *scenarios: Scenario) -> list[Any]:
    init_gloo(rank)
    world = dist.get_world_size()
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    return [scenario(SharedMemoryTransport(rank, world, rendezvous), rendezvous) for scenario in scenarios]


def settle(transport: Transport) -> None:
    """Wait until the device, if there is one, has done what this rank asked of it."""
    is_done = transport.drain()
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0)


def zeros_of(transport: Transport, unit: int) -> torch.Tensor:
    return torch.zeros_like(transport.shard(transport.rank, unit))


def on_windows(sources: int = 1) -> Callable[[Scenario], Scenario]:
    """Windows are open in a scenario. They are closed when all ranks are done, which may be said twice."""

    def around(scenario: Scenario) -> Scenario:
        @wraps(scenario)
        def run(transport: Transport, meet: Callable[[Any], list[Any]]) -> Any:
            transport.open(replace(SPEC, sources=sources))
            meet(None)
            found = scenario(transport, meet)
            meet(None)
            transport.close()
            transport.close()
            return found

        return run

    return around


@on_windows()
def windows_start_at_zero_and_apart(transport: Transport, meet: Callable[[Any], list[Any]]) -> list[float]:
    mine = transport.rank
    zeros = [
        transport.shard(owner, unit).abs().sum().item()
        + transport.accumulator(owner, unit).abs().sum().item()
        for owner in range(transport.world_size)
        for unit in range(3)
    ]
    assert not any(zeros)
    assert not any(
        transport.load(owner, word) for owner in range(transport.world_size) for word in range(SPEC.words)
    )
    meet(None)
    for unit in range(3):
        transport.shard(mine, unit).fill_(10 * mine + unit)
    settle(transport)
    meet(None)
    out = []
    for owner in range(transport.world_size):
        for unit in range(len(SPEC.units)):
            copy = zeros_of(transport, unit)
            transport.read([transport.shard(owner, unit)], copy)
            settle(transport)
            assert copy.unique().numel() == 1
            out.append(copy[0].item())
    return out


@on_windows()
def words_and_mailboxes(transport: Transport, meet: Callable[[Any], list[Any]]) -> list[Any]:
    for value in (1, -1, 2**63 - 1, -(2**63)):
        transport.store(3, value)
        assert transport.load(transport.rank, 3) == value
    transport.store(7, 100 + transport.rank)
    transport.post(0, b"long message, then a short one" * 2)
    transport.post(0, f"from {transport.rank}".encode())
    transport.post(1, b"")
    meet(None)
    return [
        (transport.load(o, 7), transport.load(o, 6), transport.fetch(o, 0), transport.fetch(o, 1))
        for o in range(transport.world_size)
    ]


ROUNDS = 300


@on_windows()
def everybody_adds_everywhere(transport: Transport, meet: Callable[[Any], list[Any]]) -> list[float]:
    chunk = torch.ones_like(zeros_of(transport, 2))
    for _ in range(ROUNDS):
        if not transport.needs_locks:
            transport.add_rows(2, 0, 0, chunk.expand(transport.world_size, -1))
            continue
        for owner in range(transport.world_size):
            lock = transport.lock(owner, 2)
            while not lock.take():
                time.sleep(0)
            transport.add(transport.accumulator(owner, 2), chunk)
            lock.give()
    settle(transport)
    meet(None)
    total = transport.accumulator(transport.rank, 2).unique().tolist()
    assert transport.dead_peers() == []
    return total


@on_windows()
def locks_exclude(transport: Transport, meet: Callable[[Any], list[Any]]) -> list[bool]:
    lock = transport.lock(0, 0)
    others = [transport.lock(0, 2), transport.lock(1, 0), transport.lock(0, len(SPEC.units))]
    first = None
    if transport.rank == 0:
        first = lock.take()
    meet(None)
    second = []
    if transport.rank:
        second = [one.take() for one in (lock, *others)]
    meet(None)
    if transport.rank == 0:
        lock.give()
    meet(None)
    third = None
    if transport.rank:
        third = lock.take()
    return [first, *second, third]


@on_windows(sources=2)
def adds_land_in_parts(transport: Transport, meet: Callable[[Any], list[Any]]) -> list[Any]:
    chunk = zeros_of(transport, 0)[:3] + torch.tensor([1.0, 2.0, 3.0]).to(zeros_of(transport, 0))
    for target, part in ((2, chunk[:1]), (0, chunk[2:])):
        if transport.needs_locks:
            transport.add(transport.accumulator(1, 0, transport.rank).narrow(0, target, 1), part)
        else:
            transport.add_rows(0, transport.rank, target, torch.stack([torch.zeros_like(part), part]))
    settle(transport)
    meet(None)
    return [transport.accumulator(o, 0, s).tolist() for o in range(2) for s in range(2)]


@on_windows()
def data_is_there_when_its_word_is(transport: Transport, meet: Callable[[Any], list[Any]]) -> int:
    shard = transport.shard(0, 2)
    seen = 0
    deadline = time.monotonic() + 30
    for version in range(1, 400):
        if transport.rank == 0:
            while min(transport.load(peer, 1) for peer in range(1, transport.world_size)) < version - 1:
                assert time.monotonic() < deadline
                time.sleep(0)
            shard.fill_(version)
            transport.announce(0, version)
        else:
            while transport.load(0, 0) < version:
                assert time.monotonic() < deadline
                time.sleep(0)
            copy = zeros_of(transport, 2)
            transport.read([transport.shard(0, 2)], copy)
            settle(transport)
            assert copy.unique().tolist() == [version], "stale or torn"
            seen += 1
            transport.store(1, version)
    return seen


#: What every rank gives, by the number of ranks.
EXPECTED: dict[Scenario, dict[int, list[Any]]] = {
    windows_start_at_zero_and_apart: {
        n: [[10.0 * owner + unit for owner in range(n) for unit in range(3)]] * n for n in (1, 2, 4)
    },
    everybody_adds_everywhere: {n: [[ROUNDS * n]] * n for n in (2, 4)},
    words_and_mailboxes: {2: [[(100, 0, b"from 0", b""), (101, 0, b"from 1", b"")]] * 2},
    locks_exclude: {2: [[True, None], [None, False, True, True, True, True]]},
    adds_land_in_parts: {2: [[[0, 0, 0], [0, 0, 0], [3, 0, 1], [3, 0, 1]]] * 2},
    data_is_there_when_its_word_is: {2: [0, 399]},
}


@pytest.fixture(scope="module")
def processes() -> dict[tuple[Scenario, int], Any]:
    """What the scenarios give on real processes: one launch for each number of ranks."""
    found: dict[tuple[Scenario, int], Any] = {}
    for size in (1, 2, 4):
        scenarios = [scenario for scenario, expected in EXPECTED.items() if size in expected]
        by_rank = run_ranks(in_one_process, *scenarios, world_size=size)
        found |= {(one, size): results for one, *results in zip(scenarios, *by_rank, strict=True)}
    return found


@pytest.mark.parametrize(
    "body", [in_threads, None, on_a_fake_device], ids=["threads", "shared_memory", "cuda-fake"]
)
@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda scenario: scenario.__name__)
def test_the_contract_holds(request, scenario, body):
    for size, expected in EXPECTED[scenario].items():
        if body is None:
            found = request.getfixturevalue("processes")[scenario, size]
        else:
            found = body(scenario, size)
        assert found == expected, f"{size} ranks"
