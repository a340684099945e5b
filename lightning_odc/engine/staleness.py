"""Finds parameters that were changed at a wrong moment: a shard after it was published, or a gathered parameter.

Note [When shards are compared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If a parameter is changed while peers read its published shard, nothing records it: version counters do not see writes
through ``parameter.data``. So a rank compares its shards with those that it published, bit for bit: at the first
gather of a version, and after the last backward pass of a batch. A change after that is harmless. A model in ``eval()``
may never reach a backward pass, so every gather compares there, and units that stay gathered are compared when they are
freed. A rank that ran nothing compares when the step settles.

What ``forward`` writes into gathered parameters is lost when they are freed, also under collectives. So they are
compared behind the first ``forward`` of each unit in a step, and those of the root unit before the backward pass; those
of units that stay gathered on demand only when they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from lightning_odc.engine.units import Unit
from lightning_odc.errors import PUBLISH, StaleShardError
from lightning_odc.protocol.protocol import Protocol

_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)}
_WIDEST = max(_INTEGERS)


class StalenessGuard:
    """Compares contents of one model's parameters, bit for bit: see Note [When shards are compared]."""

    def __init__(self, units: Sequence[Unit], protocol: Protocol) -> None:
        self._units = units
        self._protocol = protocol
        # The host runs ahead: answers stay on the device until `before_settle`.
        self._deferred = protocol.transport.runs_ahead
        self._compared: set[int] = set()  # units, since they were published last
        self._differ: dict[Hashable, Tensor] = {}
        self._errors: dict[Hashable, Callable[[], Exception]] = {}

    def published(self) -> None:
        """All units were published: their windows hold what the parameters are now."""
        self._compared.clear()

    def before_gather(self, unit: Unit, own: Tensor) -> None:
        """Compare this rank's shard, as ``fully_shard`` passes it, if it was not compared since it was published."""
        # What `fully_shard` made of a module is a module still: it has `training`.
        if unit.index in self._compared and unit.module.training:  # type: ignore[attr-defined]
            return
        if not self._deferred:
            self._compare_shard(unit, own)

    def after_last_backward(self) -> None:
        """Compare the shards of all units."""
        for unit in self._units:
            self._compare_shard(unit, self._shard_now(unit))

    def before_reshard(self, unit: Unit) -> None:
        """Compare what is gathered with its shards: what was written into it is lost when it is freed."""
        if unit.is_gathered:
            for name, part, shard in unit.gathered():
                self._expect_same(part, shard, name, partial(lost, name))

    def before_settle(self) -> None:
        """Compare what was not compared in this version, and look at all answers."""
        for unit in self._units:
            if unit.index not in self._compared:
                self._compare_shard(unit, self._shard_now(unit))
        differ = list(self._differ.values())
        errors = list(self._errors.values())
        self._differ = {}
        self._errors = {}
        answers = torch.stack(differ).to("cpu", non_blocking=True) if differ else torch.empty(0)
        self._protocol.finish()
        for error in compress(errors, answers.tolist()):
            raise error()

    @torch.no_grad()
    def frozen_parts_differ(self) -> set[int]:
        """The units of which a parameter without gradients is no longer what was published, by number."""
        found = {}
        for unit in self._units:
            if len(unit.grad_slots) < len(unit.slots):
                parts = unit.parts(self._published(unit))
                differ = [_differ(there, now.to(there)) for slot, there, now in parts if slot.grad_offset < 0]
                found[unit.index] = torch.stack(differ).any()
        if not found:
            return set()
        answers = torch.stack(list(found.values())).tolist()  # waits for the device
        return set(compress(found, answers))

    def _published(self, unit: Unit) -> Tensor:
        return self._protocol.windows[unit.index].own_shard

    def _shard_now(self, unit: Unit) -> Tensor:
        """What this rank would publish if it did so now."""
        # A copy of one unit: to compare parameter by parameter without one takes as long, on every device.
        own = torch.zeros_like(self._published(unit))
        unit.write_shard(own)
        return own

    def _compare_shard(self, unit: Unit, own: Tensor) -> None:
        self._expect_same(self._published(unit), own, unit.index, partial(self._changed, unit))
        self._compared.add(unit.index)

    def _changed(self, unit: Unit) -> StaleShardError:
        name = None
        for slot, there, now in unit.parts(self._published(unit)):
            if not _same_bits(there, now.to(there)):
                name = slot.name
                break
        return StaleShardError(
            f"Parameter {name!r} changed after it was published, so peers would compute with its old value. Change "
            "parameters outside the optimizer step on all ranks together, and then call "
            f"{PUBLISH} on all of them."
        )

    def _expect_same(
        self, one: Tensor, other: Tensor, what: Hashable, error: Callable[[], Exception]
    ) -> None:
        """Raise what ``error`` makes, now or in `before_settle`, if two 1-D tensors of one dtype differ."""
        # Comparisons under the same key (``what``) count as one.
        if not self._deferred:
            if not _same_bits(one, other):
                raise error()
            return
        differ = _differ(one, other)
        self._differ[what] = differ | self._differ.get(what, differ)
        self._errors[what] = error


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two 1-D tensors of one dtype differ in any bit, as a tensor with one element on their device."""
    return torch.ne(*_as_integers(one, other)).any()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype are equal bit for bit (so that a NaN equals itself)."""
    return torch.equal(*_as_integers(one, other))


def _as_integers(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both viewed as the widest integers that fit."""
    # 6 numbers of bf16 have 12 bytes. If one tensor begins at byte 4 of its storage and the other at byte 0, then
    # ``8 | 4 | 12`` is ``0b1100``: 4 bytes divide everything, and both are viewed as 3 numbers of int32.
    starts = (int(one.storage_offset()) | int(other.storage_offset())) * one.itemsize
    divisible = _WIDEST | starts | one.nbytes | other.nbytes
    divisor = divisible & -divisible  # the largest power of two that divides all of them
    widest = _INTEGERS[divisor]
    return one.view(widest), other.view(widest)


def compared(unit: Unit) -> dict[str, Tensor]:
    """By name, whether the parameters of a gathered unit differ from their shards; answers stay on the device."""
    if not unit.is_gathered:
        return {}
    return {name: _differ(part, shard) for name, part, shard in unit.gathered()}


def lost(name: str) -> StaleShardError:
    """The error for what was written into a gathered parameter."""
    return StaleShardError(
        f"Parameter {name!r} was changed inside `forward` or between a forward pass and the end of its step, while it "
        "was gathered; such a change would be lost. Change it in `on_train_batch_start` or `on_train_batch_end`, on "
        f"all ranks together, and then call {PUBLISH} on all of them."
    )
