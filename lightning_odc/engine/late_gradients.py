"""Gradients between a backward pass and the settle: the content of ``.grad``, and the hooks that wait for it.

Note [Gradients arrive late]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After a backward pass the gradients lie in the accumulators of their owners, and ``fully_shard`` has put zeros into
``.grad`` of the shards. Until the engine settles, these zeros are *placeholders*: a subclass of ``DTensor`` that
intercepts every operation. So the user's operations are never silently without effect:

- emptying it (``zero_grad()``) drops the gradient of that shard, as under stock sharding. Before a later backward pass
  adds to the same accumulators, the ranks meet and empty them;
- anything else (looking at the gradient, clipping it by hand) is an error that shows what to write.

A stand-in takes the place of a hook of ``register_post_accumulate_grad_hook`` until the step settles. Then the hook is
called, with the gradient of the whole minibatch in ``.grad``: on every rank, in the order of the units.

Note [Who drops a gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank without microbatches has no placeholder, so ``zero_grad()`` leaves no trace there. Yet its accumulators hold
gradients of other ranks. With manual optimization, a `Minibatch` that is empty on rank 1, and two passes, of which only
the second counts::

    rank 0   backward   zero_grad   backward: meets to drop            settle: meets to settle
    rank 1              zero_grad   settle: meets to settle, drops     settle: meets to settle again

So a rank that drops gradients names them, and every other rank drops those for which it has no placeholder. That is
right only if it has added nothing since. In a later batch it may, so all ranks meet before that batch begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_odc import _compat
from lightning_odc.engine.unit_calls import tensors_in
from lightning_odc.engine.unit_sum import UnitSum
from lightning_odc.engine.units import ParamSlot, Unit
from lightning_odc.errors import SETTLE, DisagreementError, ODCError
from lightning_odc.protocol.protocol import DISCARD, Protocol
from lightning_odc.protocol.records import any_flags, flags_to_hex

#: What may be done to a gradient that has no values yet: ask for its attributes, but not for those with values.
_HARMLESS = ("__get__", "requires_grad_", "__repr__")
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
_TOGETHER = (
    "    self.trainer.strategy.settle_gradients()\n"
    "    optimizer.zero_grad()\n"
    "    self.trainer.strategy.publish_parameters()"
)


class Placeholder(DTensor):
    """Zeros in the place of a gradient: they can be emptied, and nothing else."""

    parameter_name: str
    zeroed: bool  # the user emptied it

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        raise _incomplete(self.parameter_name)

    full_tensor = redistribute = to_local

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if getattr(func, "__name__", "") in _HARMLESS and attribute not in _VALUES:
            with _compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        placeholders = [tensor for tensor in tensors_in(args) if isinstance(tensor, Placeholder)]
        if func in _compat.ZEROING:
            for placeholder in placeholders:
                placeholder.zeroed = True
                _compat.local_of(placeholder).zero_()  # it may hold the gradient of the step before
            return args[0]
        raise _incomplete(placeholders[0].parameter_name if placeholders else "a parameter")


def _incomplete(name: str) -> ODCError:
    return ODCError(
        f"The gradient of {name!r} is not complete yet: it arrives when all ranks synchronize, at the optimizer step. "
        "Clip with `self.clip_gradients(optimizer, ...)`; look at gradients or change them in "
        f"`on_before_optimizer_step` or, with manual optimization, after {SETTLE}."
    )


class Placeholders:
    """The placeholders of this rank's shards: *laid* after a backward pass, *lifted* when the engine settles.

    What the user emptied is dropped, see Note [Who drops a gradient].
    """

    def __init__(self, units: Sequence[Unit], sums: Sequence[UnitSum], protocol: Protocol) -> None:
        self._units = units
        self._sums = sums
        self._protocol = protocol
        self._slots = [slot for unit in units for slot in unit.slots]
        self.laid: dict[ParamSlot, Placeholder] = {}
        self._own: set[ParamSlot] = set()  # what this rank comes to a meeting for, to drop it
        protocol.drop_together = self._drop_together

    def lay(self, slots: Iterable[ParamSlot]) -> None:
        """Turn the zeros that a backward pass left into placeholders, or lay them where a sum took the gradient."""
        for slot in slots:
            shard = slot.sharded_param
            grad: Any = shard.grad
            if grad is None:
                grad = _compat.sharded_like(shard, torch.zeros_like(_compat.local_of(shard)))
                shard.grad = grad
            if type(grad) is not Placeholder:
                grad.__class__ = Placeholder
                grad.parameter_name = slot.name
            grad.zeroed = False
            self.laid[slot] = grad

    def forget(self) -> None:
        """Forget what was emptied so far: Lightning empties gradients before the last backward pass of a minibatch."""
        self.laid.clear()  # the objects keep their class: `lay` finds them, since the parameters are in use

    def lift(self) -> None:
        """Turn placeholders back into zeros; those that were set to ``None`` are forgotten."""
        for placeholder in self.laid.values():
            placeholder.__class__ = DTensor  # type: ignore[assignment]
        self.laid.clear()

    def emptied(self) -> set[ParamSlot]:
        """The parameters of which the user emptied the gradient."""
        gone = set()
        for slot, placeholder in self.laid.items():
            grad = slot.sharded_param.grad
            if grad is None or placeholder.zeroed:
                gone.add(slot)
            elif grad is not placeholder:
                raise ODCError(
                    f"The gradient of {slot.name!r} was replaced before it was complete. Change gradients in "
                    f"`on_before_optimizer_step` or, with manual optimization, after {SETTLE}."
                )
        return gone

    def drop_emptied(self) -> None:
        """Drop what the user emptied on this rank, if anything."""
        emptied = self.emptied()
        if emptied:
            self.drop(emptied)

    def drop_emptied_anywhere(self) -> None:
        """Drop what the user emptied on any rank. All ranks together."""
        emptied = self.emptied()
        if any(self._protocol.meet("begin another Minibatch of a step", bool(emptied))):
            self.drop(emptied)

    def drop(self, slots: set[ParamSlot]) -> None:
        """Empty own accumulators of some parameters, after all ranks have added to them and before one adds again."""
        self._own = slots
        self._protocol.meet(DISCARD, flags_to_hex([slot in slots for slot in self._slots]))

    def _drop_together(self, named: Sequence[str], came_for: str) -> None:
        """All ranks have met, some of them to drop gradients."""
        laid = self.laid.keys()
        theirs = set(compress(self._slots, any_flags(named, len(self._slots))))
        own = self._own | self.emptied()
        left = [slot.name for slot in self._slots if slot in theirs & laid - own]
        if left and came_for != DISCARD:
            raise DisagreementError(
                f"Other ranks emptied the gradient of {left[0]!r} between two backward passes, and this rank did not. "
                "Where ranks may have no microbatch before that, drop gradients on all ranks in this way:\n"
                f"{_TOGETHER}"
            )
        dropped = own | theirs - laid
        for unit in self._units:
            for slot in dropped.intersection(unit.grad_slots):
                self._protocol.windows[unit.index].clear(slot.grad_offset, slot.padded_numel)
                self._sums[unit.index].clear(slot)
                unit.reduced_in_step.discard(slot)
        self.lift()
        self._own = set()
        self._protocol.meet("gradients are discarded")


class LateHooks:
    """The hooks of one model's parameters, which are shards, or whole."""

    def __init__(self, of_tensors: bool = False) -> None:
        self.holding = True  # held hooks wait; else they are called when ``fully_shard`` calls them
        self._calling = False
        # Those of `register_hook`, too, which may return another gradient.
        self._kinds = [_compat.gradient_hooks_of]
        if of_tensors:
            self._kinds.append(_compat.tensor_hooks_of)

    def hold(self, parameter: Tensor) -> None:
        """Let the hooks of a parameter wait; a gradient for it is under way."""
        for hooks_of in self._kinds:
            hooks = hooks_of(parameter)
            for key, hook in hooks.items():
                if not isinstance(hook, DeferredHook):
                    hooks[key] = DeferredHook(hook, self)  # under its key, so the user's handle removes it

    def changed(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What hooks of the tensor make of its gradient, which is complete."""
        for hook in list(_compat.tensor_hooks_of(parameter).values()):
            changed = _given(hook)(gradient)
            if changed is not None:
                gradient = changed
        return gradient

    def call(self, shard: Tensor) -> None:
        """Call the hooks of a sharded parameter, whose gradient is complete."""
        hooks = _compat.gradient_hooks_of(shard)
        self._calling = True
        try:
            for hook in list(hooks.values()):
                _given(hook)(shard)
        finally:
            self._calling = False

    def check_outside(self) -> None:
        """Refuse to end a step inside a hook."""
        if self._calling:
            raise ODCError(
                "A hook of `register_post_accumulate_grad_hook` called `step()` of an optimizer of Lightning, or "
                "`settle_gradients()`, while ranks settle the gradients. In hooks, step with optimizers of torch: "
                "`torch.optim.AdamW([parameter]).step()`, not `self.optimizers()[i].step()`."
            )

    def release(self, parameters: Iterable[Tensor]) -> None:
        """Give hooks back to who calls them. Idempotent."""
        for parameter in parameters:
            for hooks_of in self._kinds:
                hooks = hooks_of(parameter)
                for key, hook in hooks.items():
                    hooks[key] = _given(hook)


@dataclass(frozen=True)
class DeferredHook:
    """Stands where a hook was registered."""

    hook: Callable[[Tensor], Any]
    hooks: LateHooks

    def __call__(self, gradient: Tensor) -> Any:
        if self.hooks.holding:
            return None
        return self.hook(gradient)


def _given(hook: Any) -> Any:
    """A hook as its user has registered it."""
    return hook.hook if isinstance(hook, DeferredHook) else hook
