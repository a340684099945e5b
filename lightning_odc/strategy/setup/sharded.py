"""``FSDPStrategy`` on ``fully_shard``: construction, sharding, precision, checkpoints. Communication is left open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy
from torch.optim import Optimizer

from lightning_odc import _compat_lightning
from lightning_odc.data.convert import only
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.engine.units import fsdp_modules
from lightning_odc.engine.values import give_first_values, parameters_and_buffers, send_values
from lightning_odc.sharding import checkpoints, nodes
from lightning_odc.sharding.checkpoints import WholeCheckpointIO
from lightning_odc.sharding.engines import DEFAULT_TIMEOUT
from lightning_odc.sharding.initialize import Unfilled, materialize
from lightning_odc.sharding.optimizers import (
    ParameterNames,
    StateDict,
    put_in_place,
    regroup,
)
from lightning_odc.sharding.way_back import assembled, make_whole, unwrap
from lightning_odc.sharding.wrapping import (
    HowToShard,
    mesh_for,
    precision_policy,
    shard_model,
    wrapping_shards,
)
from lightning_odc.strategy.setup import options
from lightning_odc.strategy.setup.attaching import AttachingStrategy
from lightning_odc.strategy.setup.groups import Groups
from lightning_odc.strategy.setup.launcher import end_interrupted_scripts, fork_launcher
from lightning_odc.strategy.setup.precision import ODCPrecision, warn_of_eps
from lightning_odc.strategy.setup.resuming import agree_with_loader, keep_place_apart, put_place_back

#: Of the process group where GPUs compute and shards are in host memory.
OFFLOADING_BACKEND = "cpu:gloo,cuda:nccl"


class ShardedStrategy(AttachingStrategy, FSDPStrategy):
    """What `ODCStrategy`, which explains the arguments, does that has nothing to do with how bytes move."""

    model: nn.Module  # Lightning sets it before it calls what uses it

    def __init__(
        self,
        *,
        precision_plugin: Precision | None,
        timeout: timedelta | None,
        sharding_strategy: str | ShardingStrategy,
        state_dict_type: Literal["full", "sharded"],
        device_mesh: tuple[int, int] | DeviceMesh | None,
        **of_fsdp: Any,
    ) -> None:
        names = ("auto_wrap_policy", "cpu_offload", "mixed_precision")
        of_shards = [name for name in names if of_fsdp[name] not in (None, False)]
        if state_dict_type == "sharded":
            of_shards.append('state_dict_type="sharded"')
        name = options.check_sharding(sharding_strategy, device_mesh, self.options.group_size, of_shards)
        self._asked = name
        if name in ("AUTO", "NO_SHARD"):
            name = "FULL_SHARD"  # until the model is there
        on_demand = nodes.ON_DEMAND.get(name, name)  # the base class takes hybrid ones only for FSDP1
        super().__init__(
            precision_plugin=None,
            timeout=timeout,
            sharding_strategy=ShardingStrategy[on_demand],
            state_dict_type=state_dict_type,
            **of_fsdp,
        )
        self.sharding_strategy = ShardingStrategy[name]
        self.device_mesh = device_mesh
        self.state_dict_type = state_dict_type
        self.timeout = timeout or DEFAULT_TIMEOUT
        self._groups = Groups(self.options, self, device_mesh, replicates=name in nodes.ON_DEMAND)
        self._reshard_after_forward = on_demand == "FULL_SHARD"
        # Of all runs in one process group: shards that a callback has kept go together with those of later runs.
        self._mesh: DeviceMesh | None = None
        self._named_mesh: DeviceMesh | None = None
        self._world: Callable[[], object] = object  # that group
        self._wrappers: set[nn.Module] = set()  # for activation checkpointing, of our own
        self.precision_plugin = precision_plugin
        self._on_teardown = ExitStack()
        self._unfilled: list[Unfilled] = []
        self._names = ParameterNames()
        self._is_training = False
        self._owes_schedulers = False  # a step that came before a checkpoint
        self._has_place = False  # the checkpoint that was read: that of a balanced loader
        self._restored = ""  # what has had its state before that checkpoint was read

    @property
    def precision_plugin(self) -> ODCPrecision:
        """What casts inputs and scales losses, from ``Trainer(precision=...)``."""
        plugin = super().precision_plugin
        if isinstance(plugin, ODCPrecision):
            return plugin
        return ODCPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, FSDPPrecision) and not isinstance(plugin, ODCPrecision):
            plugin = ODCPrecision(plugin.precision, self._device_type())
        # Into its own place: the trainer looks there for what a strategy was made with.
        cast(property, FSDPStrategy.precision_plugin).__set__(self, plugin)

    @cast(property, FSDPStrategy.checkpoint_io).getter
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes full checkpoints: a plugin of the user's, or our own instead of Lightning's."""
        plugin = super().checkpoint_io
        if type(plugin) is TorchCheckpointIO:
            plugin = WholeCheckpointIO()
            self.checkpoint_io = plugin
        elif isinstance(plugin, AsyncCheckpointIO):
            plugin.checkpoint_io = WholeCheckpointIO()
        return plugin

    @property
    def _module(self) -> LightningModule:
        """What the trainer runs now."""
        assert self.lightning_module is not None
        return self.lightning_module

    def _device_type(self) -> str:
        if self.parallel_devices:
            return self.parallel_devices[0].type
        if isinstance(self.accelerator, CUDAAccelerator):
            return "cuda"
        return "cpu"

    # -- setting up and tearing down ----------------------------------------------------------------------

    def setup_environment(self) -> None:
        if not self._full and type(self.checkpoint_io) is not WholeCheckpointIO:
            raise ValueError(
                'ODCStrategy(state_dict_type="sharded") lets every rank write its shards, and '
                f"{type(self.checkpoint_io).__name__} would not be used. Leave the plugin out, or "
                'write ODCStrategy(state_dict_type="full").'
            )
        has_gpus = self._device_type() != "cpu"
        if self.process_group_backend == "nccl" and not (has_gpus and not self.cpu_offload.offload_params):
            raise ValueError(
                'ODCStrategy(process_group_backend="nccl") cannot work with tensors in host memory, which NCCL does '
                "not know. Leave it out, or write "
                f'process_group_backend="{OFFLOADING_BACKEND if has_gpus else "gloo"}".'
            )
        if self.cpu_offload.offload_params and has_gpus and self.process_group_backend is None:
            # The norm for clipping, the loss scale and full checkpoints are sums and copies over tensors in host
            # memory, which NCCL does not know.
            _compat_lightning.set_process_group_backend(self, OFFLOADING_BACKEND)
        with self._starting(self._device_type()):
            super().setup_environment()
        module = self.lightning_module
        if module is not None:
            self._set_device_mesh(module)

    def _configure_launcher(self) -> None:
        self._launcher = fork_launcher(self)
        if self._launcher is None:
            super()._configure_launcher()

    def _set_device_mesh(self, module: LightningModule) -> None:
        """Give the module the mesh that it may ask for in ``configure_model``."""
        whole = self._groups.mesh
        if whole is None:
            if not is_overridden("configure_model", module):
                return
            mesh = self.shard_mesh
            whole = self._named_mesh
        if whole is None:
            # Modules for ``ModelParallelStrategy`` ask for these: "data_parallel" is the mesh, or under hybrid sharding
            # its last dimension, and "tensor_parallel" is one rank.
            names = ("replicate", "data_parallel", "tensor_parallel")[-mesh.ndim - 1 :]
            whole = init_device_mesh(mesh.device_type, (*mesh.shape, 1), mesh_dim_names=names)
            self._named_mesh = whole
            self._mesh = whole[names[:-1]]  # one mesh: DTensors of two do not go together
        _compat_lightning.set_device_mesh(module, whole)
        self._on_teardown.callback(_compat_lightning.set_device_mesh, module, None)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of ranks over which ``fully_shard`` shards. Pass it as ``mesh`` in ``configure_model``.

        One dimension: all ranks, or with tensor parallelism those that have the same part of the model. Two,
        ``(replicate, shard)``, where collectives shard in the hybrid way. Needs the process group.
        """
        if self._world() is not dist.group.WORLD:
            self._world = weakref.ref(dist.group.WORLD)
            self._mesh = None
            self._named_mesh = None
        if self._mesh is None:
            groups = self._groups
            layout = groups.layout()
            if groups.data_parallel is not None:
                self._mesh = groups.data_parallel
            elif layout is None or groups.on_demand:
                self._mesh = mesh_for(self.root_device.type, self.world_size)
            else:
                self._mesh = nodes.mesh_of(layout, self.root_device.type)
        return self._mesh

    @property
    def _group_of_values(self) -> dist.ProcessGroup | None:
        """The ranks that have the same part of the layers, if layers are divided. Values are reduced over them."""
        mesh = self._groups.data_parallel
        if mesh is None:
            return None
        return mesh.get_group()

    def _ordinary_tensors(self) -> AbstractContextManager[object]:
        """Leaves the user's inference mode: its tensors cannot be changed outside of it."""
        # A module that was made in inference mode has such tensors already, and needs that mode.
        tensors = parameters_and_buffers(self.model)
        return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))

    def _set_up_in_place(self, model: nn.Module) -> nn.Module:
        """Shard the model unless it is kept whole, and give values to what was made on the meta device."""
        with self._names.recorded(model):
            if not isinstance(model, FSDPModule):
                given = {*model.modules()}
                _compat_lightning.wrap_checkpointed(model, self)
                self._wrappers = {*model.modules()} - given
            if not self.is_whole:
                self._give_first_values(model)
                self._shard(model, announce=True)
                divided = None
                if self._groups.divides_layers:
                    divided = self._groups.mesh
                nodes.check_shards(model, self.shard_mesh, divided)
            self._unfilled = materialize(model, self.root_device, offload=self.cpu_offload.offload_params)
        if self.is_whole:
            model.to(self.root_device)
        return model

    def _give_first_values(self, model: nn.Module) -> None:
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            return
        if fsdp_modules(model):
            # `configure_model` has sharded these, and each rank has kept a part of its own values.
            send_values(parameters_and_buffers(model), self.root_device)
            return
        give_first_values(model, self.root_device, self._group_of_values)

    def _shard(self, model: nn.Module, announce: bool) -> None:
        policy = self.kwargs.get("auto_wrap_policy")
        shard_model(model, self.shard_mesh, wrap_policy=policy, announce=announce, **self._how_to_shard)

    def _give_back(self) -> None:
        """Let the model be what its user gave, as after DDP: whole, and without wrappers. All ranks together."""
        host = torch.device("cpu")
        if self._groups.divides_layers:
            rank_zero_info(
                "The layers of the model stay divided after this run. All ranks together read whole weights by "
                "`get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))` of "
                "`torch.distributed.checkpoint.state_dict`."
            )
            return
        if not self.is_whole:
            fits, found = self._fits(self.model, host, trains=False)
            if not fits:
                rank_zero_info(
                    f"{found} after this run, too. In a run, one rank reads whole weights by "
                    "`self.trainer.strategy.stream_parameters()`, and `with self.trainer.strategy.gathered():` keeps "
                    "units whole."
                )
                return
            with self._ordinary_tensors():
                self._make_whole(host)
        unwrap(self.model, self._wrappers)
        self._wrappers = set()

    def _make_whole(self, host: torch.device) -> None:
        parameters = make_whole(self.model)
        # Training takes more: else the states of optimizers stay sharded, for checkpoints and for another run.
        fits, _ = self._fits(self.model, host)
        for optimizer in self.optimizers:
            put_in_place(optimizer, parameters)
            if fits:
                optimizer.state.update(assembled({**optimizer.state}))
        if self.root_device != host:
            self.model.to(host)
        self._names = ParameterNames()

    def _restore_data(self, trainer: Trainer) -> None:
        """Give a data module its state before `configure_optimizers` may ask for its loaders, as under DDP."""
        self._restored = ""
        given, weights_only = _compat_lightning.asked_checkpoint()
        data: Any = getattr(trainer, "datamodule", None)
        if given is None or data is None or not is_overridden("load_state_dict", data):
            return
        path = checkpoints.location(self.broadcast(given))
        if isinstance(path, Path) and path.is_file():
            saved = checkpoints.load(path, self.model, [], True, weights_only, self.checkpoint_io)
            name = type(data).__qualname__
            if name in saved:
                data.load_state_dict(saved[name])
                self._restored = name

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        # Optimizers may have been made before the model was sharded, as in `__init__`.
        self._names.follow(self.model, self.optimizers)
        if self.precision_plugin.precision == "16-true":
            warn_of_eps(self.optimizers)
        self._is_training = False
        self._owes_schedulers = False
        self._has_place = False

    @torch.no_grad()
    def _setup_averages(self, trainer: Trainer) -> None:
        """Shard the copies of the model that averaging callbacks have made of it before."""
        # In the same way: every rank averages, swaps in and out its own shards.
        averages = [] if self.is_whole else _compat_lightning.averaged_models(trainer)
        if averages and not self._full:
            raise ValueError(
                "WeightAveraging callbacks put two models into a checkpoint, and a sharded one has room for one. Use "
                'ODCStrategy(state_dict_type="full") with them.'
            )
        values = parameters_and_buffers(self.model)
        for average in averages:
            self._shard(average, announce=False)
            materialize(average, self.root_device, offload=self.cpu_offload.offload_params)
            for copy, value in zip(parameters_and_buffers(average), values, strict=True):
                copy.copy_(value)

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        given = self.mixed_precision
        if given is not None:
            return precision_policy(given.param_dtype, given.reduce_dtype, self._groups.on_demand)
        return self.precision_plugin.policy(self._groups.on_demand)

    @property
    def _how_to_shard(self) -> HowToShard:
        return {
            "mixed_precision": self.mixed_precision_policy,
            "reshard_after_forward": self._reshard_after_forward,
            "cpu_offload": self.cpu_offload.offload_params,
        }

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        module = self.lightning_module
        with ExitStack() as shards:
            shards.enter_context(wrapping_shards(self.shard_mesh, **self._how_to_shard))
            if module is not None:  # `configure_model` may shard it
                shards.enter_context(self._names.recorded(module))
            yield

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, KeyboardInterrupt) and self.is_global_zero:
            end_interrupted_scripts(self.launcher)

    def teardown(self) -> None:
        self._on_teardown.close()
        super().teardown()
        self.checkpoint_io.teardown()  # waits for what is still being written, unlike FSDPStrategy

    # -- checkpoints --------------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return self.state_dict_type == "full"

    def lightning_module_state_dict(self) -> StateDict:
        if self.is_whole:
            return self._module.state_dict()
        with self._ordinary_tensors():
            return checkpoints.model_state(self._module, self._full)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        if self.is_whole:
            return Strategy.optimizer_state(self, optimizer)
        return checkpoints.optimizer_state(self.model, optimizer, self._full)

    def save_checkpoint(
        self, checkpoint: StateDict, filepath: str | Path, storage_options: object = None
    ) -> None:
        if storage_options is not None and not self._full:
            raise TypeError("ODCStrategy(state_dict_type='sharded') does not use `storage_options`.")
        path = checkpoints.location(self.broadcast(filepath))
        checkpoints.keep_savable(checkpoint, self._owners)
        keep_place_apart(checkpoint)
        if self._full:
            checkpoint = assembled(checkpoint)  # averages
        checkpoints.make_room(path, self._full, self.is_global_zero, self.barrier)
        failure = None
        try:
            if not self._full:
                assert isinstance(path, Path), "`make_room` has refused URLs"
                checkpoints.save_shards(checkpoint, path, self.global_rank, self.barrier)
            elif self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        except Exception as error:
            failure = error
        reason = self.broadcast(repr(failure))  # an error of rank 0 alone ends all ranks
        if failure is not None:
            raise failure
        if reason != repr(None):
            raise RuntimeError(f"Rank 0 could not write the checkpoint {path}: {reason}")

    @property
    def _owners(self) -> list[Any]:
        """Who may have hyperparameters."""
        trainer: Any = self._module.trainer
        return list(filter(None, (self._module, trainer.datamodule)))

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> StateDict:
        """Read a full or a sharded checkpoint; the model's shards, and while training all of it, are loaded at once."""
        if weights_only is None:
            weights_only = _compat_lightning.asked_weights_only(checkpoint_path)
        path = checkpoints.location(self.broadcast(checkpoint_path))
        optimizers = []
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            optimizers = self._optimizers_with_state
        strict = self._module.strict_loading
        with self._ordinary_tensors():
            rest = checkpoints.load(path, self._module, optimizers, strict, weights_only, self.checkpoint_io)
            if self._is_training:  # else Lightning does it, when hooks and callbacks have seen it
                self.load_model_state_dict(rest, strict)
                self.load_optimizer_state_dict(rest)
            rest.pop(self._restored, None)
            self._has_place = put_place_back(rest)
            self._owes_schedulers = self._has_place and agree_with_loader(rest)
            self.publish_parameters()
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # shards are loaded already
            with self._ordinary_tensors():
                checkpoints.load_model_state(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        regroup(self._module.trainer, self._module)
        for optimizer, saved in zip(
            self._optimizers_with_state, checkpoint["optimizer_states"], strict=False
        ):
            checkpoints.load_optimizer(saved, optimizer, self.model)

    @property
    def _optimizers_with_state(self) -> list[Optimizer]:
        """The optimizers, without Lightning's stand-in if ``configure_optimizers`` made none."""
        return [optimizer for optimizer in self.optimizers if optimizer.param_groups]

    def on_train_start(self) -> None:
        self._is_training = True
        trainer = self._module.trainer
        if isinstance(only(trainer.train_dataloader), BalancedDataLoader):
            _compat_lightning.load_loader_states(trainer)
        owners = self._owners
        hyperparameters = {owner.CHECKPOINT_HYPER_PARAMS_KEY: dict(owner.hparams) for owner in owners}
        left_out = checkpoints.keep_savable(hyperparameters, owners)
        if left_out:
            rank_zero_warn(
                f"Checkpoints will not hold the hyperparameters {left_out}, which cannot be pickled. Give them to "
                f"`load_from_checkpoint`, and write `self.save_hyperparameters(ignore={left_out})`."
            )
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if epochs.ready == epochs.processed:
            # A new epoch begins. A loop that has restarted at the last batch of one takes it for the middle of that one
            # (Lightning 2.5.0 to 2.6.6) and would not count the new epoch as begun: nor would its checkpoints.
            trainer.fit_loop.reset_restart_stage()

    def on_train_end(self) -> None:
        self._is_training = False
