"""The kernel that adds gradients to all ranks' accumulators. Needs Triton; import it only where that is installed.

Note [Few programs that stride]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The kernel runs at the same time as the backward pass, on a stream of high priority. A link between GPUs is much slower
than memory, so additions wait for it. Programs that wait occupy multiprocessors that matrix products need. So there are
few programs, as NCCL has few blocks, and each goes over its part of the row in strides.

Additions use packets of 16 bytes (4 in fp32, from Hopper on) if the compiler knows that their address is a multiple of
16 bytes and their number a multiple of 16. The *body* of a row is made so. One program adds the rest one by one: the
elements before the first multiple of 64 bytes (the *head*), and those after the last whole 16 elements (the *tail*).
10 elements from byte 40 on in fp32, which are elements 10 to 19 of the window::

    head    10 11 12 13 14 15      up to byte 64
    body    none                   0 times 16 elements
    tail    16 17 18 19
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Dtypes of accumulators that the additions work on, by their names in Triton.
_IN_TRITON = {torch.float32: tl.float32, torch.float64: tl.float64}
ATOMIC_DTYPES = frozenset(_IN_TRITON)

_ALIGNED = 64  # bytes: 16 elements in fp32
_GROUP = 16  # elements


@dataclass(frozen=True)
class Launch:
    """How the kernel is started. ``make bench-gpu`` measures other choices."""

    # For the rows of all owners together, at least one per owner: Note [Few programs that stride].
    programs: int = 32
    block: int = 4096  # elements that a program adds at once
    warps: int = 8


DEFAULT_LAUNCH = Launch()


# What is not specialized has one compiled form for all its values.
@triton.jit(do_not_specialize=["place", "head_numel", "groups", "tail_numel", "first", "world"])  # type: ignore[untyped-decorator]
def _add_rows(  # type: ignore[no-untyped-def] # Triton looks names up
    windows,
    place,
    values,
    row,
    head,
    head_numel,
    groups,
    tail_numel,
    first,
    world,
    dtype: tl.constexpr,
    block: tl.constexpr,
):
    owner = (tl.program_id(1) + first) % world
    # Addresses of the first element of the body.
    address = tl.load(windows + owner) + place.to(tl.int64) * 64
    target = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
    source = values + owner.to(tl.int64) * row + head
    end = groups.to(tl.int64) * 16
    step = tl.num_programs(0).to(tl.int64) * block
    # Relaxed: what orders additions with anything else are the meetings of the ranks. System scope: others add to the
    # same place from other devices.
    for begin in tl.range(tl.program_id(0).to(tl.int64) * block, end, step):
        offsets = begin + tl.arange(0, block)
        inside = offsets < end
        addends = tl.load(source + offsets, mask=inside).to(dtype)
        tl.atomic_add(target + offsets, addends, mask=inside, sem="relaxed", scope="sys")
    if tl.program_id(0) == 0:  # lanes 0 to 15 have the head, lanes 16 to 31 the tail
        lane = tl.arange(0, 32)
        offsets = tl.where(lane < 16, lane - head, end + lane - 16)
        inside = tl.where(lane < 16, lane < head_numel, lane - 16 < tail_numel)
        addends = tl.load(source + offsets, mask=inside).to(dtype)
        tl.atomic_add(target + offsets, addends, mask=inside, sem="relaxed", scope="sys")


def add_rows(
    windows: Tensor,
    offset: int,
    dtype: torch.dtype,
    rows: Tensor,
    first: int = 0,
    launch: Launch = DEFAULT_LAUNCH,
) -> None:
    """Add each row to one window, all by one launch; additions of other devices to the same places are not lost.

    Args:
        windows: Addresses, by rank: 1-D, int64, in this device's memory; multiples of 64.
        offset: The byte of each window at which its row is added.
        dtype: One of `ATOMIC_DTYPES`, in which windows hold sums.
        rows: Numbers of any floating dtype, ``[len(windows), numel]``, each row contiguous.
        first: The rank whose row comes first, before those of the ranks behind it.
        launch: The shape of the launch.
    """
    assert dtype in ATOMIC_DTYPES, "atomic additions of this dtype are not known to work"
    world, numel = rows.shape
    assert len(windows) == world and offset % dtype.itemsize == 0 and (numel < 2 or rows.stride(1) == 1)
    if numel == 0:
        return
    head = -offset % _ALIGNED // dtype.itemsize
    after_head = max(numel - head, 0)
    groups, tail = divmod(after_head, _GROUP)
    blocks = max(triton.cdiv(groups * _GROUP, launch.block), 1)
    programs = max(launch.programs // world, 1)
    grid = (min(programs, blocks), world)
    place = (offset + head * dtype.itemsize) // _ALIGNED
    cast(Any, _add_rows)[grid](
        windows,
        place,
        rows,
        rows.stride(0),
        head,
        min(head, numel),
        groups,
        tail,
        first,
        world,
        dtype=_IN_TRITON[dtype],
        block=launch.block,
        num_warps=launch.warps,
    )
