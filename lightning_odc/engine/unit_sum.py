"""The gradients of one unit that a rank has not added to their owners yet; see Note [Added once]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_odc.engine.additions import Additions
from lightning_odc.engine.units import ParamSlot, Unit
from lightning_odc.protocol.transports.base import Segment
from lightning_odc.protocol.unit_window import UnitWindow


class UnitSum:
    """The sums of its parameters' gradients, each whole, in the dtype of the accumulators.

    A gradient is taken before ``fully_shard`` sees it, which then has nothing to reduce. Autograd has made it for this
    microbatch, so the first one becomes the sum, without a copy.
    """

    def __init__(self, unit: Unit, window: UnitWindow, additions: Additions) -> None:
        self._additions = additions
        self._unit = unit
        self._window = window
        self._shape = (window.owners, window.spec.grad_numel)
        self.size = math.prod(self._shape) * window.spec.grad_dtype.itemsize  # bytes of all sums
        self.moved = 0  # bytes of this minibatch's gradients, which adding each of them by itself would move
        self.waits = False  # gradients of microbatches that are not the last one are summed here
        # Gradients of the microbatch at hand that are not in the sums yet.
        self._arrived: dict[ParamSlot, Tensor] = {}
        self._totals: dict[ParamSlot, Tensor] = {}

    def arrives(self, slot: ParamSlot, parameter: Tensor) -> None:
        """Autograd has put a gradient into ``.grad`` of a whole parameter, where ``fully_shard`` would find it."""
        if not self._additions.arrives(slot):
            parameter.grad = None  # a part of a microbatch, and the whole has added it
        elif self._additions.running.is_last or not self.waits:
            self._unit.reduced_now[slot] = parameter
        else:
            if slot in self._arrived:
                self.take_in()
            self._arrived[slot] = cast(Tensor, parameter.grad)
            parameter.grad = None
            if len(self._arrived) == len(self._unit.grad_slots):
                self.take_in()

    def take_in(self) -> None:
        """Add what has arrived to the sums."""
        slots = list(self._arrived)
        self._unit.reduced_in_step.update(slots)
        if self._additions.running.counts:
            known = []
            addends = []
            for slot, gradient in self._arrived.items():
                gradient = gradient.detach()
                if isinstance(gradient, DTensor):  # with tensor parallelism, this rank computes with its part
                    parameter: Any = slot.registered_param
                    gradient = gradient.redistribute(placements=parameter.placements).to_local()
                self.moved += gradient.nbytes
                if slot in self._totals:
                    known.append(self._totals[slot])
                    addends.append(gradient)
                else:
                    self._totals[slot] = gradient.to(self._window.spec.grad_dtype)
            if known:
                torch._foreach_add_(known, addends)
        self._arrived = {}
        self._additions.end_adding(slots)

    def forget_arrived(self) -> None:
        """The microbatch has broken off."""
        self._arrived = {}

    def add(self, chunks: Tensor, segments: Sequence[Segment]) -> None:
        """Add a gradient that ``fully_shard`` reduces to the owners, with the sums; see `UnitWindow.accumulate`."""
        self.moved += chunks.nbytes
        if not self._totals:
            self._window.accumulate(chunks, segments)
            return
        rows = self._take_rows()
        chunks = chunks.view(len(rows), -1)
        for part in segments:
            rows.narrow(1, part.target, part.numel).add_(chunks.narrow(1, part.source, part.numel))
        self._window.accumulate(rows.view(-1), self._unit.whole)

    def give(self) -> None:
        """Add the sums to the owners."""
        if self._totals:
            self._window.accumulate(self._take_rows().view(-1), self._unit.whole)

    def _take_rows(self) -> Tensor:
        """The sums, as ``fully_shard`` lays out a gradient that it reduces: a row per owner. None are left."""
        spec = self._window.spec
        places = []
        values = []
        some = next(iter(self._totals.values()))
        rows = some.new_zeros(self._shape, dtype=spec.grad_dtype)
        for slot, total in self._totals.items():
            # On a GPU, the last microbatch's are given on the stream on which ``fully_shard`` reduces.
            if total.is_cuda:
                total.record_stream(torch.cuda.current_stream(total.device))
            shards = slot.shards_of(total, len(rows))
            for row, shard in zip(
                rows, shards, strict=False
            ):  # a small parameter has fewer shards than owners
                place = row.narrow(0, slot.grad_offset, shard.numel())
                places.append(place.view(shard.shape))
                values.append(shard)
        torch._foreach_copy_(places, values)
        self._totals = {}
        return rows

    def clear(self, slot: ParamSlot) -> None:
        """Forget the sum of a parameter, whose gradients were dropped."""
        self._totals.pop(slot, None)

    def release(self) -> None:
        """Add the sums to the owners, and make no more."""
        self.give()
        self.waits = False
