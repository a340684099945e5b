"""What the strategies for ``Trainer`` and ``Fabric`` have in common: how ranks begin, and a model with its engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_odc.attached import Attached, Place, make_engine
from lightning_odc.engine.base import Engine
from lightning_odc.engine.hybrid.spanning import Layout
from lightning_odc.engine.mates import Mates
from lightning_odc.engine.transports import check_device
from lightning_odc.engine.waiting import HangReport
from lightning_odc.sharding.nodes import check_groups, check_rows, gloo_checked, layout_of
from lightning_odc.strategy.launcher import ForkLauncher, part_of_the_cores
from lightning_odc.strategy.options import Options


class AttachingStrategy:
    """A part of a strategy of Lightning's, which stands behind it: `attach`, with the ranks that Lightning started."""

    options: Options
    timeout: Any
    _attached: Attached | None = None
    _launcher: Any
    _on_teardown: ExitStack
    _mesh_of_nodes: Any = None  # that the user asked for: nodes, and ranks per node
    # ("data_parallel", "tensor_parallel"), or context_parallel: where several ranks compute one sample.
    _mesh_of_groups: DeviceMesh | None = None
    _world: dist.ProcessGroup | None = None  # in which these were made

    @property
    def communication(self) -> str:
        """The argument."""
        return self.options.communication

    @property
    def _replicates(self) -> bool:
        """Whether every row of ranks holds the whole model: hybrid sharding."""
        return False

    @property
    def _on_demand(self: Any) -> bool:
        return self.communication != "collective" and self.world_size > self.options.tensor_parallel_size

    @property
    def _divides_layers(self) -> bool:
        return self.options.tensor_parallel_size > 1

    @property
    def _num_groups(self: Any) -> int:
        """The number of data-parallel places: ranks, or groups of ranks that compute one sample together."""
        return cast(int, self.world_size // self.options.group_size)

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """The division of the data: over ranks, or over groups of neighbouring ranks."""
        return {"num_replicas": self._num_groups, "rank": self.global_rank // self.options.group_size}

    @property
    def _layout(self: Any) -> Layout | None:
        """Rows and columns of ranks; ``None`` if all of them are one row, or collectives treat them as one."""
        if self.options.group_size > 1 or not (self._replicates or self._on_demand):
            return None
        layout = layout_of(self._mesh_of_nodes, self.num_nodes, self.world_size, self.global_rank)
        return layout if len(layout.rows) > 1 else None

    def _device_type(self: Any) -> str:
        return cast(str, self.root_device.type)

    def _configure_launcher(self: Any) -> None:
        # A notebook's kernel, IPython, or `python -i`, under which a script has no prompt yet.
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if is_interactive and not self.cluster_environment.creates_processes_externally:
            self._launcher = ForkLauncher(self)
        else:
            self._launcher = None
            cast(Any, super())._configure_launcher()

    def setup_environment(self: Any) -> None:
        if self.communication != "collective":
            check_device(self._device_type(), type(self).__name__)
        self._on_teardown.enter_context(part_of_the_cores(self._device_type(), self.num_processes))
        with gloo_checked(self):
            cast(Any, super()).setup_environment()
        if self._layout is not None:
            check_rows(self._layout, self._replicates, self.communication)
        if (size := self.options.group_size) > 1:
            check_groups(size, self.world_size, self.num_nodes)
            names = ("data_parallel", "tensor_parallel" if self._divides_layers else "context_parallel")
            if self._world is not dist.group.WORLD:  # else another run of this strategy has made it
                shape = (self._num_groups, size)
                self._mesh_of_groups = init_device_mesh(self._device_type(), shape, mesh_dim_names=names)
                self._world = dist.group.WORLD

    def _attach(
        self: Any,
        model: nn.Module,
        replicas: DeviceMesh | None = None,
        hang_report: HangReport | None = None,
        gradients: bool = True,
    ) -> Attached:
        """Make the engine of a sharded model. All ranks together."""
        groups: DeviceMesh | None = self._mesh_of_groups
        mates = None if groups is None else Mates(groups, self.timeout, self._divides_layers)
        columns = groups["data_parallel"] if groups is not None and self._divides_layers else None
        address = self.cluster_environment.main_address if self.cluster_environment else ""
        own = self.root_device, self.global_rank, self.world_size, self.num_processes, address
        place = Place(*own, self._layout, replicas, columns, mates)
        names = ("communication", "keep_gathered", "deterministic", "accumulator_dtype")
        options = {name: getattr(self.options, name) for name in names}
        engine = make_engine(place, timeout=self.timeout, hang_report=hang_report, **options)
        self._attached = attached = Attached(model, engine, mates)  # first, so that a failure releases it
        engine.attach(model, gradients=gradients)
        return attached

    @property
    def attached(self) -> Attached:
        """The model with its engine, as `attach` gives it to loops without Lightning.

        Raises:
            RuntimeError: before ``fabric.setup``, or while the trainer does not run.
        """
        if self._attached is None:
            raise RuntimeError(
                f"{type(self).__name__} has no engine now. With Fabric, call `model, optimizer = fabric.setup(model, "
                "optimizer)`. Otherwise it exists only while the trainer runs; look at it from a callback."
            )
        return self._attached

    @property
    def engine(self) -> Engine:
        """What moves shards and gradients, with its measured waits and traffic.

        Raises:
            RuntimeError: before ``fabric.setup``, or while the trainer does not run.
        """
        return self.attached.engine

    def publish_parameters(self) -> None:
        """Let peers read parameters that were changed outside the optimizer step. Call it on all ranks together.

        Loading a checkpoint does it already; with the Trainer, the beginnings of training, validation, test and
        prediction, and the end of validation do it, too.
        """
        self.attached.publish()

    def stream_parameters(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every parameter, in the dtype that it computes in, read by this rank alone.

        Other ranks need not call it. They go on, to the end of the next optimizer step at most, where they wait for
        this one. One unit at a time is held. For an inference server, or a Hugging Face directory::

            if self.trainer.is_global_zero:
                save_pretrained(self.model, self.trainer.strategy.stream_parameters(self.model), "weights")

        Args:
            module: Only the parameters of this part of the model, with their names in it.

        Raises:
            RuntimeError: before ``fabric.setup``, or while the trainer does not run.
            ValueError: ``communication`` is not ``"on_demand"``, or ``module`` is no part of the model.
            StaleShardError: an optimizer step has ended since it began, or is ending.
        """
        return self.attached.stream_parameters(module)

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which units stay gathered from one forward pass to the next, so that many passes read them once.

        It is for loops that run the model often between two optimizer steps, such as sampling and scoring::

            with self.trainer.strategy.gathered():
                scores = [self.score(response) for response in responses]

        ``generate`` of a model opens one by itself. Units that fit into the memory of ``keep_gathered`` stay gathered,
        the others are read in every pass. At the end, all are freed that the minibatch does not keep anyway. After an
        optimizer step in the context, all are read again. Each rank decides for itself: ranks may open different
        numbers of contexts, and contexts may be nested. With ``communication="collective"`` or ``"lockstep"`` it does
        nothing, because there all ranks gather together.

        Raises:
            RuntimeError: before ``fabric.setup``, or while the trainer does not run.
            StaleShardError: if a parameter was changed in the context by anything else than an optimizer step.
        """
        return self.engine.gathered()
