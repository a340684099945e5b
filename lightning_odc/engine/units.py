"""The units of a model that was sharded with ``fully_shard``, and how their parameters lie in memory.

Note [How a unit lies in memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` hands the comm objects flat buffers. A rank's part of the all-gather buffer is its shards of all
parameters of the unit in a row, in post-order of the module tree (for ``fully_shard([a, b])`` first ``a``, then ``b``),
each padded on its sharded dimension to ``ceil(n / world_size)`` and cast to the compute dtype (to bytes if these
differ). `comm.probe` compares that with what ``fully_shard`` really passes. The reduce-scatter buffer has one such row
per owner, of the parameters alone that received a gradient since the last reduce-scatter, which hooks note.

Two ranks, a weight ``w`` of shape ``[3, 2]`` and a bias ``b`` of shape ``[3]``: each rank has 2 rows, rank 1 one of
padding, so ``shard_numel`` is 4 + 2::

    part of rank 0    w00 w01 w10 w11   b0 b1      offsets 0 (w) and 4 (b)
    part of rank 1    w20 w21  0   0    b2  0

The all-gather buffer is both parts in a row, 12 numbers. Row ``r`` of the reduce-scatter buffer is added to the
accumulator of rank ``r``: as ``Segment(target=0, source=0, numel=6)`` if the backward pass reached both parameters, and
as ``Segment(target=4, source=0, numel=2)`` if it reached ``b`` alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_odc import _compat
from lightning_odc._version import __version__
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.transports.base import (
    Rendezvous,
    Run,
    Segment,
    SumDtype,
    UnitSpec,
    joined,
    packed,
)

NamedTensors = Iterator[tuple[str, Tensor]]
"""Parameters, with their names."""

#: The name of the root unit, since the root module has none.
ROOT = "(root)"


@dataclass(eq=False)
class ParamSlot:
    """One parameter of a unit, and its place in one rank's part of the unit."""

    name: str  # qualified name in the model
    module: nn.Module  # holds it; it is looked up there, since the object changes while unsharded
    attribute: str  # its name in that module
    padded_numel: int  # elements of one rank's padded shard
    compute_dtype: torch.dtype  # dtype in which it is published
    shard_offset: int = 0  # where it starts in the published shard, in elements of ``compute_dtype``
    grad_offset: int = -1  # where it starts in the accumulator, in elements; -1 if it has no place there
    has_hook: bool = False  # which notes when it receives a gradient
    was_trainable: bool = False  # when that was last the same for the shard and the gathered parameter
    # All of the module, by attribute.
    registered_params: dict[str, nn.Parameter] = field(init=False, repr=False)
    sharded_param: DTensor = field(init=False, repr=False)  # which optimizers hold

    def __post_init__(self) -> None:
        self.registered_params = _compat.parameters_held_by(self.module)
        self.sharded_param = cast(DTensor, self.registered_param)
        self.was_trainable = self.sharded_param.requires_grad

    @property
    def registered_param(self) -> nn.Parameter:
        """The parameter as the module holds it now: the shard, or unsharded between gather and reshard."""
        return self.registered_params[self.attribute]

    @property
    def is_gathered(self) -> bool:
        """Whether the module holds it whole now; with tensor parallelism, its tensor-parallel part whole."""
        current: Any = self.registered_param
        return (
            not isinstance(current, DTensor) or current.device_mesh.ndim < self.sharded_param.device_mesh.ndim
        )

    @property
    def registered_shard(self) -> DTensor:
        """`registered_param`, which must be the shard now."""
        parameter = self.registered_param
        assert isinstance(parameter, DTensor) and not self.is_gathered, f"{self.name} is not sharded now"
        return parameter

    @property
    def local_shard(self) -> Tensor:
        """This rank's part of `registered_shard`, unpadded (detached, same memory)."""
        return _compat.local_of(self.registered_shard)

    def local_shard_at_rest(self) -> Tensor:
        """This rank's part of `sharded_param`, also while the parameter is gathered."""
        # If the parameter was replaced, `sharded_param` is the new one from here on.
        current: Any = self.registered_param
        is_new = current is not self.sharded_param and isinstance(current, DTensor)
        if is_new and current.device_mesh == self.sharded_param.device_mesh:
            self.sharded_param = current
        return _compat.local_of(self.sharded_param)

    def whole(self, shards: Tensor) -> Tensor:
        """The whole parameter in the compute dtype, from the published shards of all owners, ``[owners, ...]``."""
        if shards.dtype == self.compute_dtype:
            rows = shards.narrow(1, self.shard_offset, self.padded_numel)
        else:  # bytes
            size = self.padded_numel * self.compute_dtype.itemsize
            rows = shards.narrow(1, self.shard_offset, size).contiguous().view(self.compute_dtype)
        shape = shape_of(self.sharded_param)
        _, dim = _placement_of(self.sharded_param)
        if dim == 0:  # the ranks' rows follow each other; a unit of one parameter is not copied
            return rows.reshape(-1, *shape[1:])[: shape[0]]
        padded = [*shape[:dim], math.ceil(shape[dim] / len(rows)), *shape[dim + 1 :]]
        joined = torch.cat([row.view(padded) for row in rows], dim)
        return joined.narrow(dim, 0, shape[dim]).contiguous()

    def shards_of(self, whole: Tensor, owners: int) -> tuple[Tensor, ...]:
        """The shards of a whole gradient by owner, without padding; the last owners may have none."""
        _, dim = _placement_of(self.sharded_param)
        return whole.chunk(owners, dim)


@dataclass
class Unit:
    """One parameter group of ``fully_shard``: gathered, resharded and reduced together."""

    index: int  # its number, equal on all ranks
    name: str  # qualified name of its (first) module
    modules: list[FSDPModule]  # the modules that ``fully_shard`` grouped, usually one
    slots: list[ParamSlot]  # its parameters in memory order
    as_bytes: bool = False  # compute dtypes differ, so the published shard is a run of bytes
    grad_dtype: torch.dtype = torch.float32  # dtype of the accumulators
    # Parameters that received a gradient: since the last reduce-scatter, and since the last settle.
    reduced_now: dict[ParamSlot, Tensor] = field(default_factory=dict)
    reduced_in_step: set[ParamSlot] = field(default_factory=set)
    grad_slots: list[ParamSlot] = field(default_factory=list)  # have a place in the accumulator
    # Where these lie in the shard: (begin, end).
    grad_ranges: list[Run] = field(default_factory=list)
    shard_numel: int = 0  # elements of this rank's published shard
    whole: list[Segment] = field(default_factory=list)  # where all of these lie
    _sizes: list[int] = field(default_factory=list)

    @property
    def module(self) -> FSDPModule:
        """The first of its modules, by which ``fully_shard`` is told what to do with all of it."""
        return self.modules[0]

    def lay_out(self, accumulator_dtype: SumDtype) -> None:
        """Give every parameter its place, also in the accumulator if it has a hook. Its compute dtype must be known."""
        self.as_bytes = len({slot.compute_dtype for slot in self.slots}) > 1
        self.grad_slots = [slot for slot in self.slots if slot.has_hook]
        grad_offset = 0
        for slot in self.slots:
            size = slot.padded_numel
            if self.as_bytes:
                size *= slot.compute_dtype.itemsize
            slot.shard_offset = self.shard_numel
            self.shard_numel += size
            self._sizes.append(size)
            if slot.has_hook:
                slot.grad_offset = grad_offset
                grad_offset += slot.padded_numel
                self.grad_ranges.append((slot.shard_offset, self.shard_numel))
        self.grad_ranges = joined(self.grad_ranges)
        self.whole = _segments_of(self.grad_slots)
        own = torch.float32
        if self.grad_slots:
            own = self.grad_slots[0].registered_shard.dtype
        if accumulator_dtype is None or own.is_complex:
            self.grad_dtype = torch.promote_types(own, accumulator_dtype or torch.float32)
        else:
            self.grad_dtype = accumulator_dtype

    def spec(self) -> UnitSpec:
        """Sizes for the window."""
        return UnitSpec(
            name=self.name,
            shard_numel=self.shard_numel,
            shard_dtype=torch.uint8 if self.as_bytes else self.slots[0].compute_dtype,
            grad_numel=sum(slot.padded_numel for slot in self.grad_slots),
            grad_dtype=self.grad_dtype,
            grad_ranges=tuple(self.grad_ranges),
        )

    @torch.no_grad()
    def write_shard(self, target: Tensor) -> None:
        """Write this rank's shard (1-D, as `spec` says) in the compute dtype."""
        _, places, values = zip(*self.parts(target), strict=True)
        # With `cpu_offload` from pinned host memory: cast on the GPU, and not waited for here. The optimizer step that
        # changes shards next comes after a meeting.
        torch._foreach_copy_(places, values, non_blocking=True)

    def parts(self, shard: Tensor) -> Iterator[tuple[ParamSlot, Tensor, Tensor]]:
        """Every parameter, where it lies in a published shard, and what is to be there now: both 1-D, no padding."""
        for slot, place in zip(self.slots, shard.split_with_sizes(self._sizes), strict=True):
            value = slot.local_shard_at_rest().reshape(-1)  # the memory of the parameter
            if self.as_bytes:
                value = value.to(slot.compute_dtype).view(torch.uint8)
            numel = value.numel()
            if place.numel() > numel:
                place = place[:numel]  # without the padding
            yield slot, place, value

    @property
    def is_gathered(self) -> bool:
        """Whether modules hold whole parameters now. ``fully_shard`` exchanges all of a unit at once."""
        return self.slots[0].is_gathered

    def match_frozen(self) -> None:
        """Freeze or unfreeze the shard as the gathered parameter, or the other way round: the one that was changed."""
        # ``toggle_optimizer`` freezes what optimizers hold: shards. ``disable_adapter`` of PEFT, and a user who goes
        # through a module, freeze what modules hold: the gathered parameter, which is gone when the unit is freed.
        if not self.is_gathered:
            return
        for slot in self.slots:
            sharded = slot.sharded_param
            gathered = slot.registered_param
            is_trainable = sharded.requires_grad
            if is_trainable == gathered.requires_grad:
                slot.was_trainable = is_trainable
            else:
                slot.was_trainable = not slot.was_trainable  # one of them is as before
                sharded.requires_grad_(slot.was_trainable)
                gathered.requires_grad_(slot.was_trainable)

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The parameters of a gathered unit: name, this rank's slice of it, and its shard, which should be the same."""
        for slot in self.slots:
            shard = _compat.local_of(slot.sharded_param)
            if not shard.numel():
                continue
            whole: Tensor = slot.registered_param
            if isinstance(whole, DTensor):
                whole = _compat.local_of(whole)
            mesh = slot.sharded_param.device_mesh
            mesh_dim, dim = _placement_of(slot.sharded_param)
            rows = math.ceil(whole.shape[dim] / mesh.size(mesh_dim))  # of one rank, with padding
            start = mesh.get_local_rank(mesh_dim) * rows
            own = whole.detach().narrow(dim, start, shard.size(dim))
            yield slot.name, own.reshape(-1), shard.to(own.device, own.dtype).reshape(-1)

    @functools.cached_property
    def divided_by_fully_shard(self) -> bool:
        """Whether ``fully_shard`` divides gradients before it hands them over: it does, unless fp32 or bf16."""
        wider = _compat.precision_of(self.module).reduce_dtype
        dtypes = {wider or slot.compute_dtype for slot in self.grad_slots}
        return not dtypes <= {torch.float32, torch.bfloat16}

    def set_division(self, enabled: bool) -> None:
        """Let ``fully_shard`` divide gradients by the number of ranks, or not."""
        factor = float(self.owners) if enabled else 1.0
        for module in self.modules:
            module.set_gradient_divide_factor(factor)

    @property
    def owners(self) -> int:
        """The number of ranks over which ``fully_shard`` shards it."""
        parameter = self.slots[0].sharded_param
        mesh_dim, _ = _placement_of(parameter)
        return parameter.device_mesh.size(mesh_dim)

    def take_reduced(self) -> list[Segment]:
        """Where the parameters with a new gradient lie in the reduce-scatter buffer and in the accumulator."""
        reduced = self.reduced_now
        if len(reduced) == len(self.grad_slots):
            segments = self.whole
        else:
            segments = _segments_of(slot for slot in self.grad_slots if slot in reduced)
        self.reduced_in_step.update(reduced)
        reduced.clear()
        return segments

    @torch.no_grad()
    def add_to_grads(self, total: Tensor, scale: float, used: Iterable[ParamSlot]) -> None:
        """Add ``scale * total`` (``[grad_numel]``, where shards are) to ``.grad`` of ``used`` parameters."""
        empty: dict[DTensor, Tensor] = {}
        kept: dict[DTensor, Tensor] = {}
        parts = total.split_with_sizes([slot.padded_numel for slot in self.grad_slots])
        part_of = dict(zip(self.grad_slots, parts, strict=True))
        for slot in used:
            parameter = slot.registered_shard
            local = _compat.local_of(parameter)
            gradient = part_of[slot][: local.numel()].view(local.shape)  # without the padding at its end
            if parameter.grad is None:
                empty[parameter] = gradient
            else:
                kept[parameter] = gradient
        if kept:
            there = [_compat.local_of(cast(DTensor, parameter.grad)) for parameter in kept]
            torch._foreach_add_(there, [*kept.values()], alpha=scale)
        if empty:
            scaled = torch._foreach_mul([*empty.values()], scale)
            for parameter, gradient in zip(empty, scaled, strict=True):
                parameter.grad = _compat.sharded_like(parameter, gradient.to(parameter.dtype))

    @property
    def is_offloaded(self) -> bool:
        """Whether shards are not on the device that computes: ``cpu_offload``."""
        return self.slots[0].local_shard.device.type != self.slots[0].sharded_param.device_mesh.device_type


def _segments_of(slots: Iterable[ParamSlot]) -> list[Segment]:
    return packed((slot.grad_offset, slot.grad_offset + slot.padded_numel) for slot in slots)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules on which ``fully_shard`` was called."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def find_units(model: nn.Module) -> list[Unit]:
    """All units of a model in module order, without layout. Modules that manage no parameter are left out."""
    names = {module: name for name, module in model.named_modules()}
    grouped: set[FSDPModule] = set()
    seen: set[nn.Parameter] = set()
    units: list[Unit] = []
    for module in fsdp_modules(model):
        if module in grouped:
            continue
        modules = _compat.modules_grouped_with(module)
        grouped.update(modules)
        slots = [slot for member in modules for slot in _slots_of(member, names, seen)]
        if slots:
            name = names.get(modules[0]) or ROOT
            units.append(Unit(len(units), name, list(modules), slots))
    return units


def compare_models(units: Sequence[Unit], rendezvous: Rendezvous) -> None:
    """Raise on every rank, naming the first difference, if the ranks sharded different models."""
    lines = [f"lightning-odc {__version__}"]
    for unit in units:
        lines.append(f"unit {unit.name}")
        for slot in unit.slots:
            shape = list(slot.registered_shard.shape)
            kind = "frozen"
            if slot.grad_offset >= 0:
                kind = "trainable"
            lines.append(
                f"{slot.name}: shape {shape}, {slot.registered_shard.dtype}, computed in {slot.compute_dtype}, {kind}"
            )
    compare_lines(rendezvous, lines)


def compare_lines(rendezvous: Rendezvous, lines: Sequence[str]) -> None:
    """As `compare_models`, of models that are described in lines."""
    difference = first_difference(rendezvous, lines)
    if difference:
        raise DisagreementError(
            f"The ranks built different models. The first difference: {difference}\nBuild the same modules in the "
            "same order on every rank, with the same version of lightning-odc."
        )


def first_difference(exchange: Callable[[Any], list[Any]], lines: Sequence[str]) -> str:
    """The first line that is another one on another rank than on rank 0; empty if none is. All ranks together."""
    by_rank = exchange(lines)
    for rank, other in enumerate(by_rank):
        for first, second in itertools.zip_longest(by_rank[0], other, fillvalue="nothing"):
            if first != second:
                return f"rank 0 has\n  {first}\nwhere rank {rank} has\n  {second}"
    return ""


def class_names(modules: Iterable[nn.Module]) -> str:
    """The classes of some modules as a set in Python, such as ``{Block, nn.Linear}``."""
    names = set()
    for kind in {type(module) for module in modules}:
        name = kind.__name__
        if kind.__module__.startswith("torch.nn."):
            name = f"nn.{name}"
        names.add(name)
    return "{" + ", ".join(sorted(names)) + "}"


def _slots_of(root: nn.Module, names: dict[nn.Module, str], seen: set[nn.Parameter]) -> list[ParamSlot]:
    slots = []
    for module in post_order(root):
        for name, parameter in module.named_parameters(names.get(module, ""), recurse=False):
            if not isinstance(parameter, DTensor) or parameter in seen:
                continue
            seen.add(parameter)
            _, _, attribute = name.rpartition(".")
            padded = shape_of(parameter)
            mesh_dim, dim = _placement_of(parameter)
            padded[dim] = math.ceil(padded[dim] / parameter.device_mesh.size(mesh_dim))
            slots.append(ParamSlot(name, module, attribute, math.prod(padded), parameter.dtype))
    return slots


def post_order(root: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters belong to ``root``'s unit: children first, without nested units."""
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        visited.add(module)
        for child in module.children():
            if child not in visited and not isinstance(child, FSDPModule):
                yield from visit(child)
        yield module

    return visit(root)


def _placement_of(parameter: DTensor) -> tuple[int, int]:
    """The dimension of the mesh over which ``fully_shard`` shards a parameter, and that of the parameter."""
    # Before it in the mesh are replicas, after it what a tensor-parallel plan does.
    for mesh_dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            return mesh_dim, getattr(placement, "dim", 0)
    return parameter.device_mesh.ndim - 1, 0


def shape_of(parameter: DTensor) -> list[int]:
    """The shape that ``fully_shard`` shards: with tensor parallelism, that of this rank's part."""
    shape = list(parameter.shape)
    mesh = parameter.device_mesh
    own_dim, _ = _placement_of(parameter)
    for mesh_dim in range(own_dim + 1, mesh.ndim):
        placement = parameter.placements[mesh_dim]
        if isinstance(placement, Shard):
            dim = placement.dim
            size = math.ceil(shape[dim] / mesh.size(mesh_dim))
            left = shape[dim] - size * mesh.get_local_rank(mesh_dim)
            shape[dim] = max(min(size, left), 0)
    return shape
