"""Letting ``fully_shard`` show how it lays out a unit; see Note [How a unit lies in memory]."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_odc.engine.comm import GatherComm, StockReduceScatter, set_comms
from lightning_odc.engine.units import ParamSlot, Unit

#: Numbers that bf16 and fp16 both hold exactly: 7 bits of fraction, and the exponents of fp16. A prime number of them,
#: so that equal numbers are not equally far apart in parameters of even sizes.
_FRACTIONS, _LEAST_EXPONENT, _NUMBERS = 128, -14, 3709


def probe(
    unit: Unit,
    while_gathered: Callable[[ParamSlot], None],
    keep: Container[str],
    accumulator_dtype: torch.dtype | None,
) -> None:
    """Lay out a unit as ``fully_shard`` does."""
    with _numbered(unit):
        own = _shown_shard(unit, while_gathered)
        for slot in unit.slots:
            slot.has_gradient = slot.hooked or slot.name in keep
        _lay_out_like(unit, own, accumulator_dtype)


@contextmanager
def _numbered(unit: Unit) -> Iterator[None]:
    """A context in which the elements of this rank's shards are distinct numbers, by parameter and place."""
    # Parameters with equal contents, as norms and biases are in the beginning, would look the same in any order.
    kept = [(slot, slot.local.clone()) for slot in unit.slots if type(slot.local) is Tensor]
    first = 0
    try:
        for slot, content in kept:
            _write(slot, _numbers(first, content))
            first += content.numel() + 1
        yield
    finally:
        for slot, content in kept:
            _write(slot, content)


def _shown_shard(unit: Unit, while_gathered: Callable[[ParamSlot], None]) -> Tensor:
    """This rank's shard as ``fully_shard`` passes it to be gathered: 1-D, in the compute dtype."""
    shown: list[Tensor] = []
    set_comms(
        unit.modules, GatherComm(lambda _comm, _output, own: shown.append(own.clone())), StockReduceScatter()
    )
    unit.modules[0].unshard()  # what the peers' slices hold does not matter: the unit is resharded at once
    for slot in unit.slots:
        slot.compute_dtype = slot.current.dtype
        while_gathered(slot)
    unit.modules[0].reshard()
    (own,) = shown
    return own


def _lay_out_like(unit: Unit, own: Tensor, accumulator_dtype: torch.dtype | None) -> None:
    """Lay out a unit so that its shard is bit for bit what ``fully_shard`` passes as ``own``, or refuse it."""
    unit.lay_out(accumulator_dtype)
    spec = unit.spec()
    derived = torch.zeros(spec.shard_numel, dtype=spec.shard_dtype, device=own.device)
    if spec.shard_numel == own.numel() and spec.shard_dtype == own.dtype:
        unit.write_shard(derived)
    if spec.shard_numel != own.numel() or not torch.equal(derived.view(torch.uint8), own.view(torch.uint8)):
        raise NotImplementedError(
            f"Unit {unit.name!r} lies in memory in a way this version does not know (tensor subclasses with their own "
            'all-gather, such as fp8 weights, do that). Use ODCStrategy(communication="collective") for this model.'
        )


def _numbers(first: int, like: Tensor) -> Tensor:
    """Numbers from the one with this index on, in the shape and dtype of ``like``."""
    indices = torch.arange(_NUMBERS, device=like.device).roll(-first)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        fractions = 1 + (indices % _FRACTIONS).float() / _FRACTIONS
        numbers = torch.ldexp(fractions, indices // _FRACTIONS + _LEAST_EXPONENT)
    else:
        numbers = indices % 127
    rounds = like.numel() // _NUMBERS + 1  # repeated in its own dtype, since a shard can be large
    return numbers.to(like.dtype).repeat(rounds)[: like.numel()].view(like.shape)


def _write(slot: ParamSlot, content: Tensor) -> None:
    with torch.inference_mode(slot.local.is_inference()), torch.no_grad():
        slot.local.copy_(content)
