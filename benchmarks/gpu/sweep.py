"""Which launch of the adding kernel is best: alone, and what it costs a large matrix product beside it.

One process, one GPU, no ranks: the accumulators of all owners are in this GPU's memory. What carries over to several
GPUs is how few programs are enough, and what they take from the product. A link between GPUs is slower than memory, so
fewer programs fill it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import MIB, TimeOf, device_seconds

OWNERS = 4
#: More than the second-level cache of any GPU holds, so that no round finds there what an earlier one has left.
ROTATED_MIB = 1024
ALL = 2**30  # as many programs as there are blocks
PROGRAMS = (8, 16, 32, 64, 132, ALL)
BLOCKS = (1024, 2048, 4096)
_PRODUCT = 8192  # rows and columns

#: ``add(windows, offset, dtype, rows, launch=...)`` as in `lightning_odc.engine.transports.kernels`.
Add = Callable[..., None]


class Accumulators:
    """Windows of some owners in this GPU's memory, and gradients for them; every round takes other ones.

    Args:
        mib: The size of one owner's part in one round, in fp32.
        dtype: The dtype of the gradients.
        is_aligned: Rows begin at multiples of 16 elements.
        device: The device.
        rotated_mib: The size of all sums together.
    """

    def __init__(
        self,
        mib: int,
        dtype: torch.dtype,
        is_aligned: bool,
        device: torch.device,
        rotated_mib: int = ROTATED_MIB,
    ) -> None:
        self.numel = mib * MIB // 4 - (0 if is_aligned else 5)
        self._stride = mib * MIB
        self._rounds = max(rotated_mib // (mib * OWNERS), 1)
        self.windows = torch.zeros(OWNERS, self._rounds * self._stride // 4, device=device)
        self.addresses = torch.tensor([window.data_ptr() for window in self.windows], device=device)
        self._rows = torch.ones(self._rounds, OWNERS, self.numel, dtype=dtype, device=device)
        self._counter = itertools.count()

    @property
    def bytes(self) -> int:
        """Bytes of sums that one round adds to."""
        return OWNERS * self.numel * 4

    def next(self) -> tuple[int, Tensor]:
        """The byte of every window at which the next round adds, and what it adds."""
        index = next(self._counter) % self._rounds
        return index * self._stride, self._rows[index]

    def add_in_place(self) -> None:
        """What a plain addition does with the same bytes."""
        offset, rows = self.next()
        self.windows[:, offset // 4 : offset // 4 + self.numel].add_(rows)


def sweep(
    add: Add,
    launch: Callable[[int, int], Any],
    mib: int = 64,
    device: torch.device | None = None,
    time_of: TimeOf = device_seconds,
    rotated_mib: int = ROTATED_MIB,
    programs: Sequence[int] = PROGRAMS,
) -> list[dict[str, Any]]:
    """One entry per dtype, alignment, block and number of programs, with bytes per second.

    Args:
        add: The kernel.
        launch: Makes its launch from programs and block.
        mib: The size of one owner's part.
        device: The device; by default the current GPU.
        time_of: Measures a job.
        rotated_mib: The size of all sums together.
        programs: The numbers of programs to try.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    found: list[dict[str, Any]] = []
    for dtype, is_aligned in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        sums = Accumulators(mib, dtype, is_aligned, device, rotated_mib)
        plain = sums.bytes / statistics.median(time_of(sums.add_in_place))
        for block, count in itertools.product(BLOCKS, programs):
            chosen = launch(count, block)

            def job(sums: Accumulators = sums, chosen: Any = chosen) -> None:
                offset, rows = sums.next()
                add(sums.addresses, offset, torch.float32, rows, launch=chosen)

            bytes_per_second = sums.bytes / statistics.median(time_of(job))
            found.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "aligned": is_aligned,
                    "programs": count,
                    "block": block,
                    "bytes per second": bytes_per_second,
                    "add_ bytes per second": plain,
                }
            )
        del sums
    return found


def beside_a_product(
    add: Add, launch: Callable[[int, int], Any], block: int, mib: int = 64
) -> list[dict[str, Any]]:
    """What additions on a stream of high priority, as ``fully_shard`` has one, take from a matrix product.

    Args:
        add: The kernel.
        launch: Makes its launch from programs and block.
        block: Elements that a program adds at once.
        mib: The size of one owner's part.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    factor = torch.randn(_PRODUCT, _PRODUCT, device=device, dtype=torch.bfloat16)
    alone = statistics.median(device_seconds(lambda: factor @ factor))
    sums = Accumulators(mib, torch.bfloat16, True, device)
    side = torch.cuda.Stream(priority=-1)
    found = []
    for count in PROGRAMS:
        chosen = launch(count, block)

        def one(chosen: Any = chosen) -> None:
            offset, rows = sums.next()
            add(sums.addresses, offset, torch.float32, rows, launch=chosen)

        seconds = statistics.median(device_seconds(one))
        rounds = int(alone / seconds) + 2  # they outlast the product

        def both(rounds: int = rounds, one: Callable[[], None] = one) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(rounds):
                    one()
            torch.mm(factor, factor)

        beside = statistics.median(device_seconds(both))
        torch.cuda.synchronize()
        found.append(
            {
                "programs": count,
                "bytes per second": sums.bytes / seconds,
                "product milliseconds": 1e3 * alone,
                "product milliseconds beside": 1e3 * beside,
            }
        )
    return found


def sweep_kernel(*_: int) -> dict[str, Any]:
    """The kernel alone and beside a matrix product, on the first GPU."""
    try:
        from lightning_odc.engine.transports import kernels
    except ImportError as error:
        return {"missing": str(error)}

    def launch(programs: int, block: int) -> kernels.Launch:
        return kernels.Launch(programs, block, kernels.DEFAULT_LAUNCH.warps)

    torch.cuda.set_device(0)
    default = kernels.DEFAULT_LAUNCH
    beside = beside_a_product(kernels.add_rows, launch, default.block)
    return {
        "default": {"programs": default.programs, "block": default.block},
        "alone": sweep(kernels.add_rows, launch),
        "beside": beside,
    }
