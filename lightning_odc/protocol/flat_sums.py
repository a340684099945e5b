"""The sums of a whole model's gradients on one rank, which lie in a row in memory.

Note [How sums lie in a row]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The sums of all trained parameters of one dtype are one vector, in the order of the model. It is padded to a multiple of
the number of ranks and cut into *pieces*, without regard to parameters. A piece has a row per rank, of which that rank
is the owner. Two ranks, a weight ``w`` of shape ``[2, 2]`` and a bias ``b`` of shape ``[3]``, in one piece::

    owner 0    w00 w01 w10 w11
    owner 1    b0  b1  b2  0      the last number is padding

There are several pieces, so that ranks do not wait for one lock, and nodes send one while they sum the next. The first
one is small, so that windows can be proven at little cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_odc.protocol.transports.base import SumDtype, UnitSpec

Gradients = Mapping[nn.Parameter, Tensor]
"""Gradients by parameter."""

#: Elements of the first piece of a vector, and the least of the others, of which there are at most so many.
_FIRST = 2**17
_LEAST = 2**22
_MOST_PIECES = 64


class FlatSums:
    """The sums of some parameters' gradients over the passes of one optimizer step; see Note [How sums lie in a row].

    Args:
        parameters: They are on one device.
        owners: The number of ranks.
        dtype: The dtype of the sums; by default fp32, or wider if a parameter is.

    Attributes:
        pieces: Vectors of ``owners * numel`` elements, which all sums lie in.
        known: The parameters that have received a gradient in this step, each with its sum, shaped as it is.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], owners: int, dtype: SumDtype) -> None:
        self.pieces: list[Tensor] = []
        self.known: dict[nn.Parameter, Tensor] = {}
        self._places: dict[nn.Parameter, Tensor] = {}
        # Gradients of the last pass, whose memory `totals` uses again.
        self._spare: Gradients = {}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            own = parameter.dtype.to_real()
            summed_in = dtype or torch.promote_types(own, torch.float32)
            by_dtype.setdefault(summed_in, []).append(parameter)
        for summed_in, group in by_dtype.items():
            sizes = [as_real(parameter).numel() for parameter in group]
            padded = math.ceil(sum(sizes) / owners) * owners
            vector = torch.zeros(padded, dtype=summed_in, device=group[0].device)
            for parameter, place in zip(group, vector[: sum(sizes)].split(sizes), strict=True):
                self._places[parameter] = place.view(as_real(parameter).shape)
            least = max(_LEAST, padded // _MOST_PIECES) // owners * owners
            first = min(_FIRST // owners * owners, padded)
            self.pieces += [vector[:first], *vector[first:].split(least)]
        self.pieces = [piece for piece in self.pieces if piece.numel()]
        if not self.pieces:  # ranks meet in windows that have something to share
            self.pieces = [torch.zeros(owners)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the order of the model by dtype, which is the same on all ranks."""
        return list(self._places)

    def specs(self, owners: int) -> list[UnitSpec]:
        """What the windows of ranks hold of each piece: a row of what is added, and one of what all have added."""
        specs = []
        for number, piece in enumerate(self.pieces):
            numel = piece.numel() // owners
            name = f"gradients, part {number + 1} of {len(self.pieces)}"
            specs.append(UnitSpec(name, numel, piece.dtype, numel, piece.dtype, ((0, numel),)))
        return specs

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Add the gradients of a pass."""
        self._spare = dict(gradients)
        first: dict[Tensor, Tensor] = {}
        more: dict[Tensor, Tensor] = {}
        for parameter, gradient in gradients.items():
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            part = more if parameter in self.known else first
            place = self._places[parameter]
            self.known[parameter] = place
            part[place] = as_real(gradient.detach())
        if first:
            torch._foreach_copy_([*first], [*first.values()])
        if more:
            torch._foreach_add_([*more], [*more.values()])

    def finish(self) -> None:
        """Nothing is added any more: let the sums of what has received no gradient be zero."""
        left = [place for parameter, place in self._places.items() if parameter not in self.known]
        if left:
            torch._foreach_zero_(left)

    def totals(self, received: Sequence[bool]) -> Gradients:
        """What lies in the pieces now, copied, of `parameters` that have ``received`` a gradient on any rank."""
        copies = {}
        for (parameter, place), flag in zip(self._places.items(), received, strict=True):
            if not flag:
                continue
            total = self._spare.get(parameter)
            if total is None or total.is_sparse or total.is_conj() or total.requires_grad:
                total = torch.empty_like(parameter)
            as_real(total).copy_(place)
            copies[parameter] = total
        return copies

    def begin_pass(self) -> None:
        """Another backward pass begins, which takes memory for its gradients."""
        self._spare = {}

    def clear(self) -> None:
        """Forget what all have received."""
        self.known.clear()
        self._spare = {}


def as_real(tensor: Tensor) -> Tensor:
    """A tensor, or the real and the imaginary parts of a complex one, in the same memory if it can be."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor
