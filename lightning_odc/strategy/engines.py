"""Which engine a strategy gets: on demand or by collectives, within one node or over several."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine, process_group_rendezvous, single_process
from lightning_odc.engine.hang_report import HangReport
from lightning_odc.engine.hybrid.column import ColumnGroup, Layout
from lightning_odc.engine.hybrid.copies import CopiesEngine
from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.hybrid.replicas import HybridEngine, Replicas
from lightning_odc.engine.hybrid.spanning import SpanningEngine
from lightning_odc.engine.keeping import CudaMemory, HostMemory, Keeping, Memory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.transports.choice import make_transport
from lightning_odc.sharding.nodes import check_hosts, mesh_of
from lightning_odc.strategy.options import memory_size

#: Seconds without any sign of another host, or without progress of a collective over nodes, before that is an error; at
#: most a quarter and a half of ``timeout``. So the error is not that of a wait for a slow rank, and says who is gone.
SILENCE = 30.0
STALL = 60.0


def make_engine(
    strategy: Any,
    timeout: timedelta,
    layout: Layout | None = None,
    replicates: bool = False,
    hang_report: HangReport | None = None,
) -> Engine:
    """The engine that moves the shards and gradients of a strategy's model. All ranks together."""
    if strategy.world_size == 1:
        return CollectiveEngine(1, single_process)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    if strategy.communication == "collective":
        return CollectiveEngine(strategy.world_size, rendezvous)
    device = strategy.root_device
    options = {
        "keeping": Keeping(memory_size(strategy.keep_gathered), _memory(strategy, rendezvous)),
        "timeout": timeout.total_seconds(),
        "deterministic": strategy.deterministic,
        "lockstep": strategy.communication == "lockstep",
        "accumulator_dtype": strategy.accumulator_dtype,
        "hang_report": hang_report,
    }
    if layout is not None:
        return _make_spanning_engine(strategy, layout, replicates, rendezvous, options)
    place = (device, strategy.global_rank, strategy.world_size)
    transport = partial(make_transport, *place, rendezvous, dist.group.WORLD)
    return OnDemandEngine(transport, rendezvous, **options)


def _memory(strategy: Any, rendezvous: Rendezvous) -> Memory:
    """The memory of a rank's device, of which every rank may plan its part."""
    device = strategy.root_device
    if device.type != "cuda":
        return HostMemory(strategy.num_processes)
    own = str(torch.cuda.get_device_properties(device).uuid)
    return CudaMemory(device, rendezvous(own).count(own))


def _make_spanning_engine(
    strategy: Any, layout: Layout, replicates: bool, rendezvous: Rendezvous, options: dict[str, Any]
) -> SpanningEngine:
    check_hosts(layout, rendezvous)
    device, rank, row = strategy.root_device, layout.rank, layout.row
    mesh = strategy.shard_mesh if replicates else mesh_of(layout, device.type)["shard"]
    group = mesh.get_group()
    within = process_group_rendezvous(group)
    silence, stall = min(SILENCE, options["timeout"] / 4), min(STALL, options["timeout"] / 2)
    address = strategy.cluster_environment.main_address

    def make_link() -> ReplicaLink:
        return ReplicaLink(rank, layout.column, rendezvous, address, layout.main_row, silence)

    transport = partial(make_transport, device, row.index(rank), len(row), within, group, row)
    options |= {"layout": layout, "make_link": make_link}
    if replicates:
        replicas = Replicas(layout, device, timedelta(seconds=stall))
        return HybridEngine(transport, rendezvous, group=replicas, **options)
    column = ColumnGroup(layout, device, timedelta(seconds=stall))
    return CopiesEngine(transport, rendezvous, group=column, **options)


def hang_report_of(trainer: pl.Trainer, after: timedelta | None) -> HangReport | None:
    """What says where this rank is, after so long a wait: on stderr and in the trainer's directory."""
    if after is None:
        return None
    root = trainer.default_root_dir
    directory = None if "://" in root else Path(root) / "odc-hang-reports"

    def place() -> str:
        return f", in epoch {trainer.current_epoch} after {trainer.global_step} optimizer steps"

    return HangReport(after.total_seconds(), directory, trainer.global_rank, place)
