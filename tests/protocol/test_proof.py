"""Windows are proven before they are used. Faults of a device are injected, each into one rank."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_odc.errors import WaitTimeoutError, WindowError
from lightning_odc.protocol import proof
from lightning_odc.protocol.proof import prove
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Segment, Transport, UnitSpec
from lightning_odc.protocol.transports.cuda import CudaTransport
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.protocol.unit_window import Traffic
from tests.support.fake_device import FakeDevice
from tests.support.interleaving import on_threads

WORLD = 3
FP32 = torch.float32
BF16 = torch.bfloat16
UNITS = (
    UnitSpec("block", 5000, BF16, 5000, FP32),
    UnitSpec("head", 33, FP32, 33, FP32),
    UnitSpec("frozen", 7, BF16, 0, FP32),
    UnitSpec("mixed", 90, torch.uint8, 20, FP32),
    UnitSpec("narrow", 64, BF16, 64, BF16),
)


class WrongByte(FakeDevice):
    """Rank 1 reads one bit of a byte of rank 2's shard of the head wrongly."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        if self._rank == 1 and target.dtype == FP32 and self._owner_of(source) == 2:
            self.ask(lambda: target.view(torch.uint8)[17:18].bitwise_xor_(4))


class StaleRead(FakeDevice):
    """Rank 2 gets what it had read of a shard before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        seen = self.__dict__.setdefault("seen", {})
        new = source.clone()
        if self._rank == 2:
            source = seen.get(source.data_ptr(), source)
        seen[source.data_ptr()] = new
        super().copy(target, source)


class LostAdd(FakeDevice):
    """The second of rank 1's additions to rank 0 is lost."""

    def _add(self, target: Tensor, values: Tensor) -> None:
        if self._rank == 1 and self._owner_of(target) == 0:
            self.to_rank_0 = self.__dict__.get("to_rank_0", 0) + 1
            if self.to_rank_0 == 2:
                return
        super()._add(target, values)


class HalfAdds(FakeDevice):
    """Rank 2 rounds what it adds to bf16 accumulators to zero in one place."""

    def _add(self, target: Tensor, values: Tensor) -> None:
        if self._rank == 2 and target.dtype == BF16:
            values = values.clone()
            values[5] += 1
        super()._add(target, values)


class Hangs(FakeDevice):
    """The device of rank 2 does not end what it was asked for, before it is closed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, delays=1, **options)
        self.end = threading.Event()

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._rank == 2:
            self.ask(self.end.wait)
        super().copy(target, source)

    def close(self) -> None:
        self.end.set()
        super().close()


class Sleeps(FakeDevice):
    """The host of rank 1 does nothing for a while."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._rank == 1:
            time.sleep(3)
        super().copy(target, source)


def outcomes(kind: type[FakeDevice], **options: Any) -> list[BaseException | None]:
    """What the proof raised on each rank."""

    def proves(rank: int, rendezvous: Any) -> BaseException | None:
        transport = CudaTransport(rank, WORLD, rendezvous, kind(rank, rendezvous))
        protocol = Protocol(transport, UNITS, **options)
        protocol.open()
        try:
            prove(protocol)
        except Exception as error:
            return error
        finally:
            rendezvous(None)
            protocol.close()
        return None

    return on_threads(WORLD, proves)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (WrongByte, {}, r"rank 1 .*round 1: unit 'head' \(torch.float32\) was read wrongly from rank 2"),
        (StaleRead, {}, r"rank 2 .*round 2: unit 'block' \(torch.bfloat16\) was read wrongly from rank 0"),
        (LostAdd, {}, r"rank 0 .*round 1: unit '\w+': gradients in torch.\w+ were added wrongly"),
        (LostAdd, {"deterministic": True}, r"rank 0 .*round 1: .* were added wrongly"),
        (HalfAdds, {}, r"unit 'narrow': gradients in torch.bfloat16 were added wrongly in torch.bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_on_one_rank_is_told_to_all_with_the_unit(kind, options, says):
    errors = outcomes(kind, timeout=30, **options)
    assert {type(error) for error in errors} == {WindowError}
    (message,) = {str(error) for error in errors}
    assert re.search(says, message), message


@pytest.mark.parametrize("kind", [Hangs, Sleeps])
def test_a_peer_that_hangs_ends_the_proof_in_bounded_time(kind, monkeypatch):
    monkeypatch.setattr(proof, "PATIENCE", 1.0)
    errors = outcomes(kind, timeout=1800)
    for error in errors[::2]:
        assert isinstance(error, WaitTimeoutError), errors
    texts = [str(error) for error in errors]
    assert any("waiting for its own device" in text or "rank 1" in text for text in texts), texts
    for error in errors:
        if error is not None:
            assert "Gave up after 1 s" in str(error)


def on_host(rank: int, rendezvous: Any) -> Transport:
    return SharedMemoryTransport(rank, WORLD, rendezvous)


def on_device(rank: int, rendezvous: Any, delays: int | None = None) -> Transport:
    return CudaTransport(rank, WORLD, rendezvous, FakeDevice(rank, rendezvous, delays=delays))


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize(
    "make", [on_host, on_device, partial(on_device, delays=5)], ids=["host", "device", "late"]
)
def test_what_is_right_passes_and_nothing_of_it_stays(
    make: Callable[..., Transport], options: dict[str, Any]
):
    def proves(rank: int, rendezvous: Any) -> None:
        protocol = Protocol(make(rank, rendezvous), UNITS, timeout=30, **options)
        protocol.open()
        for _ in range(2):
            prove(protocol)
        assert (protocol.version, protocol.traffic, protocol.device_waits) == (1, Traffic(), 0)
        assert sum(protocol.waiter.seconds.values()) == 0
        assert protocol.waiter.timeout == 30
        for window in protocol.windows:
            assert window.gathers == 0
            assert not window.shards.any()
            assert not window.summed().any()
            assert protocol.transport.load(rank, window.word) == 0
        # The first version of training, behind it.
        for window in protocol.windows:
            window.own_shard.fill_(rank + 1)
            window.publish()
        for window in protocol.windows:
            spec = window.spec
            whole = torch.zeros(WORLD, spec.shard_numel, dtype=spec.shard_dtype)
            whole[rank] = rank + 1
            window.gather(whole.view(-1))
            if spec.grad_numel:
                ones = torch.ones(WORLD * spec.grad_numel, dtype=spec.chunk_dtype)
                window.accumulate(ones, [Segment(0, 0, spec.grad_numel)])
            protocol.meet("read")
            assert (torch.tensor([1, 2, 3]) == whole.T).all(), spec.name
            if spec.grad_numel:
                assert (window.summed() == WORLD).all()
        protocol.meet("end")
        protocol.close()

    assert on_threads(WORLD, proves) == [None] * WORLD


@pytest.mark.slow
def test_each_combination_of_dtypes_is_proven_and_large_units_of_hosts_are_not(monkeypatch):
    units = (*UNITS, UnitSpec("large", 2**21, torch.float64, 2**21, torch.float64))
    proven: dict[str, set[str]] = {}
    one_round = proof._round

    def note(protocol: Protocol, window: Any, number: int) -> str:
        proven.setdefault(type(protocol.transport).__name__, set()).add(window.spec.name)
        return one_round(protocol, window, number)

    monkeypatch.setattr(proof, "_round", note)

    def proves(make: Callable[..., Transport], rank: int, rendezvous: Any) -> None:
        protocol = Protocol(make(rank, rendezvous), units, timeout=30)
        protocol.open()
        prove(protocol)
        rendezvous(None)
        protocol.close()

    for make in (on_host, on_device):
        assert on_threads(WORLD, partial(proves, make)) == [None] * WORLD
    small = {unit.name for unit in UNITS} - {"frozen"}  # has the dtypes of "block"
    assert proven == {"SharedMemoryTransport": small, "CudaTransport": small | {"large"}}
