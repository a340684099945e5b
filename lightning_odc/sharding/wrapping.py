"""Which modules become units, and turning them into units with ``fully_shard``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, TypedDict, Unpack

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap

from lightning_odc import _compat
from lightning_odc.arguments import Like
from lightning_odc.engine.advice import lost_hook
from lightning_odc.engine.units import class_names, fsdp_modules
from lightning_odc.engine.values import give_first_values
from lightning_odc.engine.whole_gradients import scalars_of
from lightning_odc.sharding.stepping import take_parts
from lightning_odc.sharding.way_back import replaced

#: Which modules: their classes, a callable ``(module, recurse, nonwrapped_numel) -> bool``, or one of torch's objects.
#: (Spelt out, since LightningCLI reads from it what a YAML file may say.)
WrapPolicy = Annotated[
    set[type[nn.Module]] | Callable[[nn.Module, bool, int], bool] | ModuleWrapPolicy | CustomPolicy,
    Like("{Block} (a set of classes), a function, ModuleWrapPolicy({Block})"),
]

#: Modules that hold parameters for the module around them, and are never called.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class HowToShard(TypedDict, total=False):
    """How units are sharded."""

    mixed_precision: MixedPrecisionPolicy | None
    reshard_after_forward: bool
    cpu_offload: bool


class _UnitOptions(TypedDict):
    """The arguments of ``fully_shard``."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | None


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    wrap_policy: WrapPolicy | None = None,
    announce: bool = False,
    **how: Unpack[HowToShard],
) -> None:
    """Shard a model in place: every selected module becomes a unit, the rest of the model the root unit."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(
                f"{name or 'The model'} is wrapped in FullyShardedDataParallel, but ODCStrategy shards with "
                "`fully_shard`. In `configure_model`, write `torch.distributed.fsdp.fully_shard(self.block)` instead "
                "of `self.block = FullyShardedDataParallel(self.block)`, or leave the sharding to "
                "`ODCStrategy(auto_wrap_policy={Block})`."
            )
    for name, parameter in model.named_parameters():
        if _compat.tensor_hooks_of(parameter):
            raise lost_hook(name)
    options = _options(mesh, how)
    # Where modules are sharded, the user has chosen the units.
    if not fsdp_modules(model):
        targets = [module for module in wrap_targets(model, wrap_policy) if module is not model]
        if announce:
            _announce(wrap_policy, targets)
        units = with_dtype_units(model, targets)
        _refuse_ties(model, units)
        for module in units:
            _shard_unit(module, options)
    if not isinstance(model, FSDPModule):
        if options["reshard_after_forward"]:
            # None lets fully_shard keep the root's parameters between forward and backward, where they are needed at
            # once.
            options["reshard_after_forward"] = None
        _shard_unit(model, options)
    take_parts(model)


def wrapping_shards(mesh: DeviceMesh, **how: Unpack[HowToShard]) -> AbstractContextManager[None]:
    """A context in which ``wrap(layer)`` of ``torch.distributed.fsdp.wrap`` makes a unit of the layer, in place."""
    # Models that were written for FSDP1 call it in ``configure_model``.
    options = _options(mesh, how)

    def shard(module: nn.Module) -> nn.Module:
        if not isinstance(module, FSDPModule):
            give_first_values(module, torch.device(mesh.device_type))
            _shard_unit(module, options)
        return module

    return enable_wrap(wrapper_cls=shard)


def _options(mesh: DeviceMesh, how: HowToShard) -> _UnitOptions:
    precision = how.get("mixed_precision") or MixedPrecisionPolicy()
    offloading = OffloadPolicy()
    if how.get("cpu_offload"):
        # Shards that are on the CPU anyway need no pinned memory, which takes a GPU's driver.
        offloading = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    return {
        "mesh": mesh,
        "mp_policy": precision,
        "offload_policy": offloading,
        "reshard_after_forward": how.get("reshard_after_forward", True),
    }


def _shard_unit(module: nn.Module, options: _UnitOptions) -> None:
    """Shard a module of which inner units are sharded already."""
    if any(dtype.is_complex for dtype in _elements(module)):
        # There are no complex numbers of 16 bits: fully_shard would drop the imaginary part of weights or gradients.
        options = {**options, "mp_policy": MixedPrecisionPolicy()}
    # Every rank has those without a dimension whole, and empty ones have nothing to shard.
    ignored = {*scalars_of(module), *(p for p in module.parameters() if not p.numel())}
    for parameter in ignored:
        if not parameter.is_meta:  # else it gets its memory there
            parameter.data = parameter.data.to(options["mesh"].device_type)
    before = dict(module.named_parameters())
    fully_shard(module, **options, ignored_params=ignored)
    for name, parameter in module.named_parameters():
        if parameter is not before[name]:
            replaced(before[name], parameter)


def wrap_targets(model: nn.Module, policy: WrapPolicy | None = None) -> list[nn.Module]:
    """The modules that become units of their own, innermost first."""
    if isinstance(policy, set):
        policy = ModuleWrapPolicy(policy)  # the Trainer's strategy has done it
    if policy is None:
        targets = repeated_blocks(model)
    else:
        targets = _compat.selected_by(policy, model)
    # Of activation checkpointing the wrapper is the unit, not the module inside it, so that recomputation is inside.
    outer: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, _compat.CheckpointWrapper):
            outer |= dict.fromkeys(module.children(), module)
    return [outer.get(module, module) for module in _innermost_first(model, {*targets})]


def _innermost_first(model: nn.Module, chosen: Container[nn.Module]) -> list[nn.Module]:
    modules = [module for module in model.modules() if module in chosen]
    modules.reverse()
    return modules


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks: elements of a ``ModuleList`` or ``Sequential`` of which two or more are alike."""
    # That is where the layers of transformer-like models are. A block has submodules: a ``Linear`` in a head is none.
    blocks = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            elements = list(_elements_of(module))
            alike = Counter(type(element) for element in elements)
            repeated = [element for element in elements if alike[type(element)] > 1]
            # A block has submodules, and parameters somewhere in it.
            found = [one for one in repeated if len([*one.children()]) and len([*one.parameters()])]
            if found:
                blocks.extend(found)
                return
        for child in module.children():
            visit(child)

    visit(model)
    return blocks


def _elements_of(module: Iterable[nn.Module | None]) -> Iterator[nn.Module]:
    for element in module:
        if isinstance(element, nn.ModuleList):  # it has no `forward`, so it is no unit
            yield from _elements_of(element)
        elif element is not None:
            yield element


def _announce(policy: WrapPolicy | None, chosen: list[nn.Module]) -> None:
    """Say what the default policy has chosen, and that the user's has chosen nothing."""
    if policy is None and chosen:
        kinds = Counter(type(module).__name__ for module in chosen)
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        rank_zero_info(
            f"ODCStrategy shards these modules one by one ({listed}) and the rest as one unit. To choose otherwise, "
            f"name the classes: ODCStrategy(auto_wrap_policy={class_names(chosen)})."
        )
    elif policy is None:
        rank_zero_info(
            "ODCStrategy found no repeated blocks: the whole model is one unit, which every rank reads at once. To "
            "read it layer by layer, name their classes: ODCStrategy(auto_wrap_policy={nn.Linear})."
        )
    elif not chosen:
        rank_zero_warn(
            f"auto_wrap_policy={policy!r} selects no module, so the whole model is one unit, which every rank reads at "
            "once. Name classes that the model has, or leave the policy out: then its repeated blocks become units."
        )


def mesh_for(device_type: str, world_size: int) -> DeviceMesh:
    """The 1-D mesh over all ranks, which is told of what one rank cannot do alone."""
    # A job of GPUs that chose gloo means it, as ranks that share one GPU do, which NCCL refuses. Torch before 2.12
    # would make a group of NCCL for the mesh.
    names = ("shard",)
    if device_type == "cuda" and dist.is_initialized() and "cuda:gloo" in dist.get_backend_config():
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=names)
    else:
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=names)
    if world_size > 1:
        mesh.__class__ = _compat.WatchedMesh
    return mesh


def precision_policy(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, on_demand: bool
) -> MixedPrecisionPolicy:
    """The ``fully_shard`` precision policy of a pair of dtypes."""
    # On demand, gradients travel in the dtype they were computed in and are added to wider accumulators, so a wider
    # ``reduce_dtype`` would only copy the same values in more bytes. (``None`` means that dtype up to torch 2.14, and
    # that of the parameters from 2.15 on.)
    if on_demand:
        reduce_dtype = param_dtype
    return MixedPrecisionPolicy(param_dtype, reduce_dtype)


def with_dtype_units(model: nn.Module, targets: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules to shard, innermost first, so that the trainable parameters of a unit have one dtype."""
    # ``fully_shard`` reduces the gradients of a unit in one buffer, so it takes no others. Modules whose own parameters
    # differ in dtype from the rest of their unit (complex layers between real ones) become units of their own.
    chosen = {*targets}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, dtype: torch.dtype | None) -> None:
        if module in seen:
            return
        seen.add(module)
        own_dtype = next((parameter.dtype for parameter in _own_parameters(module)), None)
        if module in chosen or module is model:
            elements = _elements(module, chosen)
            dtype = own_dtype
            if dtype is None and elements:
                [(dtype, _)] = elements.most_common(1)
        elif own_dtype is not None and own_dtype != dtype:
            chosen.add(module)
            dtype = own_dtype
        for child in module.children():
            visit(child, dtype)

    visit(model, None)
    return _innermost_first(model, chosen)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """What this module is to have gathered before its ``forward``, and whose gradients ``fully_shard`` reduces."""
    if isinstance(module, _CONTAINERS):
        return  # never called: its parameters belong to the module that holds it
    held = [*module.parameters(recurse=False)]
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            held += child.parameters()
    for parameter in held:
        if parameter.requires_grad and parameter.dim() > 0:
            yield parameter


def _elements(unit: nn.Module, others: Container[nn.Module] = ()) -> Counter[torch.dtype]:
    """How many trainable elements of each dtype a unit has, without the units inside of it, sharded or ``others``."""
    elements: Counter[torch.dtype] = Counter()

    def visit(module: nn.Module) -> None:
        for parameter in _own_parameters(module):
            elements[parameter.dtype] += parameter.numel()
        for child in module.children():
            if child not in others and not isinstance(child, FSDPModule):
                visit(child)

    visit(unit)
    return elements


def _refuse_ties(model: nn.Module, targets: list[nn.Module]) -> None:
    """A parameter shared by modules of two units would be gathered for one and missing in the other."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}  # the unit and the name with which it was found

    def visit(module: nn.Module, unit: nn.Module, prefix: str) -> None:
        if module in targets:
            unit = module
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.dim():
                continue  # every rank has it whole
            first_unit, first_name = first.setdefault(parameter, (unit, name))
            if first_unit is not unit:
                raise ValueError(
                    f"{first_name!r} and {name!r} are one tied parameter in two units. Keep both modules out of units "
                    "of their own, so that they share the root unit: leave them out of `auto_wrap_policy`. Where you "
                    "have named none, write ODCStrategy(auto_wrap_policy=set()): the whole model is one unit then."
                )
        for name, child in module.named_children():
            visit(child, unit, f"{prefix}.{name}".removeprefix("."))

    visit(model, model, "")


def refuse_layers(model: nn.Module, sync_batchnorm: bool) -> None:
    """Refuse layers that are known to wait for all ranks, or to change parameters, in their forward pass."""
    where = ""
    if sync_batchnorm:
        where = "Trainer(sync_batchnorm=True)"
    synchronised = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronised:
        where = f"{synchronised[0]!r} is a SyncBatchNorm"
    if where:
        raise ValueError(
            f"{where}: it waits for all ranks in every forward pass, and on demand ranks may run different numbers of "
            "them, at different times. Use layers that do not (LayerNorm, GroupNorm, or BatchNorm with each rank's own "
            'statistics), or ODCStrategy(communication="collective") and the same number of microbatches on every '
            "rank."
        )
    for name, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if kind == "peft.tuners.adalora.model.AdaLoraModel":
            raise ValueError(
                f"{name!r} is AdaLoRA: outside `forward` of their units it computes with whole adapters, but each rank "
                "has only shards there. Use `peft.LoraConfig(...)` instead of `peft.AdaLoraConfig(...)`."
            )
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            raise ValueError(
                f"{name!r} has sparse=True, but gradients of shards are dense. Leave it out, and use SGD or AdamW "
                "instead of SparseAdam."
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={module.max_norm:g}: it scales its weights inside `forward`, where they are "
                "only gathered, so that the change would be lost. Leave `max_norm` out and scale the weights in "
                "`on_train_batch_end`, followed by `self.trainer.strategy.publish_parameters()`; or scale the output."
            )
