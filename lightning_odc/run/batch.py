"""What a batch is doing, and what its microbatches add up to on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from lightning_odc.protocol.records import WeightKind
from lightning_odc.run.attempt import Attempt
from lightning_odc.run.contribution import Contribution, detached
from lightning_odc.samples.weighting import LabelCounter


class State(Enum):
    """What a batch is doing.

    In the example of Note [The last backward belongs to Lightning]: ``FORWARD`` for a, then ``BACKWARD``, both for b,
    ``FORWARD`` for c, then ``LEFT``.
    """

    FORWARD = auto()  # steps run. If Lightning goes backward now, all is done, and its loss is a zero
    BACKWARD = auto()  # an attempt goes backward here. Another backward pass of this batch follows
    LEFT = auto()  # the last attempt has its loss, and its backward pass is left to Lightning


@dataclass
class Batch:
    """How the microbatches of a batch run, and what they add up to on this rank."""

    device: torch.device
    counter: LabelCounter | None = None  # what is counted in the microbatch instead of its weight
    is_sum: bool = False  # the loss is a sum, which no weight multiplies
    weight_kind: WeightKind = WeightKind.PLANNED  # what planned weights count
    samples: int = 1  # of a plain batch, by which Lightning weights what is logged
    accumulated: int = 1  # batches of an optimizer step, by which losses are divided
    state: State = State.FORWARD
    attempt: Attempt | None = None  # that ran forward last
    extras: dict[str, list[object]] = field(default_factory=dict)  # what else steps returned, by microbatch
    loss: float | Tensor = 0.0
    weight: float | Tensor = 0.0

    def add(self, added: Contribution) -> None:
        self.loss = self.loss + added.loss.detach()
        self.weight = self.weight + added.weight
        for key, value in added.extras.items():
            # A view would keep the graph, with the activations of a microbatch that runs again in parts.
            self.extras.setdefault(key, []).append(detached(value))

    def output(self) -> dict[str, object]:
        """The loss that is left to Lightning, with the value of the mean over all microbatches; and the rest."""
        total = torch.as_tensor(self.loss, device=self.device)
        weight = torch.as_tensor(self.weight, device=self.device, dtype=total.dtype)
        mean = torch.where(weight > 0, total / weight, torch.zeros_like(total))
        loss = torch.zeros((), device=self.device, requires_grad=True)
        if self.state is State.LEFT:
            assert self.attempt is not None
            assert self.attempt.contribution is not None
            loss = self.attempt.contribution.loss.sum()
        loss = loss.to(torch.promote_types(loss.dtype, mean.dtype), copy=True)
        loss.detach().copy_(mean.reshape(()))  # the gradient of the loss, under the value of the mean
        return {"loss": loss, **{key: joined(values) for key, values in self.extras.items()}}


def joined(values: list[object]) -> object:
    """What a step returned for all microbatches: tensors as one, and else the list of them.

    Rows are joined along their first dimension, which is that of samples. Single numbers become a vector.
    """
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_nested]
    kinds = {(tensor.dim() > 0, tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors}
    if len(tensors) < len(values) or len(kinds) != 1:
        return values
    if tensors[0].dim() > 0:
        return torch.cat(tensors)
    return torch.stack(tensors)
