"""The engine that moves the shards and gradients of a model: which one it is, by where its ranks are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_odc import _compat
from lightning_odc.arguments import Like
from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.gather_cache import CudaMemory, GatherCache, HostMemory, Memory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.whole import WholeCollectiveEngine, WholeOnDemandEngine
from lightning_odc.protocol.nodes.column import ColumnGroup, Layout
from lightning_odc.protocol.nodes.copies import CopiesProtocol
from lightning_odc.protocol.nodes.leaders import Leaders
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.protocol.transports import make_transport
from lightning_odc.protocol.transports.base import (
    Rendezvous,
    SumDtype,
    process_group_rendezvous,
    single_process,
)
from lightning_odc.protocol.waiting import HangReport
from lightning_odc.sharding.nodes import mesh_of

Timeout = Annotated[timedelta, Like("datetime.timedelta(minutes=30)", lambda value: value > timedelta(0))]
FloatDtype = Annotated[torch.dtype, Like("torch.float32", lambda dtype: dtype.is_floating_point)]
MemorySize = Annotated[
    int | str,
    Like(
        '"auto", 0 (to keep nothing), "4GiB" or 4 * 2**30 (the most bytes that a rank may keep)',
        lambda value: value == "auto" or re.fullmatch(r"\d+(GiB)?", str(value)) is not None,
    ),
]
#: The longest wait for another rank, as in every strategy of Lightning.
DEFAULT_TIMEOUT = timedelta(minutes=30)
#: How long ranks wait before they say where they are.
HANG_REPORT_AFTER = timedelta(minutes=1)
#: Seconds without any sign of another host, and time without progress of a collective over nodes, before that is an
#: error that says who is gone; at most a quarter and a half of ``timeout``, where the error is that of a slow rank.
SILENCE = 30.0
STALL = timedelta(minutes=1)


@dataclass(frozen=True)
class Place:
    """Where this rank is among all ranks."""

    device: torch.device
    rank: int
    world_size: int
    on_node: int  # ranks on this node
    layout: Layout | None = None  # which ranks are on which node, if there are several
    data_parallel: DeviceMesh | None = None  # of ranks that have the same part of a tensor-parallel model
    sample_group: SampleGroup | None = None  # of this rank, if several compute one sample together

    @property
    def sharers(self) -> list[int]:
        """The ranks that share one engine: all of them, or those with the same part of a tensor-parallel model."""
        if self.data_parallel is None:
            return list(range(self.world_size))
        return self.data_parallel.mesh.flatten().tolist()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of `sharers`."""
        if self.data_parallel is None:
            return dist.group.WORLD
        return self.data_parallel.get_group()


def make_engine(
    place: Place,
    *,
    whole: bool = False,
    communication: str = "on_demand",
    keep_gathered: int | str = "auto",
    deterministic: bool = False,
    accumulator_dtype: SumDtype = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    hang_report: HangReport | None = None,
) -> Engine:
    """The engine that moves the shards and gradients of a model, or the gradients of one that every rank has whole."""
    # All ranks together.
    ranks = place.sharers
    rendezvous: Rendezvous = single_process
    if len(ranks) > 1:
        rendezvous = process_group_rendezvous(place.group)
    if len(ranks) == 1 or communication == "collective":
        if whole:
            return WholeCollectiveEngine(rendezvous, accumulator_dtype)
        return CollectiveEngine(len(ranks), rendezvous)
    options: dict[str, Any] = {
        "timeout": timeout.total_seconds(),
        "deterministic": deterministic,
        "accumulator_dtype": accumulator_dtype,
        "hang_report": hang_report,
    }
    group = place.group
    if place.layout is not None:
        ranks = place.layout.row_of(place.layout.node)
        group = mesh_of(place.layout, place.device.type)["shard"].get_group()
        options["make_protocol"] = _protocol_over_nodes(place.layout, place.device, rendezvous, timeout)
    if place.data_parallel is not None:  # ranks with other parts of the layers must come to the same answer
        options["agree"] = process_group_rendezvous(dist.group.WORLD)
    within = process_group_rendezvous(group)
    transport = partial(
        make_transport, place.device, ranks.index(place.rank), len(ranks), within, group, ranks
    )
    if whole:
        return WholeOnDemandEngine(transport, rendezvous, **options)
    cache = GatherCache(_bytes(keep_gathered), _memory(place, rendezvous))
    return OnDemandEngine(
        transport, rendezvous, gather_cache=cache, sample_group=place.sample_group, **options
    )


def _bytes(size: int | str) -> int | Literal["auto"]:
    """A `MemorySize` in bytes."""
    if size == "auto":
        return "auto"
    number = int(str(size).removesuffix("GiB"))
    return number * 2**30 if str(size).endswith("GiB") else number


def _memory(place: Place, rendezvous: Rendezvous) -> Memory:
    """The memory of a rank's device, of which every rank may plan its part."""
    if place.device.type != "cuda":
        return HostMemory(place.on_node)
    device = str(torch.cuda.get_device_properties(place.device).uuid)
    return CudaMemory(place.device, rendezvous(device).count(device))


def _protocol_over_nodes(
    layout: Layout, device: torch.device, rendezvous: Rendezvous, timeout: timedelta
) -> Callable[..., Protocol]:
    """What makes the protocol of a rank on one of several nodes."""
    silence = min(SILENCE, timeout.total_seconds() / 4)
    main_address = os.environ.get("MASTER_ADDR", "localhost")
    return partial(
        CopiesProtocol,
        layout=layout,
        column=ColumnGroup(layout, device, min(STALL, timeout / 2)),
        make_leaders=partial(Leaders, layout, rendezvous, _compat.default_store(), main_address, silence),
    )
