"""The kernel that adds gradients, without a GPU.

``TRITON_INTERPRET=1 python -m tests.support.kernel_checks`` runs it in Triton's interpreter; the variable must be set
before Triton is imported. Without it, the kernel can be compiled for GPUs, to look at the instructions.
"""

from __future__ import annotations

import itertools
import re

import torch

from lightning_odc.engine.transports import kernels

SIZES = (0, 1, 3, 1024, 1025, 2500)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def adds_every_element_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel, dtype, into in itertools.product(SIZES, DTYPES, sorted(kernels.ATOMIC_DTYPES, key=str)):
        values = torch.randn(numel, generator=generator).to(dtype)
        target = torch.randn(numel, generator=generator).to(into)
        around = torch.full((numel + 2,), 7.0, dtype=into)
        around[1:-1] = target
        kernels.atomic_add(around[1:-1], values)
        # One addition in the accumulator's dtype, as `add_` does it: equal bit for bit.
        assert torch.equal(around[1:-1], target + values.to(into)), (numel, dtype, into)
        assert around[0] == around[-1] == 7.0, "written beside its place"


def refuses_other_dtypes() -> None:
    try:
        kernels.atomic_add(torch.zeros(4, dtype=torch.bfloat16), torch.ones(4))
    except AssertionError:
        return
    raise RuntimeError("added into bf16")


def instructions(architecture: int) -> str:
    """PTX of the kernel for gradients in bf16 and accumulators in fp32, at aligned addresses."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    source = compiler.ASTSource(
        fn=kernels._add,
        signature={"target": "*fp32", "values": "*bf16", "numel": "i32", "block": "constexpr"},
        constexprs={"block": kernels._BLOCK},
        attrs={(argument,): [["tt.divisibility", 16]] for argument in range(3)},
    )
    options = {"num_warps": kernels._WARPS}
    return str(
        compiler.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]
    )


def compiles_to_relaxed_additions_of_the_system() -> None:
    found = {a: re.findall(r"(?:red|atom)\.global[.\w]*", instructions(a)) for a in (80, 90)}
    assert {name.removeprefix("red").removeprefix("atom") for name in found[80]} == {
        ".global.sys.relaxed.add.f32"
    }
    # From Hopper on, four at once.
    assert {name.removeprefix("red").removeprefix("atom") for name in found[90]} == {
        ".global.sys.relaxed.add.v4.f32"
    }


if __name__ == "__main__":
    adds_every_element_once()
    refuses_other_dtypes()
    print("kernels: 2 checks passed")
