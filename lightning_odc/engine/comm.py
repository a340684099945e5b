"""How an engine and ``fully_shard`` meet: comm objects, the layout that these show, and the root unit.

``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` take any object with an ``allocate`` and a
``__call__`` method: public extension points, no patch. `probe` looks at what ``fully_shard`` passes to them; see Note
[How a unit lies in memory].

Note [The root unit]
~~~~~~~~~~~~~~~~~~~~
The root unit has the parameters outside of blocks, such as embeddings and the head. ``fully_shard`` gathers it when the
root module is called and shards it after the backward pass. With manual optimization a ``training_step``, one call of
the root module, may run the model and go backward several times. So the engine gathers the root unit again when one of
its layers is called, and before a backward pass (which finds the memory of the parameters that it saved filled again).
Its gradients are reduced when a backward pass through any other unit ends.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import _compat
from lightning_odc.engine.units import ParamSlot, Unit, class_names, fsdp_modules
from lightning_odc.errors import ODCError
from lightning_odc.protocol.transports.base import SumDtype


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherComm(_Allocating):
    """All-gather by ``gather(comm, output, own)``, a callback that fills the peers' slices of ``output``."""

    def __init__(self, gather: Callable[[GatherComm, Tensor, Tensor], None]) -> None:
        self._gather = gather
        self._buffer: Tensor | None = None
        # ``output`` is the same at every call: what it holds need not be read again.
        self.retains_buffer = False
        self.gathered_in = 0  # the version of which it holds all, or 0; the callback sets it and looks at it

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.retains_buffer:
            return super().allocate(size, dtype=dtype, device=device)
        if self._buffer is None or self._buffer.numel() != math.prod(size):
            self.gathered_in = 0
            self._buffer = super().allocate(size, dtype=dtype, device=device)
        return self._buffer

    def drop(self) -> None:
        """Keep the buffer no longer. Idempotent."""
        if self._buffer is not None and self._buffer.is_cuda:  # another stream may still copy from it
            self._buffer.record_stream(torch.cuda.current_stream())
        self._buffer = None
        self.retains_buffer = False
        self.gathered_in = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self._gather(self, output_tensor, input_tensor)


class AccumulateComm(_Allocating):
    """Reduce-scatter by a callback ``accumulate(chunks)``; ``fully_shard`` itself gets zeros."""

    def __init__(self, accumulate: Callable[[Tensor], None]) -> None:
        self._accumulate = accumulate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, op: Any, **_: Any) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                "`set_gradient_divide_factor` has no effect on demand, where the engine divides. Scale the loss, or "
                'use ODCStrategy(communication="collective").'
            )
        self._accumulate(input_tensor)
        output_tensor.zero_()  # the real gradient reaches ``.grad`` when the engine settles


@dataclass(eq=False)
class StockComm(_Allocating):
    """A collective that ``fully_shard`` calls by itself, each call under a context (a tracer's span)."""

    collective: Callable[..., Any]
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    sends_zeros: bool = False  # whether this rank's gradients are left out, whatever they are

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if self.sends_zeros:
            input_tensor.zero_()
        with self.context():
            return self.collective(output_tensor, input_tensor, **options)


def reset_units(model: nn.Module, failed: bool = False) -> None:
    """Shard every unit of a model, and after a step that failed forget what ``fully_shard`` had under way."""
    if failed and isinstance(model, FSDPModule):
        # torch < 2.13 cannot, and a model that never ran has nothing to reset.
        with contextlib.suppress(AttributeError):
            model.reset_iter_state()
    for module in fsdp_modules(model):
        module.reshard()


def forget_pass(model: nn.Module, units: Iterable[Unit]) -> None:
    """Forget a pass that broke off, and give memory back to the device. Units need torch 2.13."""
    # `reset_iter_state` frees whole parameters, but the next pass would add to their ``.grad``.
    for unit in units:
        whole = [*unit.reduced_now.values()]
        if unit.is_gathered:
            whole += [slot.registered_param for slot in unit.slots]
        for parameter in whole:
            parameter.grad = None
        unit.reduced_now.clear()
    reset_units(model, failed=True)
    with torch.enable_grad():
        # A backward pass that broke off leaves what it had not come to in the queue of this thread, with graph and
        # activations. The next pass of any graph throws it out first.
        torch.zeros((), device="cpu", requires_grad=True).backward()
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def ran_forward(model: nn.Module, units: Mapping[Any, int]) -> list[int]:
    """Numbers of the units in the order in which they last ran. ``units``: by ``fully_shard``'s group."""
    return [units.get(group, -1) for group in _compat.forward_order(cast(FSDPModule, model))]


def set_comms(modules: Iterable[FSDPModule], gather: Any = None, reduce: Any = None) -> None:
    """Put comm objects on modules, by default those that call what ``fully_shard`` calls by itself."""
    gather = gather or StockComm(_compat.all_gather)
    reduce = reduce or StockComm(_compat.reduce_scatter)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


def probe(
    unit: Unit,
    while_gathered: Callable[[ParamSlot], None],
    accumulator_dtype: SumDtype,
) -> None:
    """Lay out a unit as ``fully_shard`` does, or refuse a unit that lies in memory in another way.

    Args:
        unit: It has been sharded.
        while_gathered: Called for each parameter; may set `ParamSlot.has_hook`.
        accumulator_dtype: The dtype of sums.
    """
    shown = []  # this rank's shard as it is passed to be gathered: 1-D, in the compute dtype
    watching = GatherComm(lambda _comm, _output, own: shown.append(own.clone()))
    set_comms(unit.modules, watching)
    unit.module.unshard()  # what it holds of peers does not matter: it is resharded at once
    for slot in unit.slots:
        slot.compute_dtype = slot.registered_param.dtype
        while_gathered(slot)
    unit.module.reshard()
    (own,) = shown
    unit.lay_out(accumulator_dtype)
    spec = unit.spec()
    derived = torch.zeros_like(own)
    is_alike = (spec.shard_numel, spec.shard_dtype) == (own.numel(), own.dtype)
    if is_alike:
        unit.write_shard(derived)
    if not is_alike or not torch.equal(derived.view(torch.uint8), own.view(torch.uint8)):
        raise NotImplementedError(
            f"Unit {unit.name!r} lies in memory in a way this version does not know (tensor subclasses with their own "
            'all-gather, such as fp8 weights, do that). Use ODCStrategy(communication="collective") for this model.'
        )


class RootUnit:
    """Keeps the root unit gathered where it is needed, until ``hooks`` closes; see Note [The root unit]."""

    def __init__(self, units: Sequence[Unit], model: nn.Module, hooks: ExitStack) -> None:
        self._model = cast(FSDPModule, model)
        self._units = units
        self._root = next((unit for unit in units if self._model in unit.modules), None)
        if self._root is not None:
            # ``fully_shard`` has gathered the unit when that of the model is called.
            for caller in {model, *(slot.module for slot in self._root.slots)}:
                hooks.enter_context(caller.register_forward_pre_hook(self.gather))

    def gather(self, *_: Any) -> None:
        """Gather the unit if it is sharded. See `Unit.match_frozen`."""
        if self._root is None:
            return
        if not self._root.is_gathered:
            self._model.unshard()
        self._root.match_frozen()

    def shard(self) -> None:
        """Shard the unit if it is gathered."""
        if self._root is not None and self._root.is_gathered:
            # Within the root module's call ``fully_shard`` keeps the unit until a backward pass, and on a rank without
            # microbatches there was none.
            self._model.set_reshard_after_forward(True, recurse=False)
            self._model.reshard()
            self._model.set_reshard_after_forward(False, recurse=False)

    def check_reduced(self) -> None:
        """Refuse a backward pass that left gradients behind, in this unit or another one."""
        for unit in self._units:
            if not unit.is_gathered or _compat.keeps_gradients(unit.module):
                continue
            left = [slot for slot in unit.slots if slot.registered_param.grad is not None]
            if left:
                layers = [slot.module for slot in left if not isinstance(slot.module, FSDPModule)]
                make = "Call"
                if layers:
                    make = f"Make units of layers, auto_wrap_policy={class_names(layers)}, and call"
                raise ODCError(
                    "With manual optimization a model needs at least two units, and the loss must depend on what one "
                    "besides the root unit returns. This backward pass did not reach any, so gradients were left "
                    f"behind, as of {left[0].name!r}. {make} them as modules, `layer(x)`."
                )
