"""The objects through which ``fully_shard`` communicates: its public extension points, no patch.

``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` take any object with an ``allocate`` and a
``__call__`` method. Each unit gets its own pair, so two models in one process never meet.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed the two collectives and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherComm(_Allocating):
    """All-gather by ``gather(comm, output, own)``, a callback that fills the peers' slices of ``output``."""

    def __init__(self, gather: Callable[[GatherComm, Tensor, Tensor], None]) -> None:
        self._gather = gather
        self._buffer: Tensor | None = None
        # ``output`` is the same at every call, so that what it holds need not be read again
        self.keeps_buffer = False
        # the version of which it holds all, or 0; for the callback to say and to look at
        self.gathered_in = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.keeps_buffer:
            return super().allocate(size, dtype=dtype, device=device)
        if self._buffer is None or self._buffer.numel() != math.prod(size):
            self.gathered_in = 0
            self._buffer = super().allocate(size, dtype=dtype, device=device)
        return self._buffer

    def drop(self) -> None:
        """Keep the buffer no longer. Idempotent."""
        if self._buffer is not None and self._buffer.is_cuda:  # another stream may still copy from it
            self._buffer.record_stream(torch.cuda.current_stream())
        self._buffer, self.keeps_buffer, self.gathered_in = None, False, 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._gather(self, output_tensor, input_tensor)


class AccumulateComm(_Allocating):
    """Reduce-scatter by a callback ``accumulate(chunks)``; ``fully_shard`` itself gets zeros."""

    def __init__(self, accumulate: Callable[[Tensor], None]) -> None:
        self._accumulate = accumulate

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                "`set_gradient_divide_factor` has no effect on demand, where the engine divides. Scale the loss, or "
                'use ODCStrategy(communication="collective").'
            )
        self._accumulate(input_tensor)
        output_tensor.zero_()  # the real gradient reaches ``.grad`` when the engine settles


class StockGather(_Allocating):
    """What ``fully_shard`` does by itself: used to hand a model back when the engine closes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class StockReduceScatter(_Allocating):
    """What ``fully_shard`` does by itself: used to hand a model back when the engine closes."""

    def __init__(self) -> None:
        self.sends_zeros = False  # whether this rank's gradients are left out, whatever they are

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.sends_zeros:
            input_tensor.zero_()
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class WithinContext(_Allocating):
    """Another comm object, each call of it under a context (a tracer's span)."""

    def __init__(self, comm: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> None:
        self._comm = comm
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._comm(*args, **kwargs)


def reset_units(model: nn.Module, failed: bool = False) -> None:
    """Shard every unit of a model, and after a step that failed forget what ``fully_shard`` had under way."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if failed and isinstance(model, FSDPModule):
        # torch < 2.13 cannot, and a model that never ran has nothing to reset.
        with contextlib.suppress(AttributeError):
            model.reset_iter_state()
    for module in units:
        module.reshard()


def forget_pass(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Forget a pass that broke off, and give memory back to the device. Needs torch 2.13, and whole parameters."""
    for (
        parameter
    ) in parameters:  # `reset_iter_state` frees them, but the next pass would add to their ``.grad``
        parameter.grad = None
    reset_units(model, failed=True)
    with torch.enable_grad():
        # A backward pass that broke off leaves what it had not come to in the queue of this thread, with graph and
        # activations. The next pass of any graph throws it out first.
        torch.zeros((), device="cpu", requires_grad=True).backward()
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def set_comms(modules: Sequence[FSDPModule], gather: object, reduce_scatter: object) -> None:
    """Put comm objects on the modules of one unit."""
    for module in modules:
        module.set_custom_all_gather(cast(Any, gather))
        module.set_custom_reduce_scatter(cast(Any, reduce_scatter))
