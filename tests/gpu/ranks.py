"""Ranks on GPUs: one each where there are enough, else several on one.

Where there is none, ranks have the fake device. So nearly all of these tests run on every machine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.harness.processes import Placement, place
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.cuda import CudaTransport
from tests.support.fake_device import fake_cuda

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
#: Ranks of the tests: on one GPU 4 share it. Four processes on a processor show no more than two.
WORLD_SIZES = [2, 4] if HAS_GPU else [2]
needs_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="no CUDA device here: run `make test-gpu` on a machine that has one"
)
_LONGEST_DELAY = 5e-3  # seconds


def start(rank: int) -> torch.device:
    """Join a gloo group, which takes ranks that share a GPU; returns this rank's device."""
    placement = placed()
    placement.enter(rank)
    dist.init_process_group("gloo")
    return placement.devices[rank]


def placed() -> Placement:
    """The devices of all ranks."""
    return place(DEVICE.type, int(os.environ["WORLD_SIZE"]))


def rendezvous() -> Callable[[Any], list[Any]]:
    return process_group_rendezvous(dist.group.WORLD)


def transport(rank: int, device: torch.device, late: int | None = None) -> CudaTransport:
    """The CUDA transport of a rank; ``late`` seeds delays before everything that a GPU is asked for."""
    world_size = dist.get_world_size()
    meet = rendezvous()
    if device.type == "cpu":
        return fake_cuda(rank, world_size, meet)
    from lightning_odc.protocol.transports.cuda import SymmetricDevice

    group = dist.group.WORLD
    if late is None:
        own = SymmetricDevice(device, group)
    else:
        own = late_device(device, group, late + rank)
    return CudaTransport(rank, world_size, meet, own)


def late_device(device: torch.device, group: Any, seed: int) -> Any:
    """A GPU that sleeps before it copies, adds, or passes a mark: who does not wait for it is too early."""
    from lightning_odc.protocol.transports.cuda import SymmetricDevice

    late = Late(seed)

    class LateDevice(SymmetricDevice):
        def copy(self, target: Tensor, source: Tensor) -> None:
            late()
            super().copy(target, source)

        def add_rows(self, offset: int, dtype: torch.dtype, rows: Tensor) -> None:
            late()
            super().add_rows(offset, dtype, rows)

        def mark(self) -> Any:
            late()
            return super().mark()

    return LateDevice(device, group)


class Late:
    """Lets the current stream of a GPU sleep for a random time. Without a GPU it does nothing."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        if HAS_GPU:
            cycles = 1.7e9 * _LONGEST_DELAY * self._random.random()  # at the clock of a Hopper chip
            torch.cuda._sleep(int(cycles))  # type: ignore[attr-defined] # torch's own tests have nothing else


def engine(rank: int, device: torch.device, late: int | None = None, **options: Any) -> OnDemandEngine:
    return OnDemandEngine(lambda: transport(rank, device, late), rendezvous(), timeout=60, **options)


def gathered_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters whole, in host memory, on every rank: by gloo, which one GPU for all ranks does not disturb."""
    mine = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mine[name] = parameter.detach().to_local().cpu()
    by_rank = rendezvous()(mine)
    return {name: torch.cat([shards[name] for shards in by_rank]) for name in mine}
