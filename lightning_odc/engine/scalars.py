"""Parameters without a dimension, such as the ``logit_scale`` of CLIP. ``fully_shard`` cannot cut them.

Every rank has them whole. Their gradients are summed on each rank, apart from ``.grad``, until the step settles. Then
every rank tells its sums in its `SettleRecord`, and all ranks add them up in rank order and divide, as in Note [Who
divides]. So the values stay equal on all ranks. Optimizers, clipping and checkpoints get ordinary tensors: `DTensor`
takes a tensor without a dimension for a replicated one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_odc.engine.late_gradients import LateHooks
from lightning_odc.engine.transports.base import Rendezvous


def scalars_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters without a dimension. Complex ones are left to ``fully_shard``, which refuses them."""
    found = (p for p in module.parameters() if not p.dim() and not isinstance(p, DTensor))
    return [parameter for parameter in found if not parameter.is_complex()]


class Scalars:
    """The gradients of such parameters in an optimizer step."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []  # in the order of the model
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._counts = True
        # What hooks leave in ``.grad``, and its version, which every change raises. See Note [Gradients arrive late].
        self._zeros: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._hooks: list[RemovableHandle] = []
        self._late_hooks = LateHooks()

    @torch.no_grad()
    def attach(self, model: nn.Module, rendezvous: Rendezvous) -> None:
        """Find those of a model, and give them the values of rank 0. All ranks together."""
        self.parameters = scalars_of(model)
        if not self.parameters:
            return
        values = rendezvous([parameter.item() for parameter in self.parameters])[0]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.fill_(value)
            if parameter.is_floating_point():
                trains = parameter.requires_grad
                parameter.requires_grad_()  # frozen ones take no hook
                self._hooks.append(parameter.register_hook(partial(self._take_away, parameter)))
                parameter.requires_grad_(trains)

    def _take_away(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self._late_hooks.hold(parameter)
        zeros = torch.zeros_like(gradient)
        new = (gradient if self._counts else zeros).double()
        self._sums[parameter] = self._sums[parameter] + new if parameter in self._sums else new
        return zeros

    @contextmanager
    def backward(self, counts: bool) -> Iterator[None]:
        """Around a backward pass, of which nothing stays if it breaks off. See `Engine.backward`."""
        self._zeros.clear()  # it is Lightning that empties them, before the last backward pass of a minibatch
        before, self._counts = dict(self._sums), counts
        try:
            yield
        except BaseException:
            self._sums = before
            raise
        finally:
            self._counts = True
        self._zeros = {p: (p.grad, p.grad._version) for p in self._sums if p.grad is not None}

    def drop_emptied(self) -> None:
        """Forget what the user's ``zero_grad()`` has emptied."""
        for parameter, (zeros, version) in self._zeros.items():
            if parameter.grad is not zeros or zeros._version != version:
                self._sums.pop(parameter, None)
        self._zeros.clear()

    def take(self) -> list[float | None]:
        """This rank's sums, for its record; `None` where there was no gradient."""
        self._late_hooks.check_outside()
        self.drop_emptied()
        values = torch.stack([*self._sums.values()]).tolist() if self._sums else []
        sums = dict(zip(self._sums, values, strict=True))
        self.clear()
        return [sums.get(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def give(self, by_rank: Sequence[Sequence[float | None]], scale: float) -> None:
        """Put the sums over ranks, times ``scale``, into ``.grad``, and call the hooks that waited for it."""
        for parameter, *sums in zip(self.parameters, *by_rank, strict=True):
            found = [value for value in sums if value is not None]
            if found:
                total = torch.full_like(parameter, sum(found) * scale)
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
                self._late_hooks.call(parameter)

    def clear(self) -> None:
        """Forget all gradients of the step."""
        self._sums.clear()
        self._zeros.clear()

    def close(self) -> None:
        """Give the parameters back to autograd. What was summed stays, for a new layout. Idempotent."""
        self._late_hooks.release(self.parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
