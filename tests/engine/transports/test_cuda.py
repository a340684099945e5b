"""The CUDA transport on a fake device: what the host must wait for, staged sums, opening. On GPUs: ``tests/gpu``."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Segment, UnitSpec
from lightning_odc.engine.transports.cuda import Announcer, CudaTransport
from lightning_odc.engine.units import Unit
from lightning_odc.errors import ODCError, StaleShardError, WindowError
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from notebooks.support.threads import ThreadHub
from tests.strategy import test_parity as parity
from tests.strategy.test_parity import minibatch, one_process, optimizer_of
from tests.support.fake_device import FakeDevice, FakeMark, fake_cuda
from tests.support.fits import TOLERANCE, assert_same
from tests.support.models import Net, full_parameters, init_gloo, summed_loss, token_batches
from tests.support.ranks import run_ranks

WORLD = 3
UNITS = (
    UnitSpec("first", 4, torch.bfloat16, 4, torch.float32),
    UnitSpec("second", 2, torch.float32, 2, torch.float32),
)
COMPUTE, GATHER, REDUCE = 0, 1, 2
STEPS = 6


def in_threads(function: Callable[[int, Any], Any]) -> list[Any]:
    """Call ``function(rank, rendezvous)`` on every rank; returns results or errors."""
    hub = ThreadHub(WORLD, timeout=20)
    results: list[Any] = [None] * WORLD

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank, lambda item: hub.rendezvous(rank, item))
        except (ODCError, RuntimeError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


# -- what the host must wait for --------------------------------------------------------------------------


class Play:
    """One rank of a toy training run in the streams of ``fully_shard``, which checks on the device what it reads."""

    def __init__(self, protocol: Protocol, device: FakeDevice) -> None:
        self.protocol = protocol
        self.device = device
        self.wrong: list[str] = []
        self.rank, self.world = protocol.transport.rank, protocol.transport.world_size

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
            value, shard = self.value(self.rank, unit), self.protocol.windows[unit].own_shard
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

    for error in in_threads(run):
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
    first, second = FakeMark(), FakeMark()
    announcer.announce(first, 1, 7)
    announcer.announce(second, 2, 8)
    second.passed.set()
    time.sleep(0.01)
    assert written == []
    first.passed.set()
    announcer.stop()
    assert (written, entered) == ([(1, 7), (2, 8)], ["lightning-odc announcer"])

    def breaks(word: int, value: int) -> None:
        raise ValueError("an illegal memory access was encountered")

    broken = Announcer(breaks, lambda: None)
    broken.announce(first, 1, 7)
    broken.stop()
    with pytest.raises(RuntimeError, match="device failed while parameters were published") as error:
        broken.announce(first, 1, 8)
    assert "illegal memory access" in str(error.value.__cause__)


# -- training ---------------------------------------------------------------------------------------------


def engine_on_a_fake_device(rank: int, why_not: str = "", **options: Any) -> OnDemandEngine:
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    world = dist.get_world_size()
    return OnDemandEngine(
        lambda: fake_cuda(rank, world, rendezvous, why_not=why_not), rendezvous, timeout=60, **options
    )


def _trains(rank: int) -> list[Any]:
    init_gloo(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [
            _train(rank, engine_on_a_fake_device(rank), DeviceMesh.from_group(dist.group.WORLD, "cpu")),
            _train(rank, engine_on_a_fake_device(rank, deterministic=True)),
            _train(rank, engine_on_a_fake_device(rank, deterministic=True)),
            _train(rank, engine_on_a_fake_device(rank, why_not="no Triton")),
        ]
        with patch.object(Unit, "is_offloaded", True):  # as if the device had another type than shards
            runs.append(_train(rank, engine_on_a_fake_device(rank)))
    told = [str(w.message) for w in caught if "one accumulator per source rank" in str(w.message)]
    return [runs, told, _found_out(rank)]


def _train(rank: int, engine: OnDemandEngine, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Uneven microbatches: rank 0 runs one of the six of every step, rank 1 the others."""
    torch.manual_seed(0)
    model = Net()
    shard_model(model, mesh or mesh_for("cpu", 2))
    engine.attach(model)
    optimizer = optimizer_of(model)
    for step in range(parity.STEPS):
        optimizer.zero_grad()
        for tokens in minibatch(step)[1:] if rank else minibatch(step)[:1]:
            engine.ledger.add(tokens.numel() - 1)
            loss = summed_loss(model, tokens)
            with engine.backward():
                loss.backward()
        engine.settle(None)
        optimizer.step()
        engine.publish()
    waits, traffic = engine.protocol.device_waits, engine.traffic
    result = {
        "parameters": full_parameters(model),
        "waits": waits,
        "adds": traffic.adds,
        "sources": engine.protocol._spec.sources,
    }
    engine.exchange("end", None)
    engine.close()
    return result


def _found_out(rank: int) -> list[str]:
    """Edits that nobody was told of, found when the step settles: comparisons are deferred."""
    messages = []
    for edit_gathered in (False, True):
        model = Net()
        shard_model(model, mesh_for("cpu", 2), reshard_after_forward=False)
        engine = engine_on_a_fake_device(rank)
        engine.attach(model)
        if not edit_gathered:
            model.head.weight.to_local().data.add_(1.0)
        loss = summed_loss(model, token_batches([5])[0])
        if edit_gathered:
            model.head.weight.data.add_(1.0)
        with engine.backward():
            loss.backward()
        with pytest.raises(StaleShardError) as error:
            engine.settle(None)
        messages.append(str(error.value))
        dist.barrier()
        engine.close()
    return messages


def test_training_on_it_equals_one_process():
    (runs, told, messages), (others, silent, _) = run_ranks(_trains)
    expected = one_process({})
    for run, other in zip(runs, others, strict=True):
        assert_same(run["parameters"], expected, TOLERANCE)
        assert run["adds"] > 0 and other["adds"] > run["adds"]
    # One per optimizer step; with offloaded shards one more, for the sums to be in host memory.
    assert [run["waits"] for run in runs] == [run["waits"] for run in others]
    assert [run["waits"] for run in runs] == [*[parity.STEPS] * 4, 2 * parity.STEPS]
    shared, first, again, staged, _ = runs
    assert_same(first["parameters"], again["parameters"], 0.0)
    assert [run["sources"] for run in (shared, first, staged)] == [1, 2, 2]
    assert len(told) == 1 and "2 times the memory for accumulators: no Triton (rank 0)" in told[0]
    assert silent == []  # said once, by rank 0
    assert "'head.weight' changed after it was published" in messages[0]
    assert "'head.weight' was changed inside `forward`" in messages[1]


def test_sums_are_staged_over_links_without_atomics():
    def opens(rank: int, rendezvous: Any) -> tuple[int, bool]:
        atomics = {} if rank == 1 else {f"uuid{peer}": True for peer in range(WORLD)}
        device = FakeDevice(rank, rendezvous, atomics=atomics)
        transport = CudaTransport(rank, WORLD, rendezvous, device)
        return Protocol(transport, UNITS, timeout=5)._spec.sources, device.adds_plainly

    with pytest.warns(UserWarning, match="additions from the GPU of rank 1 to the memory of that of rank 0"):
        assert in_threads(opens) == [(WORLD, True)] * WORLD


# -- opening ----------------------------------------------------------------------------------------------


def test_what_fails_on_one_rank_fails_on_all():
    def opens(rank: int, rendezvous: Any) -> str:
        transport = fake_cuda(rank, WORLD, rendezvous, free=2**40 if rank != 1 else 10)
        with pytest.raises(WindowError) as error:
            Protocol(transport, UNITS, timeout=5).open()
        return str(error.value)

    messages = in_threads(opens)
    assert len(set(messages)) == 1
    assert "on the GPU of rank 1 (Fake) 0.00 GiB are free" in messages[0]


def test_a_device_that_loses_additions_is_refused():
    class Loses(FakeDevice):
        def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
            super().add_rows(offset, dtype, rows / 2 if self._rank == 1 else rows)

    def opens(rank: int, rendezvous: Any) -> str:
        transport = CudaTransport(rank, WORLD, rendezvous, Loses(rank, rendezvous))
        with pytest.raises(WindowError) as error:
            Protocol(transport, UNITS, timeout=5).open()
        return str(error.value)

    (message,) = set(in_threads(opens))
    assert f"came out as {16 * WORLD - 8} instead of {16 * WORLD}" in message
    assert "deterministic=True" in message


def test_an_error_of_the_driver_is_told_with_what_may_be_behind_it():
    class Sandboxed(FakeDevice):
        def attach(self) -> list[Tensor]:
            self._rendezvous(None)
            self._rendezvous(None)
            if self._rank == 2:
                raise RuntimeError("CUDA driver error: operation not permitted\nmore")
            return [torch.zeros(2**16, dtype=torch.uint8)] * WORLD

    def opens(rank: int, rendezvous: Any) -> str:
        transport = CudaTransport(rank, WORLD, rendezvous, Sandboxed(rank, rendezvous))
        with pytest.raises(WindowError) as error:
            Protocol(transport, UNITS, timeout=5).open()
        return str(error.value)

    (message,) = set(in_threads(opens))
    assert message.startswith(
        "Rank 2 could not share memory with its peers: device memory could not be mapped"
    )
    assert "operation not permitted. What may be the reason: ranks must run in one container" in message
