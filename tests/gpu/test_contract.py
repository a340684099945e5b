"""The contract suite of all transports, on GPUs, and what is special about theirs."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_odc.errors import WindowError
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Segment, UnitSpec, WindowSpec
from tests.gpu.ranks import HAS_GPU, WORLD_SIZES, needs_gpu, rendezvous, start, transport
from tests.protocol.transports import test_contract as contract
from tests.support.fake_device import fake_cuda
from tests.support.ranks import run_ranks, try_ranks

MIB = 2**20


def _all_scenarios(rank: int) -> list[Any]:
    device = start(rank)
    meet = rendezvous()
    results = []
    for scenario in _scenarios(dist.get_world_size()):
        results.append(scenario(transport(rank, device), meet))
        meet(None)
    return results


def _scenarios(world_size: int) -> list[contract.Scenario]:
    return [scenario for scenario, expected in contract.EXPECTED.items() if world_size in expected]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_contract_holds(world_size):
    by_rank = run_ranks(_all_scenarios, world_size=world_size, timeout=150)
    for scenario, *found in zip(_scenarios(world_size), *by_rank, strict=True):
        assert found == contract.EXPECTED[scenario][world_size], scenario.__name__


def _adds_at_the_same_time(rank: int) -> list[float]:
    """No lock: only atomic additions can end in the right sum."""
    device = start(rank)
    numel = 3 * MIB + 1
    spec = UnitSpec("unit", numel, torch.bfloat16, numel, torch.float32)
    protocol = Protocol(transport(rank, device), [spec], timeout=60)
    protocol.open()
    protocol.windows[0].publish()
    chunks = torch.ones(dist.get_world_size(), numel, dtype=torch.bfloat16, device=device)
    rendezvous()(None)
    for _ in range(50):
        protocol.windows[0].accumulate(chunks.view(-1), [Segment(0, 0, numel)])
    protocol.end_version("step")
    found = protocol.windows[0].summed().unique().tolist()
    protocol.meet("end")
    protocol.close()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_additions_without_locks_are_not_lost(world_size):
    assert run_ranks(_adds_at_the_same_time, world_size=world_size) == [[50.0 * world_size]] * world_size


@needs_gpu
def test_the_kernel_adds_as_add_does():
    from tests.support.kernel_checks import DTYPES, Case  # needs Triton

    for numel, dtype, into in itertools.product(
        (0, 1, 1024, 1025, MIB + 5), DTYPES, (torch.float32, torch.float64)
    ):
        for world, first in ((1, 0), (3, 1)):
            Case(world, numel, dtype, into, first, "cuda").check(first=world - 1)


def _opens_again(rank: int) -> list[int]:
    """Windows that are closed give their memory back."""
    device = start(rank)
    free = []
    numel = MIB
    if HAS_GPU:
        numel = 64 * MIB
    unit = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    for _ in range(4):
        opened = transport(rank, device)
        opened.open(WindowSpec(units=(unit,), words=1))
        rendezvous()(None)
        opened.close()
        opened.close()
        rendezvous()(None)
        left = 0
        if HAS_GPU:
            left = torch.cuda.mem_get_info(device)[0]
        free.append(left)
        rendezvous()(None)
    return free


def test_closed_windows_leave_nothing_in_device_memory():
    for free in run_ranks(_opens_again):
        assert max(free) - min(free) < 64 * MIB  # one window has 512 MiB


def _too_large(rank: int) -> str:
    device = start(rank)
    unit = UnitSpec("huge", 2**42, torch.bfloat16, 2**42, torch.float32)
    with pytest.raises(WindowError) as error:
        transport(rank, device).open(WindowSpec(units=(unit,), words=1))
    return str(error.value)


def test_too_little_device_memory_is_an_error_with_the_sizes_of_the_window():
    for text in run_ranks(_too_large):
        assert "if it is out of memory, the published shards" in text
        assert "GiB were free" in text


def _not_allowed(rank: int) -> str:
    device = start(rank)
    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    if HAS_GPU:
        made = transport(rank, device)
    else:
        made = fake_cuda(rank, 2, rendezvous(), uuid="the only one")
    with pytest.raises(WindowError) as error:
        made.open(contract.SPEC)
    return str(error.value)


def test_ranks_on_one_gpu_are_refused_unless_allowed():
    world_size = max(torch.cuda.device_count() + 1, 2)
    for text in run_ranks(_not_allowed, world_size=world_size):
        assert "if devices overlap, give every rank a GPU of its own" in text


def _dies(rank: int) -> list[Any]:
    opened = transport(rank, start(rank))
    opened.open(contract.SPEC)
    rendezvous()(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not opened.dead_peers():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    copy = contract.zeros_of(opened, 2)
    opened.read([opened.shard(1, 2)], copy)  # the memory lives on while it is mapped here
    contract.settle(opened)
    opened.close()
    dist.destroy_process_group()
    return [copy.abs().sum().item()]


def test_a_killed_rank_is_known_dead_and_harms_nobody():
    survivor, killed = try_ranks(_dies, timeout=60)
    assert survivor.result == [0.0]
    assert survivor.error == ""
    assert survivor.exitcode == 0
    assert killed.exitcode == -signal.SIGKILL
