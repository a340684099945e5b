"""Memory and first values for a model that was made on the meta device and sharded there.

An initialiser must see whole parameters: fans are computed from full shapes, and if every rank drew numbers for its
shard from an equal seed, shards would be copies of each other. So the parameters of one unit at a time are made whole,
initialised as the constructors would have done it (children before the modules around them), sent by rank 0, and cut
into shards. The values are those of a model made on the CPU with the seed of rank 0, for any number of ranks. Tensors
are filled with a mark beforehand, so a tensor that no initialiser has written is found.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_odc import _compat
from lightning_odc.engine.units import post_order
from lightning_odc.engine.values import parameters_and_buffers, send_values
from lightning_odc.progress import progress

InitWeights = Callable[[nn.Module], object]


class Unfilled(NamedTuple):
    """A parameter or buffer that nothing has given a value."""

    module: nn.Module
    name: str
    where: str

    def local(self) -> Tensor:
        """What this rank holds of it now."""
        tensor: Tensor = getattr(self.module, self.name)
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor


def materialize(model: nn.Module, device: torch.device, *, offload: bool = False) -> list[Unfilled]:
    """Give everything on the meta device memory and values; leave everything else alone."""
    if not any(tensor.is_meta for tensor in parameters_and_buffers(model)):
        return []
    for name, module in model.named_modules():
        # Their own reset makes zeros, and the reset of their layers would undo it.
        if hasattr(module, "reset_lora_parameters") and any(p.is_meta for p in module.parameters()):
            raise ValueError(
                f"{name!r} has adapters of PEFT on the meta device, where they cannot be initialised. Make the model "
                "on the CPU: leave `with torch.device('meta'):` out of `configure_model`."
            )
    return _Materializer(model, device, offload).run()


def check_filled(unfilled: list[Unfilled]) -> None:
    """Refuse to run a model that has no values."""
    left = [item for item in unfilled if _is_marked(item.local())]
    if left:
        names = ", ".join(f"{item.name!r} of {item.where}" for item in left)
        raise ValueError(
            f"Made on the meta device, and nothing gave them values: {names}. Give the module a `reset_parameters()` "
            "method that fills its own parameters and buffers, or make it on the CPU: leave "
            "`with torch.device('meta'):` out of `configure_model`."
        )


class _Materializer:
    def __init__(self, model: nn.Module, device: torch.device, offload: bool) -> None:
        self._model = model
        self._device = device
        self._offload = offload
        self._names = {module: name for name, module in model.named_modules()}
        self._seen: set[nn.Module] = set()
        self._sharded: dict[Tensor, Tensor] = {}  # by the parameter on the meta device: tied ones stay tied
        self._unfilled: list[Unfilled] = []
        self._bar = progress([*model.parameters()], "First values", "parameter")

    def run(self) -> list[Unfilled]:
        with self._bar:
            self._unit(self._model, None)
        send_values(self._model.buffers(), self._device)
        kept = [item for item in self._unfilled if item.name in item.module.state_dict()]
        check_filled([item for item in self._unfilled if item not in kept])
        return kept

    def _unit(self, root: nn.Module, init_weights: InitWeights | None) -> None:
        """The parameters of one unit, whole until all its modules are initialised."""
        whole = _whole(root, self._device)
        self._visit(root, init_weights)
        for module, name, meta in whole:
            if meta not in self._sharded:
                self._sharded[meta] = self._cut(getattr(module, name), meta)
                self._bar.update()
            setattr(module, name, self._sharded[meta])

    def _visit(self, module: nn.Module, init_weights: InitWeights | None) -> None:
        self._seen.add(module)
        method = getattr(module, "_init_weights", None)
        # A method of that name that does not take a module is something else.
        if inspect.ismethod(method) and len(inspect.signature(method).parameters) == 1:
            init_weights = method
        for child in module.children():
            if child in self._seen:
                continue
            if isinstance(child, FSDPModule):
                self._unit(child, init_weights)
            else:
                self._visit(child, init_weights)
        self._initialize(module, init_weights)

    def _initialize(self, module: nn.Module, init_weights: InitWeights | None) -> None:
        own = module.named_parameters(recurse=False)
        marked = [name for name, parameter in own if _is_marked(parameter)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, _marked_like(buffer, self._device))
                marked.append(name)
        if not marked:
            return
        reset = _compat.reset_of(module)
        if reset is not None:
            reset()
        # That of the closest module around it which has such a method, as in Hugging Face's and many other models.
        if init_weights is not None:
            init_weights(module)
        where = f"{self._names[module] or 'the model'!r} ({type(module).__name__})"
        left = [name for name in marked if _is_marked(getattr(module, name))]
        self._unfilled += [Unfilled(module, name, where) for name in left]

    def _cut(self, full: Tensor, meta: Tensor) -> nn.Parameter:
        value = full.detach()
        if isinstance(meta, DTensor):
            send_values([value])
            # No rank sends shards: each one cuts its own out of the whole.
            value = distribute_tensor(value, meta.device_mesh, meta.placements, src_data_rank=None)
            if self._offload:
                value = value.cpu()
        parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
        parameter.__class__ = type(meta)  # type: ignore[assignment]
        _compat.take_over(meta, parameter)
        return parameter


def _whole(root: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, Tensor]]:
    """Put whole, marked parameters in the place of those on the meta device; returns these and where they were."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    made: dict[Tensor, nn.Parameter] = {}
    for module in post_order(root):
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own:
            if parameter.is_meta:
                if parameter not in made:
                    full = _marked_like(parameter, device)
                    made[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
                replaced.append((module, name, parameter))
    return replaced


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return None
    return torch.iinfo(dtype).min


def _marked_like(tensor: Tensor, device: torch.device) -> Tensor:
    mark = _mark(tensor.dtype) or 0
    return torch.full(tensor.shape, mark, dtype=tensor.dtype, device=device)


def _is_marked(tensor: Tensor) -> bool:
    """Whether a part of a tensor has not been written. Of truth values this is not known."""
    mark = _mark(tensor.dtype)
    if mark is None or tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
        return False
    if math.isnan(mark):
        return bool(tensor.isnan().any())
    has_mark = tensor == mark
    if mark == 0:  # the smallest number of an unsigned type is a common value, too
        return bool(has_mark.all())
    return bool(has_mark.any())
