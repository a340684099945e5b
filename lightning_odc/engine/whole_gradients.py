"""The gradients of parameters that this rank has whole, from a backward pass to the end of its step.

Note [Apart or in place]
~~~~~~~~~~~~~~~~~~~~~~~~
Where microbatches of a minibatch run, or Lightning goes backward, gradients are taken out of ``.grad`` behind each
pass. So a pass that breaks off leaves nothing, and Lightning's ``zero_grad()`` before the last pass of a step drops
nothing. Hooks of parameters wait until the gradient of the whole minibatch is complete, as in one process.

Where users go backward themselves, gradients accumulate in ``.grad`` as always: users may empty it, or change it. They
are taken from there when the step settles. Hooks wait there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lightning_odc.engine.late_gradients import LateHooks
from lightning_odc.errors import ODCError


class WholeGradients:
    """What becomes of ``.grad`` of some parameters; see Note [Apart or in place].

    Args:
        parameters: Those that are trained.
        take: Gets the gradients of each pass, or of all passes of a step, to add them to sums.
        of_tensors: Whether hooks of `register_hook` wait, too, and not only those of complete gradients. Without it,
            none waits for a pass in place: `fully_shard` calls them with a complete gradient.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        take: Callable[[Mapping[nn.Parameter, Tensor]], None],
        of_tensors: bool = True,
    ) -> None:
        self.parameters = parameters
        self._take = take
        self._of_tensors = of_tensors
        self._hooks = LateHooks(of_tensors)
        self._complete: dict[nn.Parameter, tuple[TensorWeakRef, int]] = {}  # what was given, and its version

    @contextmanager
    def backward(self, apart: bool, counts: bool) -> Iterator[None]:
        """Around a backward pass; if it does not ``count``, its gradients are zeros, even if they are not finite."""
        self._hooks.holding = apart or self._of_tensors
        before = {parameter: parameter.grad for parameter in self.parameters}
        for parameter in before:
            self._hooks.hold(parameter)
            if apart:
                parameter.grad = None
        gradients = {}
        try:
            yield
            for parameter in before:
                if apart and parameter.grad is not None:
                    gradients[parameter] = parameter.grad
        except BaseException:
            apart = True  # what was there before comes back
            raise
        finally:
            if apart:
                for parameter, kept in before.items():
                    parameter.grad = kept
        if not counts:
            gradients = {parameter: torch.zeros_like(gradient) for parameter, gradient in gradients.items()}
        self._take(gradients)

    def take_visible(self, is_weighted: bool) -> None:
        """Take what has accumulated in ``.grad``."""
        visible = {}
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            is_left = False
            if parameter in self._complete:
                complete, version = self._complete[parameter]
                is_left = complete() is gradient
                if is_left and gradient._version == version:
                    continue
            if is_left and is_weighted:
                raise ODCError(
                    "Gradients of the step before are still in `.grad`, and those of this step were added to them, "
                    "which have another weight. Call `optimizer.zero_grad()` after every step."
                )
            visible[parameter] = gradient
            parameter.grad = None
        self._take(visible)

    def give(self, totals: Mapping[nn.Parameter, Tensor]) -> None:
        """Put complete gradients into ``.grad``, and call the hooks that waited for them."""
        for parameter, total in totals.items():
            gradient = total
            if self._hooks.holding:
                gradient = self._hooks.changed(parameter, total)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            if self._hooks.holding:
                self._hooks.call(parameter)
            if parameter.grad is not None:
                self._complete[parameter] = (TensorWeakRef(parameter.grad), parameter.grad._version)

    def check_outside(self) -> None:
        """Refuse to end a step inside a hook."""
        self._hooks.check_outside()

    def release(self) -> None:
        """Give hooks back to autograd. Idempotent."""
        self._hooks.release(self.parameters)
