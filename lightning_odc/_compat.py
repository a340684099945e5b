"""Every private name of torch and transformers that this package uses, in one place.

Tested with torch 2.9.1 to 2.15.0.
A test fails when a name moves: in ``tests/test_compat.py``, or of the feature that needs it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import _sample_dirichlet as sample_dirichlet
from torch import _standard_gamma as standard_gamma
from torch import nn
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._symmetric_memory import get_backend as symmetric_backend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _resolve_process_group as group_named  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import _recursive_wrap
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Why these are imported, all with the same names from torch 2.9 to 2.13:
# - ``TorchDispatchMode`` sees every operator, collectives too. Nothing public tells that a user's step calls
#   ``torch.distributed``.
# - ``default_store`` returns the store by which the ranks of the process group have found each other. It lives as long
#   as the group, and needs none of the connections of that.
# - ``group_named`` returns the process group that has a name. Functional collectives have the name alone.
# - ``standard_gamma`` and ``sample_dirichlet`` are what ``torch.distributions`` draws Gamma, Beta and Dirichlet numbers
#   with.
# - ``symmetric_backend`` tells what provides symmetric memory on devices of a type: ``"CUDA"`` unless other code chose
#   otherwise. torch calls ``torch.distributed._symmetric_memory`` an alpha, and there is no other way to map the memory
#   of another process's GPU without compiling something.

#: torch 2.13 renamed these two collectives, which are public, and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

#: Context in which functions of tensor subclasses run as of plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass

#: What ``zero_grad(set_to_none=False)`` may call on gradients.
ZEROING = (torch.Tensor.zero_, torch._foreach_zero_)


def written_by(operator: Any, arguments: Sequence[Any]) -> list[Any]:
    """The arguments that an operator writes to; of one of a higher order, such as flex attention, none."""
    # Why: the schema, which says it, has no public name (torch 2.9 to 2.13).
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return []
    named = zip(schema.arguments, arguments, strict=False)
    return [value for argument, value in named if argument.is_write]


def collectives_so_far() -> int:
    """How many collectives this rank has called in the group of all ranks."""
    # Why: a `TorchDispatchMode`, which hears them, too, does not go with compiled modules (torch 2.9 to 2.13).
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


#: Module and name of the function with which torch pickles a ``torch.layout``: in the index of a sharded checkpoint.
LAYOUT_READER = ("torch.serialization", "_get_layout")
#: The module in which ``fully_shard`` casts what a unit gets and returns (torch 2.9 to 2.13).
CASTS_INPUTS = "torch.distributed.fsdp._fully_shard._fsdp_common"
#: The mark that ``fully_shard`` leaves on modules (torch 2.9 to 2.13).
_MANAGED = "_is_fsdp_managed_module"
#: All of them.
_MARKS = (_MANAGED, "_fsdp_use_orig_params")
#: Why a sharded parameter is in no file of the user's own.
ONE_SHARD = """A file of one rank would hold its shards of the parameters (DTensor) and not those of the others. Write
    state = self.trainer.strategy.lightning_module_state_dict()  # on all ranks: rank 0 gets it whole
    if self.trainer.is_global_zero:
        torch.save(state, path)"""
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def keep_name(module: nn.Module) -> None:
    """Let a module tell its name as before, when ``fully_shard`` has renamed its class (torch 2.9 to 2.13)."""
    vars(module)["_get_name"] = partial(str, module._get_name())


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """The method that gives a module's own parameters their first values, if it has one."""
    # Why: most layers of torch call it ``reset_parameters``, but ``MultiheadAttention`` has it with an underscore only.
    public = getattr(module, "reset_parameters", None)
    return public or getattr(module, "_reset_parameters", None)


def selected_by(policy: Any, root: nn.Module) -> list[nn.Module]:
    """The modules that a wrapping policy of FSDP selects: a callable, or an object (``CustomPolicy`` and the like)."""
    if not callable(policy):
        return list(policy._run_policy(root, set(), {}))
    chosen: dict[nn.Module, nn.Module] = {}

    def asked(nonwrapped_numel: int, **about: Any) -> bool:
        # No parameter is left for a list of units, which cannot be one itself.
        return nonwrapped_numel > 0 and policy(nonwrapped_numel=nonwrapped_numel, **about)

    # It puts what the third argument returns in the place of a module (torch 2.9 to 2.13).
    _recursive_wrap(root, asked, lambda module: chosen.setdefault(module, module), set(), set())
    return list(chosen)


def checkpoint_name(name: str) -> str:
    """The name of a parameter in checkpoints: wrappers for activation checkpointing or compiling leave no trace."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's shard of a parameter or of a gradient, detached: the tensor itself, not a view of it."""
    # Why: ``to_local`` makes a new view of a parameter's shard in every call (torch 2.13), which takes as long as all
    # the rest that a step does with a small parameter. Not kept between steps: ``fully_shard`` and ``Module.to``
    # replace it. The name is the same from torch 2.9 to 2.13.
    return tensor._local_tensor


def sharded_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """This rank's shard ``local`` as a part of something sharded like ``parameter``, on any device."""
    # Why: ``DTensor.from_local`` takes 0.1 ms and more, for every gradient of every step, and would move a shard that
    # ``cpu_offload`` keeps elsewhere to the device of the mesh. ``fully_shard`` makes its parameters in this way (torch
    # 2.9 to 2.13).
    made: Any = DTensor
    return cast(DTensor, made(local, parameter._spec, requires_grad=False))


class WatchedMesh(DeviceMesh):
    """A mesh of one dimension that calls ``before_collective`` before any over its shards, which cannot be pickled."""

    # Why: nothing public tells of a collective of ``DTensor`` before it begins. Each asks the mesh for the names of its
    # groups (torch 2.9 to 2.13). ``DTensor`` keeps what it has found out of an operation for equal meshes, so unequal
    # ones would cost every fit 0.1 s and more. Its results have the first of them, so all share what they call: the
    # last entry that can meet, of the engine that has met last. Peers may never come to a meeting of another. A plain
    # mesh calls nothing, and is never equal.
    # By attached engines; each returns whether it could meet.
    before_collective: ClassVar[dict[Callable[[], bool], None]] = {}
    __hash__ = DeviceMesh.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedMesh) and super().__eq__(other)

    @property
    def _dim_group_names(self) -> Any:  # type: ignore[override]  # torch writes it into the object
        any(meet() for meet in reversed([*self.before_collective]))
        return vars(self)["_dim_group_names"]

    def get_group(self, mesh_dim: Any = None) -> Any:
        return group_named(vars(self)["_dim_group_names"][0])

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError(ONE_SHARD)


def comms_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """The all-gather and the reduce-scatter object of a ``fully_shard``-ed module, or ``None`` if it has several."""
    # Why: ``set_custom_all_gather`` replaces what is there, and there is no public way to look at it before, which one
    # needs to put something around it and to put it back.
    groups = _groups_of(module)
    if len(groups) != 1:
        return None
    return groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12
    if groups is not None:
        return list(groups)
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def forward_order(root: FSDPModule) -> list[Any]:
    """The groups of `group_of` in the order in which they ran since the last backward pass, as often as they ran."""
    # Why: a microbatch that runs again in parts must run every unit as often as before, and a hook of ours on every
    # unit would be one more graph break under `torch.compile`. `fully_shard` keeps this list for its prefetching (torch
    # 2.9 to 2.13) and empties it behind a backward pass.
    context = root._get_fsdp_state()._comm_ctx
    order: list[Any] = getattr(context, "post_forward_order", [])  # it has none before the first run
    return order


def group_of(module: FSDPModule) -> Any:
    """What stands for the parameter group of a ``fully_shard``-ed module in `forward_order`."""
    return _groups_of(module)[0]


def is_sharded_within_mesh(module: FSDPModule) -> bool:
    """Whether ``fully_shard(dp_mesh_dims=...)`` of torch 2.13 shards over one dimension of a larger mesh.

    Why: what is gathered then looks as if it were sharded, and nothing public tells.
    """
    return any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in _groups_of(module))


def modules_grouped_with(module: FSDPModule) -> tuple[Any, ...]:
    """The modules of the group that a ``fully_shard``-ed module belongs to, as they were passed to ``fully_shard``."""
    # Why: the parameters of ``fully_shard([a, b])`` lie in memory in the order of that list, which nothing public
    # shows.
    return tuple(module._get_fsdp_state()._modules)


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Whether ``set_all_reduce_hook`` was called on a ``fully_shard``-ed module."""
    # Why: the hook would see zeros on demand, and it can be set but not asked for.
    return any(group._all_reduce_hook is not None for group in _groups_of(module))


def reshards_after_forward(module: FSDPModule) -> bool | None:
    """Whether a module is freed after its forward pass; ``None`` if it goes over to a smaller mesh."""
    # Why: ``set_reshard_after_forward`` replaces what is there, and there is no public way to look at it before.
    (group, *_) = _groups_of(module)
    after = group.post_forward_mesh_info
    if after is None:
        return False
    if after != group.mesh_info:
        return None
    return True


def before_backward(module: FSDPModule) -> None:
    """What ``fully_shard`` does when a backward pass reaches an output of a module."""
    # Why: it hangs it on the outputs themselves, and autograd loses it from a view that is changed in place. Torch 2.13
    # warns of that. Calling it twice does no harm (torch 2.9 to 2.13).
    module._get_fsdp_state()._pre_backward(torch.empty(0))


def keeps_gradients(module: FSDPModule) -> bool:
    """Whether ``set_requires_gradient_sync(False)`` holds for a ``fully_shard``-ed module."""
    # Why: gradients that are still there after a backward pass are then no mistake, and it can be set but not asked
    # for.
    return not all(group.reduce_grads for group in _groups_of(module))


def parameters_held_by(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by attribute; the dict itself, in which they are replaced.

    Why: the engine looks at every parameter several times per microbatch, and ``getattr`` of a module is slow.
    """
    return cast(dict[str, nn.Parameter], module._parameters)


def gradient_hooks_of(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What ``register_post_accumulate_grad_hook`` has registered, by the key of its handle; the dict itself, if any."""
    # Why: ``fully_shard`` calls these hooks itself, before the gradient is complete, and nothing public lists them.
    return parameter._post_accumulate_grad_hooks or {}


def tensor_hooks_of(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What ``register_hook`` has registered, as `gradient_hooks_of`."""
    # Why: a hook that cuts a gradient off must see that of the whole minibatch (torch 2.9 to 2.13).
    return parameter._backward_hooks or {}


def with_gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the parameters that have such hooks. Why: most have none, and all are looked at in every microbatch."""
    return [parameter for parameter in parameters if parameter._post_accumulate_grad_hooks]


def take_over(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let a parameter have the hooks and attributes of the one that it replaces. Handles of hooks stay valid."""
    # Why: ``fully_shard`` makes new parameters, and hooks stay behind at the old ones, where no gradient arrives.
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks
    attributes = vars(target)
    attributes |= {name: value for name, value in vars(source).items() if name != "_is_param"}
    attributes.pop("_fsdp_orig_uid", None)


def take_off_shards(module: FSDPModule) -> None:
    """Take ``fully_shard`` off a module of which the parameters were replaced by whole ones."""
    # Why: torch has no way back. It has put there hooks, entries in two dictionaries of the module and one of torch's,
    # marks, and a class (torch 2.9 to 2.13).
    state = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in _groups_of(module):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    held: Any = module
    shards: Any = fully_shard
    for key, entry in ((STATE_KEY, shards.__wrapped__), (REGISTRY_KEY, shards.__name__)):
        entries = vars(held)[key]
        del entries[entry]
        if not entries:
            del vars(held)[key]
    _module_state_mapping.pop(held, None)
    for part in held.modules():
        for mark in _MARKS:
            vars(part).pop(mark, None)
    _, held.__class__ = type(held).__bases__


def precision_of(module: FSDPModule) -> MixedPrecisionPolicy:
    """The precision that a module was sharded with; a dtype of ``None`` is that of parameters and of gradients."""
    # Why: ``fully_shard`` divides gradients before it hands them over unless its ``reduce_dtype`` is fp32 or bf16, and
    # one process publishes no shards in the dtype that it computes in. Users may have sharded a module themselves.
    policy: MixedPrecisionPolicy = module._get_fsdp_state()._mp_policy
    return policy


def set_precision(module: FSDPModule, policy: MixedPrecisionPolicy) -> None:
    """Let a module compute and reduce in other dtypes than it was sharded with."""
    # Why: which engine can run shows on the sharded model, and under collectives gradients are summed in fp32. Nothing
    # public changes a policy later (torch 2.9 to 2.13).
    module._get_fsdp_state()._mp_policy = policy
    for group in _groups_of(module):
        group.mp_policy = policy
        group._init_mp_dtypes()


@contextmanager
def generating_alone(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``generate`` of Hugging Face models end on each rank by itself, unless ``synced_gpus=True`` is written."""
    # Why: ``fully_shard`` marks the modules that it manages. transformers (5.0 to 5.23) takes the mark of the model
    # that generates as the default of ``synced_gpus``: one ``all_reduce`` per token, and as many forward passes on
    # every rank as the longest answer of any rank needs. On demand no rank needs them, and with uneven batches they
    # never meet.
    marked = [model for model in models if vars(model).get(_MANAGED)]
    for module in marked:
        setattr(module, _MANAGED, False)
    try:
        yield
    finally:
        for module in marked:
            setattr(module, _MANAGED, True)


#: Logs that a function has as many graphs as it may have, with the name of the option (torch 2.9 to 2.13).
COMPILER_LOGGER = "torch._dynamo.convert_frame"


@contextmanager
def compiled_for_all_shapes() -> Iterator[None]:
    """A context that compiles for all sizes at once, as ``dynamic=True`` does, and warns at torch's limit."""
    # Why: microbatches differ in rows and in tokens. torch makes dimensions dynamic one by one, with a graph for each
    # step on the way, and reaches its limit. `torch.compiler.config` has this option in newer versions only, and
    # nothing public tells of the limit (torch 2.9 to 2.13). Lightning has imported the compiler, which takes a second.
    from torch import _dynamo as dynamo

    def watch(record: logging.LogRecord) -> bool:
        if "recompile_limit" in record.getMessage():
            limit = dynamo.config.recompile_limit
            warnings.warn(
                f"torch has compiled a function {limit} times, which is its limit: other kinds of microbatches run "
                "uncompiled from now on. For fewer kinds, write `model.config.use_cache = False` and pad with "
                f"`pad_to_multiple_of=8`. Or raise the limit: `torch._dynamo.config.recompile_limit = {4 * limit}`.",
                stacklevel=2,
            )
        return True

    logger = logging.getLogger(COMPILER_LOGGER)
    logger.addFilter(watch)
    try:
        with dynamo.config.patch(assume_static_by_default=False):
            yield
    finally:
        logger.removeFilter(watch)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` has made, or ``compile()`` was called on it (torch 2.9 to 2.13)."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def attention_of(config: Any) -> str | None:
    """The attention implementation that a configuration of Hugging Face's names: ``"sdpa"``, ``"eager"``, ..."""
    # Why: ``attn_implementation=`` is how it is set, and nothing public reads it (transformers 4.36 to 5.23).
    name = getattr(config, "_attn_implementation", None)
    if not isinstance(name, str):
        return None
    return name


def tokens_counted_by(trainer: Any) -> int | None:
    """The tokens of all microbatches so far, as a trainer of TRL counts them on this rank; others do not count."""
    # Why: nothing public holds the count that TRL logs as ``num_tokens`` (trl 1.16).
    count: int | None = getattr(trainer, "_total_train_tokens", None)
    return count


def let_count_tokens(trainer: Any, count: int) -> None:
    """Let a trainer of TRL go on from a count, which it logs."""
    trainer._total_train_tokens = count
    trainer._metrics["train"]["num_tokens"] = [count]


def symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that a group can map, straight from the driver."""
    # Why: the module's own ``empty`` takes them from a memory pool of torch's caching allocator in newer versions,
    # which keeps them after they are freed.
    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


def symmetric_rendezvous(own: torch.Tensor, group: Any, patience: float) -> Any:
    """Map what every rank of ``group`` passes; the handle has ``rank``, ``world_size`` and ``get_buffer``."""
    # Views from ``handle.get_buffer(rank, sizes, dtype)`` do not keep the mapping alive, the handle does. torch holds
    # the interpreter's lock meanwhile, and waits for the others' handles without a time limit. If a peer dies there, no
    # thread of Python's can notice, and Ctrl-C does nothing. So a thread in C writes where this process is and ends it
    # after ``patience`` seconds. ``faulthandler`` has one such timer: one that the user has set is gone. No multicast
    # object is made meanwhile. Nothing here uses one, and on machines with NVSwitch making it is known to fail
    # (pytorch#150852) and to hang (pytorch#195596). torch looks at the variable in every rendezvous.
    faulthandler.dump_traceback_later(patience, exit=True, file=2)  # under Jupyter, `sys.stderr` is no file
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        return _symmetric_memory.rendezvous(own, group)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def profiler_is_running() -> bool:
    """Whether a ``torch.profiler`` records in this process."""
    # Why: a second one raises only after it has prepared the device for itself, which may spoil what the first one
    # records, and torch has no public name to ask before (torch 2.9 to 2.13).
    return bool(torch.autograd.profiler._is_profiler_enabled)


def wrapped_sampler(sampler: Any) -> Any | None:
    """The user's own sampler inside the distributed one that Lightning has put around it."""
    # Why: an error must name what the user wrote.
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def set_computed(item: Any, value: Any) -> None:
    """Make ``value`` what an item of Lightning's results has computed."""
    # Why: Lightning keeps a computed value until the next update or reset, and does not synchronise it again.
    item._computed = value


def computed_by(metric: Any) -> Any:
    """What a torchmetrics object has computed, and would return again; ``None`` after an update."""
    # Why: a value that a user logs is known by being this object.
    return metric._computed


def set_forward_cache(metric: Any, value: Any) -> None:
    """Make ``value`` what a torchmetrics object has returned last for a batch."""
    # Why: Lightning logs it as the value of the step.
    metric._forward_cache = value
