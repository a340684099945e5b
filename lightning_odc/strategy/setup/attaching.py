"""What the strategies for ``Trainer`` and ``Fabric`` have in common: how ranks begin, and a model with its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_odc import _compat
from lightning_odc.attached import Attached, attach_or_go_without, destroy_groups_at_exit
from lightning_odc.engine.base import Engine
from lightning_odc.engine.units import fsdp_modules
from lightning_odc.errors import WindowError
from lightning_odc.protocol.roll_call import RollCall
from lightning_odc.protocol.transports import check_device
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.waiting import HangReport
from lightning_odc.sharding import fitting
from lightning_odc.strategy.setup.groups import Groups
from lightning_odc.strategy.setup.launcher import end_scripts_at_exit
from lightning_odc.strategy.setup.options import WORDING, Options
from lightning_odc.strategy.setup.starting import let_nodes_reach_gloo, part_of_the_cores, store_on_loopback


class AttachingStrategy:
    """A part of a strategy of Lightning's, which stands behind it: `attach`, with the ranks that Lightning started."""

    options: Options
    timeout: timedelta
    _groups: Groups
    _attached: Attached | None = None
    _on_teardown: ExitStack
    _roll_call: RollCall | None = None
    _wording = WORDING
    is_whole = False  # every rank has the model whole, since it was set up

    @property
    def communication(self) -> str:
        """The argument; ``"auto"`` becomes what runs when a model is set up."""
        return self._groups.communication

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The division of the data: over ranks, or over groups of neighbouring ranks."""
        groups = self._groups
        return {
            "num_replicas": groups.count,
            "rank": groups.strategy.global_rank // self.options.group_size,
        }

    @contextmanager
    def _starting(self, device_type: str) -> Iterator[None]:
        """Make the process group in this context: behind a check of the devices, and before groups are formed."""
        strategy = self._groups.strategy
        if not dist.is_initialized():
            end_scripts_at_exit(strategy.launcher, self.timeout.total_seconds())
        self._groups.communication = self.options.communication
        if self.communication != "collective":
            try:
                check_device(device_type, type(self).__name__)
            except WindowError as error:
                self._go_without(error)
        self._on_teardown.enter_context(part_of_the_cores(device_type, strategy.num_processes))
        let_nodes_reach_gloo(strategy)
        with store_on_loopback(strategy):
            yield
        destroy_groups_at_exit()
        try:
            self._groups.layout()  # refuses nodes on which there is nothing to read on demand
        except ValueError as error:
            self._go_without(error)
        self._groups.form(device_type)
        self._roll_call = RollCall()

    def _decide_whole(self, model: nn.Module, asked: str, says: bool = True) -> None:
        """Keep a model whole if it fits; see Note [What fits is kept whole]. All ranks together.

        Args:
            model: It has its final dtypes.
            asked: The sharding strategy that the user asks for: ``"AUTO"``, ``"NO_SHARD"`` or another one.
            says: Whether to say what is decided by size.
        """
        is_sharded = fitting.is_sharded(model)
        self.is_whole = asked == "NO_SHARD"
        if self.is_whole and is_sharded:
            raise ValueError(
                'sharding_strategy="NO_SHARD" keeps a model whole, and `configure_model` has sharded this one. Leave '
                '`fully_shard` out, or write sharding_strategy="FULL_SHARD".'
            )
        if asked != "AUTO" or is_sharded:
            return
        self.is_whole, found = self._fits(model, self._groups.strategy.root_device)
        if says and self.is_whole:
            found += f"; {self._wording.write('sharding_strategy', 'FULL_SHARD')} shards it"
        if says:
            rank_zero_info(f"{found}.")

    def _fits(self, model: nn.Module, device: torch.device, trains: bool = True) -> tuple[bool, str]:
        """Whether every rank can train a whole model, or have it, and how large it is. All ranks together."""
        rendezvous = process_group_rendezvous(dist.group.WORLD)
        return fitting.fits_whole(
            model, device, self._groups.strategy.num_processes, rendezvous, trains=trains
        )

    def _attach(
        self,
        model: nn.Module,
        hang_report: HangReport | None = None,
        gradients: bool = True,
    ) -> Attached:
        """Make the engine of a model. All ranks together."""
        given = self.mixed_precision_policy

        def make() -> Attached:
            if self.mixed_precision_policy != given:  # it depends on how bytes move
                for module in fsdp_modules(model):
                    if _compat.precision_of(module) == given:
                        _compat.set_precision(module, self.mixed_precision_policy)
            return self._make_engine(model, hang_report)

        attached = attach_or_go_without(make, self._go_without, gradients)
        if self.communication == "auto":
            self._groups.communication = "on_demand"
        attached.communication = self.communication
        return attached

    def _make_engine(self, model: nn.Module, hang_report: HangReport | None) -> Attached:
        # Before it is attached, so that a failure releases it.
        self._attached = Attached(
            self._groups.place(self.timeout),
            model,
            self.options.on_out_of_memory,
            self._wording,
            whole=self.is_whole,
            communication=self.communication,
            keep_gathered=self.options.keep_gathered,
            deterministic=self.options.deterministic,
            accumulator_dtype=self.options.accumulator_dtype,
            timeout=self.timeout,
            hang_report=hang_report,
        )
        return self._attached

    def _go_without(self, error: Exception) -> None:
        """Let collectives do the work from now on, or raise, if the user insists."""
        if self.options.communication != "auto":
            raise error
        self._groups.communication = "collective"
        rank_zero_warn(self._wording.without_on_demand(error))

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """The precision with which modules are sharded, which depends on how bytes move."""
        return MixedPrecisionPolicy()

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

        Other ranks need not call it. They continue, to the end of the next optimizer step at most, where they wait for
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
        numbers of contexts, and contexts may be nested. With ``communication="collective"`` it does nothing, because
        there all ranks gather together.

        Raises:
            RuntimeError: before ``fabric.setup``, or while the trainer does not run.
            StaleShardError: if a parameter was changed in the context by anything else than an optimizer step.
        """
        return self.engine.gathered()
