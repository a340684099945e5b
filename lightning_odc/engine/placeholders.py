"""What users do to ``.grad`` between a backward pass and the settle.

Note [Gradients arrive late]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After a backward pass the gradients lie in the accumulators of their owners, and ``fully_shard`` has put zeros into
``.grad`` of the shards. Until the engine settles and puts the real gradients there, these zeros are *placeholders*: a
subclass of ``DTensor`` of which every operation is intercepted. ``fully_shard`` adds more zeros to the local tensor
inside, which is not intercepted. So what a user does meanwhile is understood or refused, but never silently without
effect:

- emptying it (``zero_grad()``) drops the gradient of that shard, as under stock sharding. Before a later backward pass
  adds to the same accumulators, the ranks meet and empty them;
- anything else (looking at the gradient, clipping it by hand) is an error that shows what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch.distributed.tensor import DTensor

from lightning_odc import _compat
from lightning_odc.engine.units import ParamSlot
from lightning_odc.errors import ODCError

#: What may be done to a gradient that has no values yet: ask for its attributes, but not for those with values.
_HARMLESS = ("__get__", "requires_grad_", "__repr__")
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")


class Placeholder(DTensor):
    """Zeros in the place of a gradient: they can be emptied, and nothing else.

    Attributes:
        parameter_name: The name of the parameter.
        zeroed: Somebody emptied it.
    """

    parameter_name: str
    zeroed: bool

    def to_local(self, **kwargs: Any) -> Any:
        raise _incomplete(self.parameter_name)

    def full_tensor(self, **kwargs: Any) -> Any:
        raise _incomplete(self.parameter_name)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        raise _incomplete(self.parameter_name)

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
        found = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        placeholders = [item for item in found if isinstance(item, Placeholder)]
        if func in _compat.ZEROING:
            for placeholder in placeholders:
                placeholder.zeroed = True
            return args[0]
        raise _incomplete(placeholders[0].parameter_name if placeholders else "a parameter")


def _incomplete(name: str) -> ODCError:
    return ODCError(
        f"The gradient of {name!r} is not complete yet: it arrives when all ranks have met, at the optimizer step. "
        "Clip with `self.clip_gradients(optimizer, ...)`; look at gradients or change them in "
        "`on_before_optimizer_step` or, with manual optimization, after "
        "`self.trainer.strategy.settle_gradients()`."
    )


class Placeholders:
    """The placeholders of this rank's shards: *laid* after a backward pass, *lifted* when the engine settles."""

    def __init__(self) -> None:
        self._laid: dict[ParamSlot, Placeholder] = {}

    def lay(self, slots: Iterable[ParamSlot]) -> None:
        """Turn the zeros that a backward pass left into placeholders."""
        for slot in slots:
            grad = cast(Placeholder | None, slot.home.grad)
            if grad is None:
                continue
            if type(grad) is not Placeholder:
                grad.__class__ = Placeholder
                grad.parameter_name = slot.name
            grad.zeroed = False
            self._laid[slot] = grad

    def forget(self) -> None:
        """Forget what was emptied so far: Lightning empties gradients before the last backward pass of a share.

        Placeholders that are still there keep their class; `lay` finds them again, since the parameters are in use.
        """
        self._laid.clear()

    def lift(self) -> None:
        """Turn placeholders back into zeros; those that were set to ``None`` are forgotten."""
        for placeholder in self._laid.values():
            placeholder.__class__ = DTensor  # type: ignore[assignment]
        self._laid.clear()

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

    def check_not_laid(self, slots: Iterable[ParamSlot]) -> None:
        """Refuse a second backward pass that the engine was not told of.

        Raises:
            ODCError: a placeholder stands for the gradient of a parameter.
        """
        for slot in slots:
            if slot in self._laid:
                raise ODCError(
                    "Several backward passes in one optimizer step must go through Lightning: write "
                    "`self.manual_backward(loss)` instead of `loss.backward()`."
                )
