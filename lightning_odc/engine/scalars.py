"""Parameters of a sharded model without a dimension, such as the ``logit_scale`` of CLIP, which cannot be cut.

Every rank has them whole, and sums their gradients until the step settles. Then every rank tells its sums in its
`SettleRecord`, and all ranks add them up in rank order and divide, as in Note [Who divides].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.whole_gradients import WholeGradients


def scalars_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters without a dimension. Complex ones are left to ``fully_shard``, which refuses them."""
    found = (p for p in module.parameters() if not p.dim() and not isinstance(p, DTensor))
    return [parameter for parameter in found if not parameter.is_complex()]


class Scalars:
    """The gradients of such parameters in an optimizer step."""

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

    def _add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
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
        self._gradients.check_outside()
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
