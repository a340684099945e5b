"""Hooks of sharded parameters, held back until the gradient is complete.

Note [Hooks wait for the gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` calls what ``register_post_accumulate_grad_hook`` registered on a sharded parameter right after its
reduce-scatter, once per backward pass. At that moment the gradient lies in the accumulator of its owner, and ``.grad``
holds zeros. So a hook that is found when its parameter receives a gradient is held: ``fully_shard`` calls a stand-in,
which does nothing. When the step settles, the hook is called with the gradient of the whole minibatch in ``.grad``:
once per optimizer step, on every rank, in the order of the units. The stand-in has the hook's own key, so that the
user's handle still removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_odc import _compat
from lightning_odc.errors import ODCError


class LateHooks:
    """The hooks of one model's shards.

    Attributes:
        holding: hooks that are held wait; otherwise they are called when ``fully_shard`` calls them.
    """

    def __init__(self) -> None:
        self.holding = True
        self._calling = False

    def hold(self, shard: Tensor) -> None:
        """Let the hooks of a sharded parameter wait; a gradient for it is under way."""
        hooks = _compat.gradient_hooks_of(shard)
        for key, hook in hooks.items():
            if not isinstance(hook, _Held):
                hooks[key] = _Held(hook, self)

    def call(self, shard: Tensor) -> None:
        """Call the hooks of a sharded parameter, whose gradient is complete."""
        hooks = _compat.gradient_hooks_of(shard)
        self._calling = True
        try:
            for hook in list(hooks.values()):
                (hook.hook if isinstance(hook, _Held) else hook)(shard)
        finally:
            self._calling = False

    def check_outside(self) -> None:
        """Refuse to end a step inside a hook.

        Raises:
            ODCError: a hook is running.
        """
        if self._calling:
            raise ODCError(
                "A hook of `register_post_accumulate_grad_hook` called `step()` of an optimizer of Lightning, or "
                "`settle_gradients()`, while ranks settle the gradients. In hooks, step with optimizers of torch: "
                "`torch.optim.AdamW([parameter]).step()`, not `self.optimizers()[i].step()`."
            )

    def release(self, shards: Iterable[Tensor]) -> None:
        """Give hooks back to ``fully_shard``. Idempotent."""
        for shard in shards:
            hooks = _compat.gradient_hooks_of(shard)
            for key, hook in hooks.items():
                if isinstance(hook, _Held):
                    hooks[key] = hook.hook


class _Held:
    """Stands where a hook was registered."""

    def __init__(self, hook: Callable[[Tensor], Any], hooks: LateHooks) -> None:
        self.hook = hook
        self._hooks = hooks

    def __call__(self, shard: Tensor) -> None:
        if not self._hooks.holding:
            self.hook(shard)
