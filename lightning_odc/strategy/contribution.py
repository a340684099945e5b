"""The contribution of one microbatch to the gradient: a loss and its weight.

Note [Labels are counted]
~~~~~~~~~~~~~~~~~~~~~~~~~
The mean over the labels of a minibatch is ``sum_m n_m L_m / sum_m n_m``, where ``n_m`` counts those of microbatch
``m``. So that count is the weight, on any rank, if the loss is a mean over labels: Note [The loss is tried]. Two
samples, the prompts masked (``-`` stands for -100)::

    labels                      tokens  a causal model counts           planned by tokens: wrong
    a  [[-, -, -, -, -, 7]]     6       1, the first column never       6 La + 3 Lb
    b  [[1, 2, 3]]              3       2                               counted: 1 La + 2 Lb

The planned weight still decides whether a microbatch counts: 0 means that it only keeps ranks together. Without any
label that counts, the mean of a microbatch is NaN, and it is left out. Its backward pass still runs, because others
wait for it with collectives. The engine adds zeros, because ``0 * NaN`` is NaN, and so are gradients of ``sum / 0``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lightning_odc.engine.base import Counting


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides]."""

    loss: Tensor  # weighted or summed, with its graph; at least in fp32, which has room for weights and sums
    weight: float | Tensor  # its part of the denominator
    extras: dict[str, Any]  # what else ``training_step`` returned
    counting: Counting  # what the weight counts

    def detach(self) -> None:
        """Hold the values alone, without the graph and its activations."""
        self.loss = self.loss.detach()
        self.extras = {
            key: value.detach() if isinstance(value, Tensor) else value for key, value in self.extras.items()
        }


@dataclass
class Sums:
    """What the microbatches of a minibatch add up to on this rank."""

    device: torch.device
    extras: dict[str, list[Any]] = field(default_factory=dict)  # what else steps returned, by microbatch
    _loss: Any = 0.0
    _weight: Any = 0.0

    def add(self, item: Contribution) -> None:
        self._loss = self._loss + item.loss.detach()
        self._weight = self._weight + item.weight
        for key, value in item.extras.items():
            # A view would keep the graph, with the activations of a microbatch that runs again in parts.
            self.extras.setdefault(key, []).append(value.detach() if isinstance(value, Tensor) else value)

    def under(self, item: Contribution | None) -> Tensor:
        """The loss of a microbatch with the mean of all of them as its value; without one, a loss that adds nothing."""
        loss = torch.as_tensor(self._loss, device=self.device)
        weight = torch.as_tensor(self._weight, device=self.device, dtype=loss.dtype)
        mean = torch.where(weight > 0, loss / weight, torch.zeros_like(loss))
        graph = torch.zeros((), device=self.device, requires_grad=True) if item is None else item.loss
        return cast(Tensor, _WithValue.apply(graph, mean))  # type: ignore[no-untyped-call]


class _WithValue(torch.autograd.Function):
    """The first argument's gradient under the second one's value."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        ctx.shape = loss.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype).reshape(ctx.shape), None


class CountsNothing:
    """Whether a microbatch counts nothing. The answer waits for the count of its labels, and for no other work."""

    def __init__(self, labels: Tensor | None = None, weight: float = 1.0) -> None:
        self._weight = weight
        self._labels = None if labels is None else labels.to("cpu", non_blocking=True)
        self._arrival = (
            None if labels is None or not labels.is_cuda else torch.cuda.current_stream().record_event()
        )

    def __bool__(self) -> bool:
        if self._labels is None or not self._weight:
            return not self._weight
        if self._arrival is not None:
            self._arrival.synchronize()
        return not bool(self._labels)


def contribution(
    output: Any,
    weight: float,
    counting: Counting = Counting.MEAN,
    labels: Tensor | None = None,
    is_part: bool = False,  # weight 0 then says nothing of items and labels
    is_sum: bool = False,
) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``."""
    if output is None:
        return None
    named: Any = {"loss": output} if isinstance(output, Tensor) else output
    if not isinstance(named, Mapping) or not isinstance(named.get("loss"), Tensor):
        raise TypeError(
            "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
            f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
        )
    loss = named["loss"].to(torch.promote_types(named["loss"].dtype, torch.float32))
    extras = {key: value for key, value in named.items() if key != "loss"}
    counts = float(is_part or weight > 0)  # a microbatch of weight zero only keeps ranks together
    if "num_items" in named:
        return Contribution(loss * counts, _checked(named["num_items"]) * counts, extras, Counting.EXACT)
    if labels is None:
        weighted = loss * (1.0 if is_sum else weight) if weight else nothing_of(loss)
        return Contribution(weighted, weight, extras, counting)
    labels = labels.to(loss.device) * counts
    mean = torch.where(labels > 0, loss, 0.0)  # over nothing it is NaN, see `nothing_of`
    return Contribution(mean * labels.to(mean.dtype), labels, extras, Counting.LABELS)


def counted_weight(output: Any, weight: float, labels: Tensor | None) -> float | Tensor:
    """What the values of a microbatch count that is evaluated; as in training, and the step may return anything."""
    counts = float(weight > 0)
    if isinstance(output, Mapping) and "num_items" in output:
        return _checked(output["num_items"]) * counts
    return weight if labels is None else labels * counts


def nothing_of(loss: Tensor) -> Tensor:
    """Zero, with the graph of a loss that may be NaN: ``0 * NaN`` would be, too."""
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _checked(num_items: Any) -> float | Tensor:
    if isinstance(num_items, Tensor):
        return num_items.detach().double()  # summed as exactly as numbers of Python are
    if not isinstance(num_items, numbers.Real) or not 0 <= float(num_items) < math.inf:
        raise ValueError(
            f'"num_items" must be a finite number of at least 0, for example labels.ne(-100).sum(); got {num_items!r}.'
        )
    return float(num_items)
