"""Ranks on GPUs: one each where there are enough, else several on one.

Where there is none, ranks have the fake device: so the suite is rehearsed on every machine (``test_rehearsal.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc.bench.devices import Placement, place
from lightning_odc.engine.collective import process_group_rendezvous
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.choice import make_transport
from lightning_odc.engine.transports.cuda import CudaTransport
from tests.support.fake_device import fake_cuda


def start(rank: int) -> torch.device:
    """Join a gloo group, which takes ranks that share a GPU; returns this rank's device."""
    placement = placed()
    placement.enter(rank)
    dist.init_process_group("gloo")
    return placement.devices[rank]


def placed() -> Placement:
    """The devices of all ranks."""
    return place("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["WORLD_SIZE"]))


def rendezvous() -> Callable[[Any], list[Any]]:
    return process_group_rendezvous(dist.group.WORLD)


def transport(rank: int, device: torch.device) -> CudaTransport:
    if device.type == "cpu":
        return fake_cuda(rank, dist.get_world_size(), rendezvous())
    made = make_transport(device, rank, dist.get_world_size(), rendezvous(), dist.group.WORLD)
    assert isinstance(made, CudaTransport)
    return made


def engine(rank: int, device: torch.device, **options: Any) -> OnDemandEngine:
    return OnDemandEngine(lambda: transport(rank, device), rendezvous(), timeout=60, **options)


def gathered_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters whole, in host memory, on every rank: by gloo, which one GPU for all ranks does not disturb."""
    mine = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mine[name] = parameter.detach().to_local().cpu()
    return joined(rendezvous()(mine))


def joined(by_rank: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([shards[name] for shards in by_rank]) for name in by_rank[0]}
