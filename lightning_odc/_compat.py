"""Every private name of torch, Lightning and transformers that this package uses, in one place.

Tested with lightning 2.5.0 to 2.6.6 and torch 2.9.1 to 2.15.0.
``tests/test_compat.py`` fails when a name moves.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import importlib.util
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

# Typed as Any: Lightning does not export these names, which is why they are here.
_lightning_distributed: Any = importlib.import_module("lightning.fabric.utilities.distributed")
_lightning_fsdp: Any = importlib.import_module("lightning.fabric.strategies.fsdp")
_lightning_redirection: Any = importlib.import_module("lightning.pytorch.strategies.strategy")
_lightning_call: Any = importlib.import_module("lightning.pytorch.trainer.call")
_lightning_training: Any = importlib.import_module("lightning.pytorch.loops.training_epoch_loop")
_lightning_signals: Any = importlib.import_module("lightning.pytorch.trainer.connectors.signal_connector")

#: What a strategy's launcher must be, for the Trainer and for Fabric.
Launcher = _Launcher

#: What ``zero_grad(set_to_none=False)`` may call on gradients.
ZEROING = (torch.Tensor.zero_, torch._foreach_zero_)

#: Context in which functions of tensor subclasses run as of plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass

#: Calls a method of a module as if it were ``forward``: ``call_as_forward(wrapper, module, name, *args, **kwargs)``.
#: Why: ``fully_shard`` has its hooks on ``__call__``, and a strategy runs ``training_step`` and its like.
call_as_forward: Callable[..., Any] = _lightning_redirection._ForwardRedirection()

#: A mode that sees every operator, collectives too (torch 2.9 to 2.13).
#: Why: nothing public tells that a user's step calls ``torch.distributed``.
TorchDispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

METADATA_FILENAME: str = _lightning_fsdp._METADATA_FILENAME

#: How the name of the action ends under which Lightning's training loop profiles the fetching of a batch.
FETCH_ACTION = ".train_dataloader_next"

#: Whether Lightning's training loop broadcasts one number from rank 0 before every batch (2.6 does, 2.5 does not).
BROADCASTS_BEFORE_BATCHES = hasattr(_lightning_training._TrainingEpochLoop, "_broadcast_sigterm_tensor")

#: The mark that ``fully_shard`` leaves on modules (torch 2.9 to 2.13).
_MANAGED = "_is_fsdp_managed_module"


@contextmanager
def logging_as(module: LightningModule, hook: str) -> Iterator[None]:
    """Let ``module.log`` take values as if it were called from ``hook``.

    Why: the value of a minibatch is known only when it ends, inside Lightning's ``optimizer_step`` hook, where
    logging is not allowed; it belongs to ``training_step``.
    """
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def before_transfer(module: LightningModule, kind: type) -> Iterator[Callable[[Any, int], Any]]:
    """Let Lightning's loops leave out ``on_before_batch_transfer`` for batches of a kind; yields what calls the hook.

    Why: the loops (lightning 2.5.0 to 2.6.6) call the hook, of the module or of its data module, with a whole batch
    before the strategy sees it. What takes its place can be pickled, since data workers may hold the module.
    """
    held: Any = module
    call = held._on_before_batch_transfer
    held._on_before_batch_transfer = partial(_unless, kind, call)
    try:
        yield call
    finally:
        vars(module).pop("_on_before_batch_transfer", None)


def _unless(kind: type, call: Callable[..., Any], batch: Any, dataloader_idx: int = 0) -> Any:
    return batch if isinstance(batch, kind) else call(batch, dataloader_idx)


def call_and_clean_up(trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function for the trainer. If it fails, callbacks are informed and the run is torn down as in a script.

    Why: Lightning does this around the launcher, so in the process that waits and not where ranks fail.
    """
    return _lightning_call._call_and_handle_interrupt(trainer, function, *args, **kwargs)


def load_loader_states(trainer: Trainer) -> None:
    """Load the saved states of training loaders that were made before the checkpoint was read; else nothing.

    Why: ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` makes the loaders early, and Lightning
    (2.5.0 to 2.6.6) loads their states only while it makes them. The epoch would begin again.
    """
    cast(Any, trainer.fit_loop)._load_combined_loader_states()


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set what ``self.device_mesh`` is in ``configure_model``.

    Why: the property of Lightning (2.4 to 2.6.6) cannot be set; its ``ModelParallelStrategy`` writes this, too.
    """
    module._device_mesh = mesh


def deals_out(trainer: Trainer) -> bool:
    """Whether Lightning puts a ``DistributedSampler`` into loaders: ``Trainer(use_distributed_sampler=...)``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """The method that gives a module's own parameters their first values, if it has one.

    Why: most layers of torch call it ``reset_parameters``, but ``MultiheadAttention`` has it with an underscore only.
    """
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def averaged_models(callbacks: list[Any]) -> list[nn.Module]:
    """The averages that Lightning's ``WeightAveraging`` callbacks (lightning >= 2.6) hold while fitting.

    Why: the callback copies the whole model before the strategy shards it, and has no door to shard the copy.
    """
    kind = getattr(importlib.import_module("lightning.pytorch.callbacks"), "WeightAveraging", None)
    if kind is None:
        return []
    held = [callback._average_model for callback in callbacks if isinstance(callback, kind)]
    return [average.module for average in held if average is not None]


def wrap_checkpointed(module: nn.Module, strategy: FSDPStrategy) -> None:
    """Wrap the modules that Lightning's ``activation_checkpointing_policy`` selects."""
    _lightning_fsdp._setup_activation_checkpointing(module, strategy._activation_checkpointing_kwargs)


def is_policy(policy: Any) -> bool:
    """Whether this is one of torch's policy objects, which have a common class without a public name."""
    return hasattr(policy, "_run_policy")


def selected_by(policy: Any, root: nn.Module) -> list[nn.Module]:
    """The modules that one of torch's policy objects (``CustomPolicy`` and the like) selects."""
    return list(policy._run_policy(root, set(), {}))


def is_sharded_checkpoint(path: Path) -> bool:
    return bool(_lightning_fsdp._is_sharded_checkpoint(path))


def save_sharded(state: dict[str, Any], path: Path) -> None:
    """Write a ``torch.distributed.checkpoint`` directory, all ranks together."""
    _lightning_fsdp._distributed_checkpoint_save(state, path)


def checkpoint_name(name: str) -> str:
    """The name of a parameter in checkpoints: wrappers for activation checkpointing or compiling leave no trace."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's shard of a parameter or of a gradient, detached: the tensor itself, not a view of it.

    Why: ``to_local`` makes a new view of a parameter's shard in every call (torch 2.13), which takes as long as all the
    rest that a step does with a small parameter. Not kept between steps: ``fully_shard`` and ``Module.to`` replace it.
    The name is the same from torch 2.9 to 2.13.
    """
    return tensor._local_tensor


def sharded_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """This rank's shard ``local`` as a part of something sharded like ``parameter``, on any device.

    Why: ``DTensor.from_local`` takes 0.1 ms and more, for every gradient of every step, and would move a shard that
    ``cpu_offload`` keeps elsewhere to the device of the mesh. ``fully_shard`` makes its parameters in this way (torch
    2.9 to 2.13).
    """
    made: Any = DTensor
    return cast(DTensor, made(local, parameter._spec, requires_grad=False))


def comms_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """The all-gather and the reduce-scatter object of a ``fully_shard``-ed module, or ``None`` if it has several.

    Why: ``set_custom_all_gather`` replaces what is there, and there is no public way to look at it before, which one
    needs to put something around it and to put it back.
    """
    groups = _groups_of(module)
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if len(groups) == 1 else None


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12
    if groups is None:
        only = state._fsdp_param_group
        groups = [] if only is None else [only]
    return list(groups)


def forward_order(root: FSDPModule) -> list[Any]:
    """The groups of `group_of` in the order in which they ran since the last backward pass, as often as they ran.

    Why: a microbatch that runs again in parts must run every unit as often as before, and a hook of ours on every unit
    would be one more graph break under `torch.compile`. `fully_shard` keeps this list for its prefetching (torch 2.9 to
    2.13) and empties it behind a backward pass.
    """
    order: list[Any] = getattr(
        root._get_fsdp_state()._comm_ctx, "post_forward_order", []
    )  # before the first run
    return order


def group_of(module: FSDPModule) -> Any:
    """What stands for the parameter group of a ``fully_shard``-ed module in `forward_order`."""
    return _groups_of(module)[0]


def modules_grouped_with(module: FSDPModule) -> tuple[Any, ...]:
    """The modules of the group that a ``fully_shard``-ed module belongs to, as they were passed to ``fully_shard``.

    Why: the parameters of ``fully_shard([a, b])`` lie in memory in the order of that list, which nothing public shows.
    """
    return tuple(module._get_fsdp_state()._modules)


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Whether ``set_all_reduce_hook`` was called on a ``fully_shard``-ed module.

    Why: the hook would see zeros on demand, and it can be set but not asked for.
    """
    return any(group._all_reduce_hook is not None for group in _groups_of(module))


def reshards_after_forward(module: FSDPModule) -> bool | None:
    """Whether a ``fully_shard``-ed module is freed after its forward pass; ``None`` if it goes over to a smaller mesh.

    Why: ``set_reshard_after_forward`` replaces what is there, and there is no public way to look at it before.
    """
    (group, *_) = _groups_of(module)
    after = group.post_forward_mesh_info
    return None if after is not None and after != group.mesh_info else after is not None


def keeps_gradients(module: FSDPModule) -> bool:
    """Whether ``set_requires_gradient_sync(False)`` holds for a ``fully_shard``-ed module.

    Why: gradients that are still there after a backward pass are then no mistake, and it can be set but not asked for.
    """
    return not all(group.reduce_grads for group in _groups_of(module))


def gradient_hooks_of(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What ``register_post_accumulate_grad_hook`` has registered, by the key of its handle; the dict itself, if any.

    Why: ``fully_shard`` calls these hooks itself, before the gradient is complete, and nothing public lists them.
    """
    hooks: dict[int, Callable[[torch.Tensor], Any]] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def move_gradient_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let a parameter have the hooks of the one that it replaces. Handles of them stay valid.

    Why: ``fully_shard`` makes new parameters, and hooks stay behind at the old ones, where no gradient arrives.
    """
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def reduce_dtype_of(module: FSDPModule) -> torch.dtype | None:
    """The ``reduce_dtype`` that a module was sharded with.

    Why: ``fully_shard`` divides gradients before it hands them over unless this dtype (``None``: that of the gradients)
    is fp32 or bf16, and users may call ``fully_shard`` themselves.
    """
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.reduce_dtype
    return dtype


def compute_dtype_of(module: FSDPModule) -> torch.dtype | None:
    """The ``param_dtype`` that a module was sharded with; ``None`` is that of the parameters.

    Why: one process publishes no shards in the dtype that it computes in, and users may have sharded it themselves.
    """
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


@contextmanager
def generating_alone(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``generate`` of Hugging Face models end on each rank by itself, unless a caller writes ``synced_gpus=True``.

    Why: ``fully_shard`` marks the modules that it manages. transformers (5.0 to 5.23) takes the mark of the model that
    generates as the default of ``synced_gpus``: one ``all_reduce`` per token, and as many forward passes on every rank
    as the longest answer of any rank needs. On demand no rank needs them, and with uneven batches they never meet.
    """
    marked = [model for model in models if vars(model).get(_MANAGED)]
    for module in marked:
        setattr(module, _MANAGED, False)
    try:
        yield
    finally:
        for module in marked:
            setattr(module, _MANAGED, True)


def attention_of(config: Any) -> str | None:
    """The attention implementation that a configuration of Hugging Face's names: ``"sdpa"``, ``"eager"``, ...

    Why: ``attn_implementation=`` is how it is set, and nothing public reads it (transformers 4.36 to 5.23).
    """
    name = getattr(config, "_attn_implementation", None)
    return name if isinstance(name, str) else None


def symmetric_backend(device: torch.device) -> str | None:
    """What provides symmetric memory on devices of this type: ``"CUDA"`` unless other code chose otherwise.

    Why (this and the next three): torch calls ``torch.distributed._symmetric_memory`` an alpha, and there is no other
    way to map the memory of another process's GPU without compiling something. The names and arguments used here are
    the same from torch 2.9 to 2.13.
    """
    return _symmetric_memory().get_backend(device)


def symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that a group can map, straight from the driver.

    Why: the module's own ``empty`` takes them from a memory pool of torch's caching allocator in newer versions, which
    keeps them after they are freed.
    """
    memory: Any = importlib.import_module("torch._C._distributed_c10d")._SymmetricMemory
    return memory.empty_strided_p2p((size,), (1,), torch.uint8, device)


def symmetric_rendezvous(own: torch.Tensor, group: Any, patience: float) -> Any:
    """Map what every rank of ``group`` passes; the handle has ``rank``, ``world_size`` and ``get_buffer``.

    Views from ``handle.get_buffer(rank, sizes, dtype)`` do not keep the mapping alive, the handle does.

    torch holds the interpreter's lock meanwhile, and waits for the others' handles without a time limit. If a peer
    dies there, no thread of Python's can notice, and Ctrl-C does nothing. So a thread in C writes where this process is
    and ends it after ``patience`` seconds. ``faulthandler`` has one such timer: one that the user has set is gone.

    No multicast object is made meanwhile. Nothing here uses one, and on machines with NVSwitch making it is known to
    fail (pytorch#150852) and to hang (pytorch#195596). torch looks at the variable in every rendezvous.
    """
    faulthandler.dump_traceback_later(patience, exit=True, file=2)  # under Jupyter, `sys.stderr` is no file
    try:
        with _environment("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):
            return _symmetric_memory().rendezvous(own, group)
    finally:
        faulthandler.cancel_dump_traceback_later()


def profiler_is_running() -> bool:
    """Whether a ``torch.profiler`` records in this process.

    Why: a second one raises only after it has prepared the device for itself, which may spoil what the first one
    records, and torch has no public name to ask before (torch 2.9 to 2.13).
    """
    return bool(torch.autograd.profiler._is_profiler_enabled)


def cuda_driver_version() -> str:
    """Which CUDA the installed driver knows, as in ``12.8``.

    Why: the message for a driver that is too old has to say which one it is.
    """
    number = int(torch._C._cuda_getDriverVersion()) if hasattr(torch._C, "_cuda_getDriverVersion") else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def _symmetric_memory() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A context in which a variable of the environment has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def set_process_group_backend(strategy: Any, backend: str) -> None:
    """Let one of Lightning's strategies (2.5.0 to 2.6.6) start its process group with this backend.

    Why: ``process_group_backend`` is an argument of the constructor, and which devices the strategy gets is known
    later. Lightning destroys groups of NCCL when the program ends, and knows them by the name ``"nccl"`` alone.
    """
    strategy._process_group_backend = backend
    if "nccl" in backend:
        atexit.register(_lightning_distributed._destroy_dist_connection)


def wrapped_sampler(sampler: Any) -> Any | None:
    """The user's own sampler inside the distributed one that Lightning has put around it.

    Why: an error must name what the user wrote.
    """
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def other_strategy_registry() -> Any | None:
    """The registry of the separate ``pytorch_lightning`` package, if that is installed.

    Why: ``pytorch_lightning.Trainer`` looks names up in a registry of its own, so ``"odc"`` must be there to explain
    itself. Importing the package after ``lightning`` costs less than 0.1 s.
    """
    if importlib.util.find_spec("pytorch_lightning") is None:
        return None
    log = rank_zero.log  # the import would turn it to its own logger in the whole process
    try:
        from pytorch_lightning.strategies import StrategyRegistry
    except Exception:
        return None  # a broken or foreign installation is none of our business
    finally:
        rank_zero.log = log
    return StrategyRegistry


def concatenated_states(metric: Metric) -> list[str]:
    """The states of a metric that are concatenated over ranks: lists, until they are."""
    return [name for name, reduction in metric._reductions.items() if reduction is dim_zero_cat]


def count_batch_once(trainer: Trainer) -> None:
    """Let values that hooks log about the current batch weigh 1, unless they say ``batch_size=``.

    Why: Lightning would look for the first tensor in the batch, and an empty `Minibatch` has none.
    """
    results: Any = trainer._results
    if results is not None:
        results.batch_size = 1


@contextmanager
def before_epoch_values(trainer: Trainer, act: Callable[[Any], None]) -> Iterator[None]:
    """Call ``act`` with the results of the current evaluation after its last batch, on every rank.

    Why: Lightning computes the epoch's values loader by loader, and name by name as this rank logged them, each by a
    collective. There is no hook before that. In this context it computes all of them together, after ``act``.
    """
    loop: Any = trainer._evaluation_loop
    connector: Any = trainer._logger_connector

    def on_run_end() -> Any:
        connector.epoch_end_reached()
        act(loop._results)
        is_several = loop._is_sequential and loop.num_dataloaders > 1
        for index in range(loop.num_dataloaders) if is_several else [None]:
            loop._results.dataloader_idx = index
            loop._logged_outputs.append(connector.update_eval_epoch_metrics())
        return type(loop).on_run_end(loop)

    loop._store_dataloader_outputs = lambda: None
    loop.on_run_end = on_run_end
    try:
        yield
    finally:
        del loop._store_dataloader_outputs, loop.on_run_end


def set_computed(item: Any, value: Any) -> None:
    """Make ``value`` what an item of Lightning's results has computed.

    Why: Lightning keeps a computed value until the next update or reset, and does not synchronise it again.
    """
    item._computed = value


def handlers_of_lightning() -> dict[int, Callable[[int, Any], Any]]:
    """The handlers that a running trainer has set, by signal.

    Why: they call collectives wherever the signal finds a rank. Handlers of the user's own are not to be touched, and
    nothing public tells them apart.
    """
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    ours = _lightning_signals._HandlersCompose
    return {number: handler for number, handler in found.items() if isinstance(handler, ours)}
