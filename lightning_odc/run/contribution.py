"""What the output of a step contributes: a weighted or summed loss, and the weight that it counts with.

Note [Labels are counted]
~~~~~~~~~~~~~~~~~~~~~~~~~
The mean over the labels of a minibatch is ``sum_m n_m L_m / sum_m n_m``, where ``n_m`` counts those of microbatch
``m``. So that count is the weight, on any rank, if the loss is a mean over labels: Note [The loss is tested]. Two
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
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_odc.protocol.records import WeightKind


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides]."""

    loss: Tensor  # weighted or summed, with its graph; at least in fp32, which has room for weights and sums
    weight: float | Tensor  # its part of the denominator
    extras: dict[str, object]  # what else ``training_step`` returned
    weight_kind: WeightKind  # what the weight counts

    def detach(self) -> None:
        """Hold the values alone, without the graph and its activations."""
        self.loss = self.loss.detach()
        self.extras = {key: detached(value) for key, value in self.extras.items()}


class PendingWeight:
    """What a microbatch counts. If that is its labels, a device may still be counting them."""

    def __init__(self, weight: float, labels: Tensor | None = None) -> None:
        self._weight = weight
        self._labels: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None  # of the labels in the memory of the host
        if labels is not None:
            self._labels = labels.to("cpu", non_blocking=True)
            if labels.is_cuda:
                self._arrival = torch.cuda.current_stream().record_event()

    @property
    def is_weightless(self) -> bool:
        """Whether it counts nothing. The answer waits for the count of the labels, and for no other work."""
        if self._labels is None or not self._weight:
            return not self._weight
        if self._arrival is not None:
            self._arrival.synchronize()
        return not bool(self._labels)


def contribution(
    output: object,
    weight: float,
    weight_kind: WeightKind = WeightKind.MEAN,
    labels: Tensor | None = None,
    is_split: bool = False,
    is_sum: bool = False,
) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``.

    Args:
        output: What it returned.
        weight: The weight of the microbatch.
        weight_kind: What the weight counts.
        labels: How many labels count, on the device; ``None`` if they are not counted.
        is_split: The microbatch is a part of one: weight 0 then says nothing of items and labels.
        is_sum: The loss is a sum over what the weight counts.
    """
    if output is None:
        return None
    named: object = output
    if isinstance(output, Tensor):
        named = {"loss": output}
    if not isinstance(named, Mapping) or not isinstance(named.get("loss"), Tensor):
        raise TypeError(
            "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
            f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
        )
    loss = named["loss"].to(torch.promote_types(named["loss"].dtype, torch.float32))
    extras = {key: value for key, value in named.items() if key != "loss"}
    counts = float(is_split or weight > 0)  # a microbatch of weight zero only keeps ranks together
    if "num_items" in named:
        items = _checked(named["num_items"]) * counts
        return Contribution(loss * counts, items, extras, WeightKind.EXACT)
    if labels is not None:
        labels = labels.to(loss.device) * counts
        mean = torch.where(labels > 0, loss, 0.0)  # over nothing it is NaN, see `nothing_of`
        return Contribution(mean * labels.to(mean.dtype), labels, extras, WeightKind.LABELS)
    if not weight:
        loss = nothing_of(loss)
    elif not is_sum:
        loss = loss * weight
    return Contribution(loss, weight, extras, weight_kind)


def counted_weight(output: object, weight: float, labels: Tensor | None) -> float | Tensor:
    """What the values of a microbatch count that is evaluated; as in training, and the step may return anything."""
    counts = float(weight > 0)
    if isinstance(output, Mapping) and "num_items" in output:
        return _checked(output["num_items"]) * counts
    if labels is None:
        return weight
    return labels * counts


def nothing_of(loss: Tensor) -> Tensor:
    """Zero, with the graph of a loss that may be NaN: ``0 * NaN`` would be, too."""
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def detached(value: object) -> object:
    """A tensor without its graph; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach()
    return value


def _checked(num_items: object) -> float | Tensor:
    if isinstance(num_items, Tensor):
        return num_items.detach().double()  # summed as exactly as numbers of Python are
    if not isinstance(num_items, numbers.Real) or not 0 <= float(num_items) < math.inf:
        raise ValueError(
            f'"num_items" must be a finite number of at least 0, for example labels.ne(-100).sum(); got {num_items!r}.'
        )
    return float(num_items)
