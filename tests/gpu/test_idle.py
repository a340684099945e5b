"""Idle time on GPUs: what the monitor reports of work whose time events and records of kernels measure as well.

One rank multiplies matrices, the others do not, so they must wait as long as that takes.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import Tensor

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.callbacks import DeviceIdleMonitor
from lightning_odc.callbacks.idle.sampling import CudaProfile, parts_of
from lightning_odc.callbacks.idle.sources import ComputeStream
from lightning_odc.callbacks.idle.summary import DevicePart
from tests.gpu.ranks import HAS_GPU, needs_gpu, placed, start
from tests.support.modules import Memory, TokenModule, loader, trainer
from tests.support.ranks import run_ranks

STEPS = 5
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def multiply(device: torch.device) -> Any:
    """Some 0.3 s of matrix products on an H200, that the host does not wait for; on a processor, a sleep."""
    if device.type == "cpu":
        time.sleep(0.1)
        return 0.1
    stream = ComputeStream(device)
    matrix = torch.full((4096, 4096), 1e-4, device=device)
    begin = stream.mark()
    for _ in range(100):
        matrix = matrix @ matrix
    return begin, stream.mark()


class Uneven(TokenModule):
    """Rank 0 multiplies matrices before every microbatch."""

    def __init__(self, returns: str) -> None:
        super().__init__(returns)
        self.work: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.work.append(multiply(batch.device))
        return super().training_step(batch, batch_idx)

    def worked(self) -> list[float]:
        """Seconds of each."""
        return [one if isinstance(one, float) else one[0].elapsed_time(one[1]) / 1e3 for one in self.work]


def fit(device: torch.device, strategy: Strategy, module: Uneven, batch: Any) -> Any:
    """Rows of the monitor, whether they are complete, and the seconds of work."""
    monitor = DeviceIdleMonitor(every_n_steps=1)
    memory = Memory()
    devices = "auto"
    if isinstance(strategy, FSDPStrategy) and strategy.parallel_devices is None:
        devices = 2
    accelerator = "gpu"
    if device.type == "cpu":
        accelerator = "cpu"
    fitting = trainer(
        2, accelerator=accelerator, devices=devices, strategy=strategy, logger=memory, callbacks=[monitor]
    )
    fitting.fit(module, loader([batch] * STEPS))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return [row for _, row in memory.rows if "step_seconds" in row], monitor.complete, module.worked()


def _shares_a_gpu(rank: int, communication: str) -> Any:
    device = start(rank)
    there_are = torch.cuda.device_count()
    if there_are:
        devices = [torch.device("cuda", r % there_are) for r in range(2)]
    else:
        devices = [device] * 2
    strategy = ODCStrategy(
        communication=communication,
        balance=None,
        parallel_devices=devices,
        process_group_backend="gloo",
        hang_report_after=None,
    )
    return fit(device, strategy, Uneven("items"), Minibatch([TOKENS.to(device)]))


def _check_waits(found: list[Any]) -> None:
    """Rank 1 waited for rank 0, which worked, and not the other way round."""
    rows, complete, worked = found[0]
    assert complete
    assert len(rows) == len(worked) == STEPS
    looked_at = [row for row in rows[1:] if "idle/fraction" in row]
    assert looked_at, "no step was looked at"
    assert any(row["idle/worst_rank"] == 1 > row["idle/fraction_rank1"] > 0 for row in looked_at)
    assert any(row["busy_seconds_rank0"] > row["busy_seconds_rank1"] for row in looked_at)


def test_ranks_wait_on_demand():
    _check_waits(run_ranks(_shares_a_gpu, "on_demand", timeout=150))


@needs_gpu
def test_parts_of_steps_with_collectives_over_gloo():
    """Kernels are seen; who waits is not, since gloo has none."""
    rows, complete, _ = run_ranks(_shares_a_gpu, "collective", timeout=150)[0]
    assert not complete
    for row in rows:
        assert "idle/fraction" not in row
    seen = [row for row in rows if "gpu/kernel_seconds" in row]
    assert seen
    for row in seen:
        assert row["gpu/kernel_seconds_rank0"] > row["gpu/kernel_seconds_rank1"]


def _has_a_gpu(rank: int, kind: str) -> Any:
    placed().enter(rank)
    device = placed().devices[rank]
    if kind == "fsdp":
        return fit(device, FSDPStrategy(), Uneven("mean"), TOKENS)
    strategy = ODCStrategy(communication="collective", balance=None, hang_report_after=None)
    return fit(device, strategy, Uneven("items"), Minibatch([TOKENS.to(device)]))


@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="NCCL wants a GPU for every rank")
@pytest.mark.parametrize("kind", ["collective", pytest.param("fsdp", marks=needs_gpu)])
def test_ranks_wait_inside_collectives(kind):
    _check_waits(run_ranks(_has_a_gpu, kind, timeout=150))


@needs_gpu
def test_records_of_kernels_agree_with_events():
    device = torch.device("cuda", 0)
    stream = ComputeStream(device)
    profile = CudaProfile(device, stream.mark)
    profile.start()
    profile.stop()  # the first one takes long
    profile.start()
    begin = stream.mark()
    first = multiply(device)
    torch.cuda.synchronize()
    time.sleep(0.1)
    second = multiply(device)
    end = stream.mark()
    records = profile.stop()
    length = begin.elapsed_time(end) / 1e3
    last = records[-1].begin
    parts = parts_of(records, range(last - round(length * 1e9), last))
    busy = sum(one.elapsed_time(other) for one, other in (first, second)) / 1e3
    assert parts[DevicePart.KERNEL] == pytest.approx(busy, rel=0.05)
    assert parts[DevicePart.COLLECTIVE] == 0.0
    assert 0.09 < parts[DevicePart.EMPTY] < length - 0.9 * busy
