"""``FSDPStrategy`` on ``fully_shard``: construction, sharding, precision, checkpoints. Communication is left open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy
from torch.optim import Optimizer

from lightning_odc import _compat_lightning
from lightning_odc.attached import DEFAULT_TIMEOUT
from lightning_odc.sharding import checkpoints, nodes
from lightning_odc.sharding.checkpoints import WholeCheckpointIO
from lightning_odc.sharding.initialize import Unfilled, materialize
from lightning_odc.sharding.optimizers import ParameterNames, regroup
from lightning_odc.sharding.wrapping import mesh_for, precision_policy, shard_model, wrapping_shards
from lightning_odc.strategy import options
from lightning_odc.strategy.attaching import AttachingStrategy
from lightning_odc.strategy.precision import ODCPrecision


class ShardedStrategy(AttachingStrategy, FSDPStrategy):
    """What `ODCStrategy`, which explains the arguments, does that has nothing to do with how bytes move."""

    model: nn.Module  # Lightning sets it before it calls what uses it

    def __init__(
        self, *, precision_plugin: Precision | None, sharding_strategy: Any, device_mesh: Any, **of_fsdp: Any
    ) -> None:
        options.check_fsdp(of_fsdp)
        options.check_sharding(sharding_strategy, device_mesh, self.options.group_size)
        name = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
        within_node = nodes.WITHIN_NODE.get(name, name)  # the base class takes hybrid ones only for FSDP1
        super().__init__(precision_plugin=None, sharding_strategy=cast(Any, within_node), **of_fsdp)
        self.sharding_strategy = ShardingStrategy[name]
        self.device_mesh = self._mesh_of_nodes = device_mesh
        self._reshard_after_forward = within_node == "FULL_SHARD"
        self._mesh: DeviceMesh | None = None
        self.state_dict_type = of_fsdp["state_dict_type"]
        self.timeout = of_fsdp["timeout"] or DEFAULT_TIMEOUT
        self.precision_plugin = precision_plugin
        self._on_teardown = ExitStack()
        self._unfilled: list[Unfilled] = []
        self._names = ParameterNames()
        self._is_training = False

    @property
    def precision_plugin(self) -> ODCPrecision:
        """What casts inputs and scales losses, from ``Trainer(precision=...)``."""
        plugin = super().precision_plugin
        return plugin if isinstance(plugin, ODCPrecision) else ODCPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, FSDPPrecision):
            raise TypeError(
                f"ODCStrategy works with Lightning's FSDP precision, got {plugin!r}. Write Trainer(precision=...) "
                "instead of a plugin."
            )
        if plugin is not None and not isinstance(plugin, ODCPrecision):
            plugin = ODCPrecision(plugin.precision, self._device_type())
        # Into its own place: the trainer looks there for what a strategy was made with.
        cast(property, FSDPStrategy.precision_plugin).__set__(self, plugin)

    @cast(property, FSDPStrategy.checkpoint_io).getter
    def checkpoint_io(self) -> Any:
        """What reads and writes full checkpoints: a plugin of the user's, or our own instead of Lightning's."""
        plugin = super().checkpoint_io
        if type(plugin) is TorchCheckpointIO:
            plugin = self.checkpoint_io = WholeCheckpointIO()
        elif isinstance(plugin, AsyncCheckpointIO):
            plugin.checkpoint_io = WholeCheckpointIO()
        return plugin

    def _device_type(self) -> str:
        if self.parallel_devices:
            return self.parallel_devices[0].type
        return "cuda" if isinstance(self.accelerator, CUDAAccelerator) else "cpu"

    # -- setting up and tearing down ----------------------------------------------------------------------

    def setup_environment(self) -> None:
        options.check_checkpoint_io(self.state_dict_type, self.checkpoint_io)
        if self.cpu_offload.offload_params and self._device_type() != "cpu":
            there = dist.get_backend_config() if dist.is_initialized() else self.process_group_backend
            _compat_lightning.set_process_group_backend(self, options.offloading_backend(there))
        super().setup_environment()
        self._mesh = None
        module = self.lightning_module
        whole = self._mesh_of_groups
        if module is not None and (whole is not None or is_overridden("configure_model", module)):
            if whole is None:
                whole = nodes.mesh_for_modules(self.shard_mesh)
                assert whole.mesh_dim_names is not None
                self._mesh = whole[whole.mesh_dim_names[:-1]]  # one mesh: DTensors of two do not go together
            _compat_lightning.set_device_mesh(module, whole)
            self._on_teardown.callback(_compat_lightning.set_device_mesh, module, None)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of ranks over which ``fully_shard`` shards. Pass it as ``mesh`` in ``configure_model``.

        One dimension: all ranks; with tensor parallelism those that have the same part of the model; under hybrid
        sharding those of this node, since what happens between nodes is left to the engine. Or two, ``(replicate,
        shard)``, if ``fully_shard`` itself communicates. Needs the process group.
        """
        if self._mesh is None:
            if self._mesh_of_groups is not None and self.options.tensor_parallel_size > 1:
                self._mesh = self._mesh_of_groups["data_parallel"]
            elif self._layout is None or not self._replicates:
                self._mesh = mesh_for(self.root_device.type, self.world_size)
            else:
                mesh = nodes.mesh_of(self._layout, self.root_device.type)
                self._mesh = mesh["shard"] if self._on_demand else mesh
        return self._mesh

    @property
    def _replicates(self) -> bool:
        """Whether every row of ranks holds the whole model: hybrid sharding."""
        return self.sharding_strategy.name in nodes.WITHIN_NODE

    def _ordinary_tensors(self) -> AbstractContextManager[Any]:
        """Leaves the user's inference mode: its tensors cannot be changed outside of it."""
        # A module that was made in inference mode has such tensors already, and needs that mode.
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))

    def _shard_in_place(self, model: nn.Module) -> nn.Module:
        """Shard the model and give values to what was made on the meta device."""
        with self._names.recorded(model):
            if not isinstance(model, FSDPModule):
                _compat_lightning.wrap_checkpointed(model, self)
            self._shard(model, announce=True)
            groups = self._mesh_of_groups if self.options.tensor_parallel_size > 1 else None
            nodes.check_shards(model, self.shard_mesh, groups)
            self._unfilled = materialize(model, self.root_device, offload=self.cpu_offload.offload_params)
        return model

    def _shard(self, model: nn.Module, announce: bool) -> None:
        policy = self.kwargs.get("auto_wrap_policy")
        shard_model(model, self.shard_mesh, wrap_policy=policy, announce=announce, **self._how_to_shard)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        # Optimizers may have been made before the model was sharded, as in `__init__`.
        self._names.follow(self.model, self.optimizers)
        self._is_training = False

    def _setup_averages(self, trainer: pl.Trainer) -> None:
        """Shard the copies of the model that averaging callbacks have made of it before."""
        averages = checkpoints.averages(trainer)
        checkpoints.check_kept_whole(averages, self._full)
        for average in averages:
            self._shard(average, announce=False)
            materialize(average, self.root_device, offload=self.cpu_offload.offload_params)
            checkpoints.copy_values(self.model, average)

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        if (given := self.mixed_precision) is not None:
            return precision_policy(given.param_dtype, given.reduce_dtype, self._on_demand)
        return self.precision_plugin.policy(self._on_demand)

    @property
    def _how_to_shard(self) -> dict[str, Any]:
        return {
            "mixed_precision": self.mixed_precision_policy,
            "reshard_after_forward": self._reshard_after_forward,
            "cpu_offload": self.cpu_offload.offload_params,
        }

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        shards = wrapping_shards(self.shard_mesh, **self._how_to_shard)
        module = self.lightning_module  # `configure_model` may shard it
        with shards, nullcontext() if module is None else self._names.recorded(module):
            yield

    def teardown(self) -> None:
        self._on_teardown.close()
        super().teardown()
        self.checkpoint_io.teardown()  # waits for what is still being written, unlike FSDPStrategy

    # -- checkpoints --------------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return self.state_dict_type == "full"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._ordinary_tensors():
            return checkpoints.model_state(self.model, self._full)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return checkpoints.optimizer_state(self.model, optimizer, self._full, self.global_rank)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None and not self._full:
            raise TypeError("ODCStrategy(state_dict_type='sharded') does not use `storage_options`.")
        path = checkpoints.location(self.broadcast(filepath))
        if self._full:
            checkpoint = checkpoints.assembled(checkpoint)
        checkpoints.make_room(path, self._full, self.is_global_zero, self.barrier)
        if not self._full:
            checkpoints.save_shards(checkpoint, cast(Path, path), self.global_rank)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a full or a sharded checkpoint into the model and, when fitting, the optimizers; the rest comes back."""
        assert self.lightning_module is not None
        path = checkpoints.location(self.broadcast(checkpoint_path))
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._optimizers_with_state if fitting else []
        strict = self.lightning_module.strict_loading
        with self._ordinary_tensors():
            rest = checkpoints.load(path, self.model, optimizers, strict, weights_only, self.checkpoint_io)
            if self._is_training:  # else Lightning does it, when callbacks have loaded what they know
                self.load_optimizer_state_dict(rest)
            checkpoints.reopen_epoch(rest)
            if checkpoints.averages(self.lightning_module.trainer):
                checkpoints.cut(rest, self.model)
            self.publish_parameters()
        return rest

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        regroup(self.lightning_module.trainer, self.lightning_module)
        if optimizers := self._optimizers_with_state:
            checkpoints.load_optimizers(optimizers, checkpoint["optimizer_states"], self.model)

    @property
    def _optimizers_with_state(self) -> list[Optimizer]:
        """The optimizers, without Lightning's stand-in if ``configure_optimizers`` made none."""
        return [optimizer for optimizer in self.optimizers if optimizer.param_groups]

    def on_train_start(self) -> None:
        self._is_training = True
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        epochs: Any = loop.epoch_progress.current
        if epochs.ready == epochs.processed:
            # A new epoch begins. A loop that has restarted at the last batch of one takes it for the middle of that one
            # (Lightning 2.5.0 to 2.6.6) and would not count the new epoch as begun: nor would its checkpoints.
            loop.reset_restart_stage()

    def on_train_end(self) -> None:
        self._is_training = False
