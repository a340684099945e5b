"""Computes in float64, and without chance, so that losses differ by nothing but their samples.

Note [A trial without chance]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Losses can be compared if they differ by nothing but the samples. So while a step is tested, a ``TorchFunctionMode`` is
between its code and torch. It computes in float64: 16-bit rounding is ten times the difference between the losses of an
untrained model. It leaves dropout out, in training mode, in which batch norm shows that it couples samples. Random
numbers are constants, or a permutation that mixes up samples, so that mixup shows. Where float64 fails, say
in a kernel of the user's, the step runs in its own arithmetic. Kernels of quantised weights do not fail, but write
nothing: see `dequantise`.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_odc import _compat
from lightning_odc.samples.content import tensors_of
from lightning_odc.trial.chance import CONSTANTS, DROPOUTS, calmed
from lightning_odc.trial.collectives import module_of

#: Code that moves bytes and must find them as they are, as registered operators do that it calls.
_UNTOUCHED_CODE = ("torch.distributed.", "lightning_odc.engine.")
_WIDENS = (Tensor.float, Tensor.half, Tensor.bfloat16)
#: Code of torch that is between a caller and the function that it calls.
_DISPATCHING = {"torch.overrides", "torch.functional", "torch.nn.functional", "torch._tensor"}
_DISPATCHING |= {"torch.autograd.grad_mode"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Functions that look at a tensor and compute nothing, for which a large parameter is not converted.
_LOOKS = {"__get__", "__len__", "size", "dim", "numel", "stride", "data_ptr"}
_LOOKS |= {"is_floating_point", "is_contiguous"}
_WRITES = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ior", "iand")}


#: No step draws so often for a few samples, but one that draws until it likes the numbers does.
_MOST_DRAWS = 10_000


class WithoutChance(TorchFunctionMode):
    """See Note [A trial without chance]."""

    def __init__(self, wide: bool, shakes: bool = False) -> None:
        super().__init__()
        self._wide = wide  # compute in float64 what parameters and batches take part in
        self._shakes = shakes  # change trained parameters a little, each in another way
        self._shaken: dict[nn.Parameter, int] = {}  # in the order in which they came
        self._draws = 0  # since a batch was entered

    def entered(self, batch: Any) -> Any:
        """The batch that a step gets."""
        self._draws = 0
        if not self._wide:
            return batch
        return apply_to_collection(batch, Tensor, self._widened)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame: Any = sys._getframe(1)
        while (caller := module_of(frame)) in _DISPATCHING:
            frame = frame.f_back
        if func is Tensor.to and caller == _compat.CASTS_INPUTS and args[0].dtype is torch.float64:
            return args[0]  # what a unit gets or returns, which mixed precision would narrow
        if type(func).__module__ == "torch._ops" or caller.startswith(_UNTOUCHED_CODE):
            return func(*args, **kwargs)
        if func in DROPOUTS:
            kept = args or (kwargs["input"],)
            return self._widened(kept[0]).clone()  # what was left out is written to elsewhere
        if func in CONSTANTS:
            self._draws += 1
            if self._draws > _MOST_DRAWS:
                raise RuntimeError("it draws random numbers again and again, until they fit")
            made = self._called(func, args, kwargs)
            return CONSTANTS[func](made, *args, **kwargs)
        args, kwargs = calmed(func, args, kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if not self._wide or name in _LOOKS or not _is_wide((args, kwargs)):
            return func(*args, **kwargs)
        if func in _WIDENS:
            return self._widened(args[0])
        is_in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        is_in_place |= func == Tensor.data.__set__  # type: ignore[attr-defined]
        if not is_in_place and "out" not in kwargs:
            args, kwargs = apply_to_collection((args, kwargs), (Tensor, torch.dtype), self._widened)
            return func(*args, **kwargs)
        # What is written to keeps its dtype, and the rest takes it.
        written, *others = args
        first = written
        if isinstance(written, list | tuple):  # of `torch._foreach_mul_`, say
            first = written[0]
        if first.dtype in _FLOATS:
            others = apply_to_collection(others, Tensor, partial(_like, first.dtype))
        return func(written, *others, **kwargs)

    def _widened(self, value: Any) -> Any:
        """A tensor or a dtype in float64."""
        if isinstance(value, torch.dtype) and value in _FLOATS:
            return torch.float64
        if not self._wide or type(value) not in (Tensor, nn.Parameter) or value.dtype not in _FLOATS:
            return value
        wide = value
        if value.device.type == "cpu" and value.dtype is not torch.float64:
            # Numpy asks for large pages: three times as fast for large matrices.
            wide = torch.from_numpy(np.empty(value.shape)).copy_(value)
        wide = wide.double()
        if self._shakes and isinstance(value, nn.Parameter) and value.requires_grad:
            # A copy of a trained parameter may be trained, too, and then both must not stay equal.
            place = self._shaken.setdefault(value, len(self._shaken))
            end = 0.1 * math.cos(place)
            wide = wide + torch.linspace(-end, end, wide.numel()).to(wide).view_as(wide)
        return wide


def _like(dtype: torch.dtype, value: Tensor) -> Tensor:
    """A tensor of floating-point numbers in this dtype."""
    if value.is_floating_point():
        return value.to(dtype)
    return value


def dequantise(modules: Iterable[nn.Module]) -> None:
    """Let layers with weights of 4 bits compute in the dtype of their input. Restore `forward` after the trial."""
    for module in modules:
        if isinstance(module, nn.Linear) and hasattr(module, "quant_state"):
            vars(module)["forward"] = partial(_dequantised, module)


def _dequantised(layer: Any, x: Tensor) -> Tensor:
    """What ``bitsandbytes.nn.Linear4bit`` returns; its own kernels take at most 32 bits, and do not check it."""
    dequantize = importlib.import_module("bitsandbytes.functional").dequantize_4bit
    weight: Tensor = dequantize(layer.weight.data, layer.quant_state)
    return nn.functional.linear(x, weight.to(x.dtype), layer.bias)


def _is_wide(value: Any) -> bool:
    """Whether a parameter is in it, or what was computed in float64."""
    tensors = [tensor for _, tensor in tensors_of(value)]
    return any(isinstance(tensor, nn.Parameter) or tensor.dtype is torch.float64 for tensor in tensors)
