"""The kernel that adds gradients, without a GPU.

``TRITON_INTERPRET=1 python -m tests.support.kernel_checks`` runs it in Triton's interpreter; the variable must be set
before Triton is imported. Without it, the kernel can be compiled for GPUs, to look at the instructions.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from pathlib import Path

import torch
import triton
import triton.language as tl

from lightning_odc.protocol.transports import kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Lengths around heads, tails, blocks and strides of this small launch.
SIZES = (0, 1, 17, 31, 64, 257)
SMALL = kernels.Launch(programs=6, block=32, warps=1)
STARTS = (0, 1, 15)  # elements of the window at which rows are added


class Case:
    """Windows that hold sums, and rows to add to them; one element more on both sides must stay what it is."""

    def __init__(
        self, world: int, numel: int, dtype: torch.dtype, into: torch.dtype, start: int, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(numel)
        storage = torch.randn(world, 64 + start + numel + 64, generator=generator).to(device, into)
        # Windows begin at multiples of 64 bytes, as those of GPUs begin at multiples of 2 MiB.
        self.windows = [row[-row.data_ptr() % 64 // into.itemsize :] for row in storage]
        self.addresses = torch.tensor([window.data_ptr() for window in self.windows], device=device)
        # A part of wider rows, as gradients of some of a unit's parameters are.
        self.rows = torch.randn(world, numel + 5, generator=generator).to(device, dtype)[:, 2 : 2 + numel]
        self.start = start
        self.into = into
        self._storage = storage

    def check(self, first: int = 0, launch: kernels.Launch = kernels.DEFAULT_LAUNCH) -> None:
        expected = [window.clone() for window in self.windows]
        world, numel = self.rows.shape
        for owner in range(world):
            # One addition in the accumulator's dtype, as `add_` does it: equal bit for bit.
            expected[owner][self.start : self.start + numel] += self.rows[owner].to(self.into)
        offset = self.start * self.into.itemsize
        kernels.add_rows(self.addresses, offset, self.into, self.rows, first, launch)
        for window, right in zip(self.windows, expected, strict=True):
            assert torch.equal(window, right), (world, numel, self.rows.dtype, self.into, self.start)


def adds_every_element_once() -> None:
    for numel, start in itertools.product(SIZES, STARTS):
        Case(3, numel, torch.bfloat16, torch.float32, start).check(2, SMALL)
    for world in (1, 2, 5):
        Case(world, 100, torch.bfloat16, torch.float32, 1).check(0, SMALL)
    atomic = sorted(kernels.ATOMIC_DTYPES, key=str)
    for dtype, into in itertools.product(DTYPES, atomic):
        Case(2, 100, dtype, into, 3).check(1, SMALL)
    Case(3, 5000, torch.bfloat16, torch.float32, 0).check()


def refuses_other_dtypes() -> None:
    try:
        kernels.add_rows(torch.zeros(1, dtype=torch.int64), 0, torch.bfloat16, torch.ones(1, 4))
    except AssertionError:
        return
    raise RuntimeError("added into bf16")


def instructions(architecture: int, values: str = "bf16", is_row_aligned: bool = True) -> Counter[str]:
    """What the chip runs, with its loads and additions counted: one form for all lengths and all places.

    Args:
        architecture: 80 for A100, 90 for H100 and H200, 100 for B200.
        values: Dtype of the gradients, in Triton's words.
        is_row_aligned: The length of a row is a multiple of 16, so that all rows begin at multiples of 16 bytes.
    """
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    launch = kernels.DEFAULT_LAUNCH
    types = {"windows": "*i64", "values": f"*{values}", "dtype": "constexpr", "block": "constexpr"}
    names = kernels._add_rows.arg_names
    rows = []
    if is_row_aligned:
        rows = ["row"]
    aligned = ["windows", "values", "head", *rows]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = {name: types.get(name, "i32") for name in names}
    constexprs = {"dtype": tl.float32, "block": launch.block}
    source = compiler.ASTSource(fn=kernels._add_rows, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": launch.warps}
    compiled = compiler.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    for addition in re.findall(r"\b(?:red|atom)\.[.\w]+", str(compiled.asm["ptx"])):
        assert ".global.sys.relaxed.add" in addition or ".relaxed.sys.global.add" in addition, addition
    return Counter(re.findall(r"\b(?:RED|REDG|ATOM|ATOMG|LDG)\.[.\w]+", _disassembled(compiled.asm["cubin"])))


def _disassembled(cubin: bytes) -> str:
    file = Path(triton.knobs.cache.dir) / "odc_kernel.cubin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout


_EACH = kernels.DEFAULT_LAUNCH.block // (
    32 * kernels.DEFAULT_LAUNCH.warps
)  # elements of a thread in one stride


def compiles_to_packets_of_additions() -> None:
    """From Hopper on four additions in one instruction, beside one for head and tail; an A100 has no such thing."""
    for architecture in (90, 100):
        found = instructions(architecture)
        assert found["REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"] == _EACH // 4, found
        assert found["REDG.E.ADD.F32.FTZ.RN.STRONG.SYS"] == 1, found
        assert found["LDG.E.128"] == _EACH // 8, found  # 8 gradients in bf16
        assert instructions(architecture, "fp32")["LDG.E.128"] == _EACH // 4
        # Rows that begin anywhere are read one by one, and still added in packets.
        assert (
            instructions(architecture, is_row_aligned=False)["REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"]
            == _EACH // 4
        )
    found = instructions(80)
    assert found["RED.E.ADD.F32.FTZ.RN.STRONG.SYS"] == _EACH + 1, found
    assert found["LDG.E.128"] == _EACH // 8, found


if __name__ == "__main__":
    adds_every_element_once()
    refuses_other_dtypes()
    print("kernels: 2 checks passed")
