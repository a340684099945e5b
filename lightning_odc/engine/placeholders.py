"""What users do to ``.grad`` between a backward pass and the settle.

Note [Gradients arrive late]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After a backward pass the gradients lie in the accumulators of their owners, and ``fully_shard`` has put zeros into
``.grad`` of the shards. Until the engine settles and puts the real gradients there, a *placeholder* stands in for them,
so that what a user does meanwhile is understood or refused, but never silently without effect:

- emptying it (``zero_grad()``) drops the gradient of that shard, as under stock sharding. Before a later backward pass
  adds to the same accumulators, the ranks meet and empty them;
- anything else (looking at the gradient, clipping it by hand) is an error that shows what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.engine.units import ParamSlot
from lightning_odc.errors import ODCError


class Placeholder(Tensor):
    """Has shape, dtype and device of a gradient, but no values: it can be emptied, and nothing else."""

    slot: ParamSlot
    zeros: Tensor
    zeroed: bool

    @staticmethod
    def of(slot: ParamSlot) -> Placeholder:
        home = slot.home
        scalar = torch.zeros((), dtype=home.dtype, device=home.device)
        placeholder = scalar.expand(home.shape).as_subclass(Placeholder)
        placeholder.slot, placeholder.zeroed = slot, False
        return placeholder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "requires_grad_", "__repr__"):
            with _compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        found = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        placeholders = [item for item in found if isinstance(item, Placeholder)]
        if func in _compat.ZEROING:
            for placeholder in placeholders:
                placeholder.zeroed = True
            return args[0]
        name = placeholders[0].slot.name if placeholders else "a parameter"
        raise ODCError(
            f"The gradient of {name!r} is not complete yet: it arrives when all ranks have met, at the optimizer step. "
            "Clip with `self.clip_gradients(optimizer, ...)`; look at gradients or change them in "
            "`on_before_optimizer_step` or, with manual optimization, after "
            "`self.trainer.strategy.settle_gradients()`."
        )


class Placeholders:
    """The placeholders of this rank's shards. They are *laid* after a backward pass, and *lifted* before the next."""

    def __init__(self) -> None:
        self._laid: dict[ParamSlot, Placeholder] = {}
        self._made: dict[ParamSlot, Placeholder] = {}

    def lay(self, slots: Iterable[ParamSlot]) -> None:
        """Put placeholders over the zeros that a backward pass left."""
        for slot in slots:
            grad = slot.home.grad
            if grad is not None and slot not in self._laid:
                if slot not in self._made:
                    self._made[slot] = Placeholder.of(slot)
                placeholder = self._laid[slot] = self._made[slot]
                placeholder.zeros, placeholder.zeroed = grad, False
                slot.home.grad = placeholder

    def lift(self) -> None:
        """Put back what was under the placeholders; those that were set to ``None`` are forgotten."""
        laid, self._laid = self._laid, {}
        for slot, placeholder in laid.items():
            if slot.home.grad is placeholder:
                slot.home.grad = placeholder.zeros
            del placeholder.zeros

    def emptied(self) -> set[ParamSlot]:
        """The parameters of which somebody emptied the gradient.

        Raises:
            ODCError: somebody replaced a gradient.
        """
        gone = set()
        for slot, placeholder in self._laid.items():
            grad = slot.home.grad
            if grad is None or placeholder.zeroed:
                gone.add(slot)
            elif grad is not placeholder:
                raise ODCError(
                    f"The gradient of {slot.name!r} was replaced before it was complete. Change gradients in "
                    "`on_before_optimizer_step` or, with manual optimization, after "
                    "`self.trainer.strategy.settle_gradients()`."
                )
        return gone

    def check_lifted(self, slots: Iterable[ParamSlot]) -> None:
        """Refuse a backward pass that the engine was not told of.

        Raises:
            ODCError: there is a placeholder where ``fully_shard`` is going to add.
        """
        for slot in slots:
            if slot in self._laid:
                raise ODCError(
                    "Several backward passes in one optimizer step must go through Lightning: write "
                    "`self.manual_backward(loss)` instead of `loss.backward()`."
                )
