"""Which ranks do something together: those that compute one sample, and those that hold a model between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.sharding.engines import Place
from lightning_odc.sharding.nodes import check_groups, layout_of
from lightning_odc.strategy.setup.options import Options
from lightning_odc.strategy.setup.starting import LightningStrategy


class Groups:
    """How the ranks of a strategy are arranged. What Lightning finds out late is read when it is asked for.

    Args:
        options: What the strategy was made with.
        strategy: What knows the ranks: the strategy itself.
        node_mesh: Nodes, and ranks per node, if the user asked for a division.
        replicates: Whether collectives keep the whole model on every node: hybrid sharding.

    Attributes:
        communication: How bytes move: as the user wrote, and for ``"auto"`` what has run, once that is known.
        mesh: ``("data_parallel", "tensor_parallel")`` or ``context_parallel``, where several ranks compute one sample.
    """

    def __init__(
        self,
        options: Options,
        strategy: LightningStrategy,
        node_mesh: Sequence[int] | DeviceMesh | None = None,
        replicates: bool = False,
    ) -> None:
        self.mesh: DeviceMesh | None = None
        self.communication: str = options.communication
        self.strategy = strategy
        self.replicates = replicates
        self._options = options
        self._node_mesh = node_mesh
        self._world: dist.ProcessGroup | None = None  # in which `mesh` was made

    @property
    def on_demand(self) -> bool:
        """Whether there are shards to read on demand."""
        if self.communication == "collective":
            return False
        return self.strategy.world_size > self._options.tensor_parallel_size

    @property
    def divides_layers(self) -> bool:
        """Whether the ranks of a group have different parts of the layers: tensor parallelism."""
        return self._options.tensor_parallel_size > 1

    @property
    def data_parallel(self) -> DeviceMesh | None:
        """The ranks that have the same part of the layers, if layers are divided."""
        if self.mesh is None or not self.divides_layers:
            return None
        return self.mesh["data_parallel"]

    @property
    def count(self) -> int:
        """The number of data-parallel places: ranks, or groups of ranks that compute one sample together."""
        return self.strategy.world_size // self._options.group_size

    def layout(self) -> Layout | None:
        """Which ranks are on which node; ``None`` if all are on one, or collectives treat them as if.

        Raises:
            ValueError: Nodes have different numbers of ranks, or nothing to read on demand.
        """
        if self._options.group_size > 1:
            return None
        if not self.replicates and not self.on_demand:
            return None
        strategy = self.strategy
        return layout_of(
            self._node_mesh, strategy.num_nodes, strategy.world_size, strategy.global_rank, self.on_demand
        )

    def form(self, device_type: str) -> None:
        """Check the arrangement, and make the mesh of groups. All ranks together, when the process group is there."""
        size = self._options.group_size
        if size == 1:
            return
        check_groups(size, self.strategy.world_size, self.strategy.num_nodes)
        if self._world is dist.group.WORLD:
            return  # another run of this strategy has made it
        names = ("data_parallel", "context_parallel")
        if self.divides_layers:
            names = ("data_parallel", "tensor_parallel")
        self.mesh = init_device_mesh(device_type, (self.count, size), mesh_dim_names=names)
        self._world = dist.group.WORLD

    def place(self, timeout: timedelta) -> Place:
        """Where this rank is among all ranks, for the engine."""
        strategy = self.strategy
        sample_group = None
        if self.mesh is not None:
            sample_group = SampleGroup(self.mesh, timeout, self.divides_layers)
        return Place(
            device=strategy.root_device,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            on_node=strategy.num_processes,
            layout=self.layout(),
            data_parallel=self.data_parallel,
            sample_group=sample_group,
        )
