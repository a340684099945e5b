"""The gradients of parameters that this rank has whole, from a backward pass to the end of its step.

Note [Apart or in place]
~~~~~~~~~~~~~~~~~~~~~~~~
Where microbatches of a minibatch run, or Lightning goes backward, gradients are taken out of ``.grad`` behind each
pass. So a pass that breaks off leaves nothing, and Lightning's ``zero_grad()`` before the last pass of a step drops
nothing. Hooks of parameters wait until the gradient of the whole minibatch is complete, as in one process.

Where users go backward themselves, gradients accumulate in ``.grad`` as always, and users may empty it. They are taken
from there when the step settles. Hooks wait there, too. Until then, each rank has its own part, and what clips it clips
by the norm of a part. So a gradient that has changed behind its last pass is refused.

Note [Parameters without a dimension]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A parameter such as the ``logit_scale`` of CLIP cannot be cut. So every rank of a sharded model has it whole, and sums
its gradients until the step settles. Then every rank tells its sums in its `SettleRecord`, and all ranks add them up in
rank order and divide, as in Note [Who divides].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_odc.engine.late_gradients import LateHooks
from lightning_odc.errors import SETTLE, ODCError
from lightning_odc.protocol.flat_sums import Gradients
from lightning_odc.protocol.transports.base import Rendezvous


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
        take: Callable[[Gradients], None],
        of_tensors: bool = True,
    ) -> None:
        self.parameters = parameters
        self._take = take
        self._of_tensors = of_tensors
        self.hooks = LateHooks(of_tensors)
        self._complete: dict[nn.Parameter, tuple[TensorWeakRef, int]] = {}  # what was given, and its version
        self._parts: dict[
            nn.Parameter, tuple[TensorWeakRef, int]
        ] = {}  # what the last pass left, and its version

    @contextmanager
    def backward(self, apart: bool, counts: bool) -> Iterator[None]:
        """Around a backward pass; if it does not ``count``, its gradients are zeros, even if they are not finite."""
        self.hooks.holding = apart or self._of_tensors
        before = {parameter: parameter.grad for parameter in self.parameters}
        for parameter in before:
            self.hooks.hold(parameter)
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
        if not apart:
            self._remember_parts()

    def _remember_parts(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._parts[parameter] = (TensorWeakRef(parameter.grad), parameter.grad._version)

    def refuse_changed(self) -> None:
        """Refuse gradients that users have changed while they are parts; zeros are none."""
        for parameter, (part, version) in self._parts.items():
            gradient = parameter.grad
            if gradient is None or (part() is gradient and gradient._version == version):
                continue
            if gradient.count_nonzero():
                raise ODCError(
                    "Gradients were changed after their backward pass, while each rank had only its own part of them. "
                    f"Clip with `clip_gradients` of Lightning or Fabric; else change gradients after {SETTLE}."
                )

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
        self._parts.clear()
        self._take(visible)

    def give(self, totals: Gradients) -> None:
        """Put complete gradients into ``.grad``, and call the hooks that waited for them."""
        for parameter, total in totals.items():
            gradient = total
            if self.hooks.holding:
                gradient = self.hooks.changed(parameter, total)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            if self.hooks.holding:
                self.hooks.call(parameter)
            if parameter.grad is not None:
                self._complete[parameter] = (TensorWeakRef(parameter.grad), parameter.grad._version)

    def release(self) -> None:
        """Give hooks back to autograd. Idempotent."""
        self.hooks.release(self.parameters)


def scalars_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters without a dimension. Complex ones are left to ``fully_shard``, which refuses them."""
    found = (p for p in module.parameters() if not p.dim() and not isinstance(p, DTensor))
    return [parameter for parameter in found if not parameter.is_complex()]


class Scalars:
    """Their gradients in an optimizer step; see Note [Parameters without a dimension]."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []  # in the order of the model
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._zeros: dict[nn.Parameter, tuple[Tensor, int]] = {}  # what users see in `.grad` meanwhile
        self._gradients = WholeGradients((), self._add)

    @torch.no_grad()
    def attach(self, model: nn.Module, rendezvous: Rendezvous) -> None:
        """Find those of a model, and give them the values of rank 0. All ranks together."""
        self.parameters = scalars_of(model)
        self._gradients = WholeGradients(self.parameters, self._add)
        if not self.parameters:
            return
        values = rendezvous([parameter.item() for parameter in self.parameters])[0]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.fill_(value)

    def _add(self, gradients: Gradients) -> None:
        for parameter, gradient in gradients.items():
            new = gradient.detach().double()
            if parameter in self._sums:
                new = self._sums[parameter] + new
            self._sums[parameter] = new

    @contextmanager
    def backward(self, apart: bool, counts: bool) -> Iterator[None]:
        """Around a backward pass, see `WholeGradients.backward`."""
        self._zeros.clear()  # it is Lightning that empties them, before the last backward pass of a minibatch
        with self._gradients.backward(apart, counts):
            yield
        if apart:  # zeros stand for the sums, and users drop these by `zero_grad()`
            for parameter in self._sums:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._zeros[parameter] = (parameter.grad, parameter.grad._version)

    def take(self, is_weighted: bool, has_visible: bool) -> list[float | None]:
        """This rank's sums, for its record; `None` where there was no gradient."""
        self._gradients.hooks.check_outside()
        for parameter, (zeros, version) in self._zeros.items():
            if parameter.grad is not zeros or zeros._version != version:
                self._sums.pop(parameter, None)
        self._zeros.clear()
        if has_visible:
            self._gradients.take_visible(is_weighted)
        values = []
        if self._sums:
            values = torch.stack([*self._sums.values()]).tolist()  # waits for the device once
        sums = dict(zip(self._sums, values, strict=True))
        self.clear()
        return [sums.get(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def give(self, by_rank: Sequence[Sequence[float | None]], scale: float) -> None:
        """Put the sums over ranks, times ``scale``, into ``.grad``, and call the hooks that waited for it."""
        totals = {}
        for parameter, *sums in zip(self.parameters, *by_rank, strict=True):
            found = [value for value in sums if value is not None]
            if found:
                totals[parameter] = torch.full_like(parameter, sum(found) * scale)
        self._gradients.give(totals)

    def clear(self) -> None:
        """Forget all gradients of the step."""
        self._sums.clear()
        self._zeros.clear()

    def close(self) -> None:
        """Give the parameters back to autograd. What was summed stays, for a new layout. Idempotent."""
        self._gradients.release()
