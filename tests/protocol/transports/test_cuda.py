"""The CUDA transport on a fake device: what the host must wait for, staged sums, opening. On GPUs: ``tests/gpu``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.errors import WindowError
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Segment, UnitSpec, process_group_rendezvous
from lightning_odc.protocol.transports.cuda import Announcer, CudaTransport
from tests.gpu import test_training as on_gpus
from tests.support.fake_device import FakeDevice, FakeMark, fake_cuda
from tests.support.interleaving import on_threads

WORLD = 3
UNITS = (
    UnitSpec("first", 4, torch.bfloat16, 4, torch.float32),
    UnitSpec("second", 2, torch.float32, 2, torch.float32),
)
COMPUTE = 0
GATHER = 1
REDUCE = 2
STEPS = 6


# -- what the host must wait for --------------------------------------------------------------------------


class Play:
    """One rank of a toy training run in the streams of ``fully_shard``, which checks on the device what it reads."""

    def __init__(self, protocol: Protocol, device: FakeDevice) -> None:
        self.protocol = protocol
        self.device = device
        self.wrong: list[str] = []
        self.rank = protocol.transport.rank
        self.world = protocol.transport.world_size

    def run(self) -> list[str]:
        self.protocol.open()
        self.publish()
        for step in range(STEPS):
            counts = [(rank + step) % self.world for rank in range(self.world)]
            for _ in range(counts[self.rank]):
                self.microbatch()
            self.protocol.end_version("step")
            self.take(sum((rank + 1) * count for rank, count in enumerate(counts)))
            self.protocol.next_version()
            self.publish()
        self.protocol.meet("end")
        self.protocol.close()
        return self.wrong

    def publish(self) -> None:
        for unit in range(len(UNITS)):
            value = self.value(self.rank, unit)
            shard = self.protocol.windows[unit].own_shard
            self.device.ask(lambda shard=shard, value=value: shard.fill_(value))
            self.protocol.windows[unit].publish()

    def value(self, rank: int, unit: int) -> int:
        return 10 * self.protocol.version + 3 * rank + unit

    def microbatch(self) -> None:
        device = self.device
        for unit, spec in enumerate(UNITS):
            gathered = torch.zeros(self.world, spec.shard_numel, dtype=spec.shard_dtype)
            with device.on(GATHER):
                self.protocol.windows[unit].gather(gathered.view(-1))
            device.wait_for(GATHER)
            expected = self.values(unit)
            device.ask(lambda unit=unit, g=gathered, e=expected: self.check(unit, g, e))
        for unit, spec in enumerate(UNITS):
            chunks = torch.full((self.world, spec.grad_numel), self.rank + 1.0)
            with device.on(REDUCE):
                device.wait_for(COMPUTE)
                self.protocol.windows[unit].accumulate(chunks.view(-1), [Segment(0, 0, spec.grad_numel)])

    def values(self, unit: int) -> list[int]:
        return [self.value(rank, unit) for rank in range(self.world)]

    def check(self, unit: int, gathered: Tensor, expected: list[int]) -> None:
        for rank, value in enumerate(expected):
            if rank != self.rank and not bool((gathered[rank] == value).all()):
                self.wrong.append(f"read {gathered[rank].tolist()} of {unit} from {rank}, expected {value}")

    def take(self, expected: int) -> None:
        windows = self.protocol.windows  # which are gone when a broken one comes to this after the end

        def take() -> None:
            for window in windows:
                if not bool((window.summed() == expected).all()):
                    self.wrong.append(f"sums {window.summed().tolist()}, expected {expected}")
                window.clear()

        self.device.ask(take)


def play(seed: int, transport: type[CudaTransport] = CudaTransport, **options: Any) -> list[Play]:
    plays: list[Any] = [None] * WORLD

    def run(rank: int, rendezvous: Any) -> None:
        device = FakeDevice(rank, rendezvous, delays=seed)
        protocol = Protocol(transport(rank, WORLD, rendezvous, device), UNITS, timeout=20, **options)
        plays[rank] = Play(protocol, device)
        plays[rank].run()

    for error in on_threads(WORLD, run):
        assert error is None, error
    return plays


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_announced_before_it_is_done(deterministic):
    for seed in range(3):
        for one in play(seed, deterministic=deterministic):
            assert one.wrong == []
            # One wait for each optimizer step, and one for the meeting at the end. Versions wait in their own thread.
            assert one.protocol.device_waits == STEPS + 1
            assert (one.protocol.traffic.reads > 0, one.device.asked["add"] > 0) == (True, True)


class AnnouncesAtOnce(CudaTransport):
    def announce(self, word: int, value: int) -> None:
        self.store(word, value)


class ForgetsItsDevice(CudaTransport):
    def drain(self) -> Callable[[], bool]:
        return lambda: True


class ForgetsOtherStreams(CudaTransport):
    def drain(self) -> Callable[[], bool]:
        self._streams.clear()
        return super().drain()


@pytest.mark.parametrize("broken", [AnnouncesAtOnce, ForgetsItsDevice, ForgetsOtherStreams])
def test_without_one_of_its_waits_the_host_overtakes_its_device(broken):
    assert any(one.wrong for seed in range(8) for one in play(seed, broken))


def test_the_host_does_not_wait_for_what_is_published():
    """The announcer does; and it says so if the device breaks."""
    written: list[tuple[int, int]] = []
    entered: list[str] = []
    announcer = Announcer(
        lambda word, value: written.append((word, value)),
        lambda: entered.append(threading.current_thread().name),
    )
    first = FakeMark()
    second = FakeMark()
    announcer.announce(first, 1, 7)
    announcer.announce(second, 2, 8)
    second.passed.set()
    time.sleep(0.01)
    assert written == []
    first.passed.set()
    announcer.stop()
    assert written == [(1, 7), (2, 8)]
    assert entered == ["lightning-odc announcer"]

    def breaks(word: int, value: int) -> None:
        raise ValueError("an illegal memory access was encountered")

    broken = Announcer(breaks, lambda: None)
    broken.announce(first, 1, 7)
    broken.stop()
    with pytest.raises(RuntimeError, match="device failed while parameters were published") as error:
        broken.announce(first, 1, 8)
    assert "illegal memory access" in str(error.value.__cause__)


# -- training ---------------------------------------------------------------------------------------------

# On a machine without a GPU these have the fake device; the others of `tests/gpu` are of the second tier.
test_training_equals_one_process = on_gpus.test_uneven_shares_equal_one_process
test_options = on_gpus.test_optimizers_clipping_offload_and_bf16
test_an_edit_is_found = on_gpus.test_an_edit_that_nobody_was_told_of_is_found_when_the_step_settles


# -- opening ----------------------------------------------------------------------------------------------


def engine_on_a_fake_device(rank: int, **options: Any) -> OnDemandEngine:
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    world = dist.get_world_size()
    return OnDemandEngine(lambda: fake_cuda(rank, world, rendezvous), rendezvous, timeout=60, **options)


@pytest.mark.parametrize(
    ("facts", "reason", "plainly"),
    [
        ({"atomics": {}}, "additions from the GPU of rank 1 to the memory of that of rank 0", True),
        ({"why_not": "no Triton"}, r"3 times the memory for accumulators: no Triton \(rank 1\)", False),
    ],
    ids=["a link without atomics", "no kernel"],
)
def test_sums_are_staged_where_they_cannot_be_shared(facts, reason, plainly):
    def opens(rank: int, rendezvous: Any) -> tuple[int, bool]:
        own = {}
        if rank == 1:
            own = facts
        device = FakeDevice(rank, rendezvous, **own)
        transport = CudaTransport(rank, WORLD, rendezvous, device)
        return Protocol(transport, UNITS, timeout=5).spec.sources, device.adds_plainly

    with pytest.warns(UserWarning, match=reason) as told:
        assert on_threads(WORLD, opens) == [(WORLD, plainly)] * WORLD
    assert len(told) == 1  # said once, by rank 0


class Full(FakeDevice):
    def create(self, size: int) -> None:
        if self._rank == 1:
            raise RuntimeError("CUDA driver error: out of memory")
        super().create(size)


class Sandboxed(FakeDevice):
    def attach(self) -> list[Tensor]:
        self._rendezvous(None)
        self._rendezvous(None)
        if self._rank == 2:
            raise RuntimeError("CUDA driver error: operation not permitted\nmore")
        return [torch.zeros(2**16, dtype=torch.uint8)] * WORLD


REFUSED: dict[str, tuple[type[FakeDevice], dict[str, Any], list[str]]] = {
    "too little memory": (
        Full,
        {},
        ["by the peers: CUDA driver error: out of memory. What", "1024.00 GiB were free"],
    ),
    "the driver fails": (
        Sandboxed,
        {},
        [
            "Rank 2 could not share memory with its peers: device memory could not be mapped",
            "operation not permitted. What may be the reason: ",
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fails_on_one_rank_fails_on_all(case):
    kind, facts, reasons = REFUSED[case]

    def opens(rank: int, rendezvous: Any) -> str:
        own = {}
        if rank == 1:
            own = facts
        transport = CudaTransport(rank, WORLD, rendezvous, kind(rank, rendezvous, **own))
        with pytest.raises(WindowError) as error:
            Protocol(transport, UNITS, timeout=5).open()
        return str(error.value)

    (message,) = set(on_threads(WORLD, opens))
    for reason in reasons:
        assert reason in message
