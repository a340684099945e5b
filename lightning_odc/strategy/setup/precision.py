"""Precision for sharded models on any device: dtypes, clipping, loss scaling.

Note [Weights under fp16]
~~~~~~~~~~~~~~~~~~~~~~~~~
The gradient of ``w_m L_m`` is ``w_m`` times that of ``L_m``. Weights are often numbers of tokens, and fp16 ends at
65504. So gradients would overflow until the loss scale has shrunk by the size of the weights. The *weight unit*
prevents that: a power of two near the weight of one microbatch. Every weighted loss is divided by it before its
backward pass, and so is the denominator of Note [Who divides]. Dividing by a power of two changes no digits.

Gradients of all ranks are added up, so all ranks need the same unit. They agree on it once, in the first step that has
weights. Each rank says the weight of its first microbatches when it comes to its first backward pass, or to the settle
if it had none. Until there is a unit, ranks exchange their weights in every step: one that had no batch does not know
whether others have weights. The unit is saved with the loss scale, which depends on it. bf16 has the range of fp32: its
unit is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any, Protocol, TypeVar, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_odc import _compat_lightning
from lightning_odc.engine.unit_calls import tensors_in
from lightning_odc.engine.values import parameters_and_buffers
from lightning_odc.sharding.optimizers import StateDict
from lightning_odc.sharding.stepping import clip
from lightning_odc.sharding.wrapping import precision_policy


class LossScaler(torch.amp.GradScaler):
    """A ``GradScaler`` that fits into Lightning's order of events."""

    # Sharded gradients agree by themselves on whether one, on any rank, is not finite: `DTensor` takes the maximum
    # over ranks. So every rank skips the same steps and has the same scale.
    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._unscaled: list[Optimizer] = []

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, unless they are already."""
        # Clipping by hand needs it before the step does, and an empty minibatch leaves nothing to divide.
        held = _with_gradients(optimizer)
        if optimizer in self._unscaled or not held:
            return
        shards = [parameter for parameter in held if isinstance(parameter, DTensor)]
        scalars = {}
        if shards:  # torch (2.9 to 2.13) cannot unscale shards and scalars in one list
            scalars = {p: cast(Tensor, p.grad) for p in held if not isinstance(p, DTensor)}
        if not all(gradient.isfinite() for gradient in scalars.values()):
            # all ranks have the same scalars, so all leave out the step
            cast(Tensor, shards[0].grad).fill_(math.nan)
        for parameter in scalars:
            parameter.grad = None
        super().unscale_(optimizer)
        for parameter, gradient in scalars.items():
            parameter.grad = gradient / self.get_scale()
        self._unscaled.append(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not _with_gradients(optimizer):
            return optimizer.step(*args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled or new_scale is not None:
            super().update(new_scale)
        self._unscaled.clear()


def unit_of(weights: Iterable[float]) -> float | None:
    """The power of two that is nearest to the mean of some weights; ``None`` if none of them is a positive number."""
    usable = [weight for weight in weights if 0 < weight < math.inf]
    if not usable:
        return None
    return 2.0 ** round(math.log2(fmean(usable)))


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer that have a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.grad is not None]


class TrainingSteps(Protocol):
    """The `Training` of ``step.py``, as far as precision has to do with it."""

    def loss_divisor(self) -> float:
        """What the losses of this step are divided by before their backward pass."""

    def around_backward(self) -> AbstractContextManager[None]:
        """The context of every backward pass."""

    def settle(self) -> None:
        """Complete the gradients."""

    def leaves_parts(self) -> bool:
        """Whether the backward pass that has ended leaves nothing in the gradients yet."""


#: By the first part of a precision. `None`: the dtype of the parameters.
_COMPUTE_DTYPE = {"32": None, "bf16": torch.bfloat16, "16": torch.float16}

_WEIGHT_UNIT = "odc_weight_unit"
Data = TypeVar("Data")


class ODCPrecision(FSDPPrecision):
    """Lightning's ``FSDPPrecision`` for ``fully_shard``: autocast on the right device, clipping by the global norm."""

    def __init__(self, precision: str, device_type: str = "cpu") -> None:
        super().__init__(cast(Any, precision))
        self.compute_dtype = _COMPUTE_DTYPE[precision.split("-")[0]]
        # Instead of the one that the base class makes, which is for CUDA and FSDP1.
        self.scaler: LossScaler | None = None  # type: ignore[assignment]
        if precision == "16-mixed":
            self.scaler = LossScaler(device_type)
        self.device_type = device_type
        self.widens = True  # "32-true" widens what is sharded; as under DDP, it leaves a whole model as it is
        self.training: TrainingSteps | None = None  # while a fit runs
        self.weight_unit: float | None = None  # Note [Weights under fp16]; `None`: not agreed
        self.gradient_norm: Tensor | None = None  # over all ranks, before they were clipped last

    def policy(self, on_demand: bool) -> MixedPrecisionPolicy:
        """Compute in the compute dtype; sum gradients in fp32."""
        reduce_dtype = None
        if self.compute_dtype is not None:
            reduce_dtype = torch.float32
        return precision_policy(self.compute_dtype, reduce_dtype, on_demand)

    @property
    def _half(self) -> torch.dtype | None:
        """What everything is kept in, if that is narrower than fp32."""
        if "mixed" in self.precision:
            return None
        return self.compute_dtype

    def _is_named(self, tensor: Tensor) -> bool:
        """Whether the precision names what becomes of a tensor, and it has another dtype."""
        # 16 and bf16 stand for all real numbers, 32 for those that are narrower: they lose nothing. Digits of
        # float64 and imaginary parts would be lost silently. The dtype of quantised weights (of bitsandbytes,
        # say) is how their bits are stored.
        dtype = tensor.dtype
        if not dtype.is_floating_point or hasattr(tensor, "quant_state"):
            return False
        if self._half is None:
            is_widened = self.widens or "mixed" in self.precision
            return is_widened and dtype.itemsize < torch.float32.itemsize
        return dtype != self._half

    def _converted(self, tensor: Tensor) -> Tensor:
        if self._is_named(tensor):
            return tensor.to(self._half or torch.float32)
        return tensor

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast what the precision names, and nothing else. ``module.to`` would cast complex tensors, too."""
        if "mixed" not in self.precision and any(map(self._is_named, parameters_and_buffers(module))):
            _compat_lightning.convert(module, self._converted, self._half or torch.float32)
        return module

    def convert_input(self, data: Data) -> Data:
        if not any(map(self._is_named, tensors_in(data))):
            return data  # the object itself: a copy of a class of the user's may have lost what is no tensor
        return cast(Data, apply_to_collection(data, Tensor, self._converted))

    def tensor_init_context(self) -> AbstractContextManager[object]:
        if self._half is None:
            return nullcontext()
        return super().tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[object]:
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[object]:
        if "mixed" in self.precision:
            return torch.autocast(self.device_type, dtype=cast(torch.dtype, self.compute_dtype))
        return self.tensor_init_context()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.training is not None:
            divisor = self.training.loss_divisor()
            if divisor != 1.0:
                tensor = tensor / divisor
        return super().pre_backward(tensor, module)

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Optimizer | None,
        *args: object,
        **kwargs: object,
    ) -> None:
        context: AbstractContextManager[None] = nullcontext()
        if self.training is not None:
            context = self.training.around_backward()
        with context:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.training is not None and self.training.leaves_parts():
            return tensor.detach()  # `on_after_backward` is called once, and finds gradients
        return super().post_backward(tensor, module)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.training is not None:
            self.training.settle()  # gradients may not have arrived yet
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(
        self, optimizer: Optimizer, clip_val: float = 0.0, *_: object, **__: object
    ) -> None:
        """Clip by the norm over all ranks: sharded gradients know that they are parts of a whole."""
        self.gradient_norm = clip(cast(Iterable[Tensor], self.main_params(optimizer)), clip_val)

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        if self.weight_unit is not None:
            state[_WEIGHT_UNIT] = self.weight_unit
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        scaling = dict(state_dict)
        self.weight_unit = scaling.pop(_WEIGHT_UNIT, None)
        if scaling:  # not after `16-true`, which scales nothing
            super().load_state_dict(scaling)


def warn_of_eps(optimizers: Sequence[Optimizer]) -> None:
    """Say that an optimizer in float16 would divide 0 by 0."""
    for eps in [group.get("eps") for optimizer in optimizers for group in optimizer.param_groups]:
        if eps and not torch.tensor(eps, dtype=torch.float16):
            rank_zero_warn(
                f"eps={eps:g} of the optimizer is 0 in float16, so weights become NaN in the first steps. Write "
                'AdamW(..., eps=1e-4), or Trainer(precision="bf16-true").'
            )
            return
