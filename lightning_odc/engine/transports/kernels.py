"""The kernel that adds gradients into a peer's accumulator. Needs Triton; import it only where that is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements per program: four per thread, so that loads and additions can go in packets of 16 bytes.
_BLOCK = 1024
_WARPS = 8

#: Dtypes of accumulators that the additions work on.
ATOMIC_DTYPES = frozenset({torch.float32, torch.float64})


@triton.jit  # type: ignore[untyped-decorator]
def _add(target, values, numel, block: tl.constexpr):  # type: ignore[no-untyped-def] # Triton looks names up
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    addends = tl.load(values + offsets, mask=inside).to(target.dtype.element_ty)
    # Relaxed: what orders additions with anything else are the meetings of the ranks. System scope: others add to the
    # same place from other devices.
    tl.atomic_add(target + offsets, addends, mask=inside, sem="relaxed", scope="sys")


def atomic_add(target: Tensor, values: Tensor) -> None:
    """Add so that additions of other devices to the same place are not lost.

    Args:
        target: 1-D, contiguous, of one of `ATOMIC_DTYPES`; may be another device's memory.
        values: as many, contiguous, of any floating dtype; in this device's memory.
    """
    assert target.dtype in ATOMIC_DTYPES, "atomic additions of this dtype are not known to work"
    assert target.is_contiguous() and values.is_contiguous() and target.numel() == values.numel()
    if target.numel():
        blocks = triton.cdiv(target.numel(), _BLOCK)
        _add[(blocks,)](target, values, target.numel(), block=_BLOCK, num_warps=_WARPS)
