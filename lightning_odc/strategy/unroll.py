"""Running a `Minibatch` one microbatch at a time.

Note [The last backward belongs to Lightning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning calls ``training_step`` once per batch, then ``zero_grad``, then ``backward`` once. For a minibatch the
strategy runs all microbatches inside that one ``training_step`` call and backpropagates all but the last itself; the
last one's loss is returned with its graph. It is returned *with the value* of the whole share, so that progress
bars, ``on_train_batch_end`` and loggers see the minibatch. A share without microbatches returns a zero, and so does
one whose ranks help each other: there, no backward pass is left for later.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lightning_odc.data.minibatch import Minibatch, Task
from lightning_odc.engine.base import Counting, Engine
from lightning_odc.strategy.logbook import LogBook


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides].

    Attributes:
        loss: the weighted (or summed) loss, with its graph; at least in fp32, which has room for weights and sums.
        weight: its share of the denominator.
        extras: what else ``training_step`` returned.
        counting: what the weight counts.
    """

    loss: Tensor
    weight: float | Tensor
    extras: dict[str, Any]
    counting: Counting


@dataclass
class _Totals:
    loss: Any = 0.0
    weight: Any = 0.0
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, item: Contribution) -> None:
        self.loss = self.loss + item.loss.detach()
        self.weight = self.weight + item.weight
        for key, value in item.extras.items():
            self.extras.setdefault(key, []).append(value)

    def mean(self, device: torch.device) -> Tensor:
        loss = torch.as_tensor(self.loss, device=device)
        weight = torch.as_tensor(self.weight, device=device, dtype=loss.dtype)
        return torch.where(weight > 0, loss / weight, torch.zeros_like(loss))


def contribution(output: Any, weight: float, counting: Counting = Counting.MEAN) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``.

    Args:
        output: the returned value; a ``"loss"`` beside ``"num_items"`` is a sum over items, else a mean.
        weight: of the microbatch, where ``num_items`` does not say it exactly.
        counting: what that weight counts.

    Raises:
        TypeError: if it is something else.
    """
    if output is None:
        return None
    if isinstance(output, Tensor):
        return Contribution(_wide(output) * weight, weight, {}, counting)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        extras = {key: value for key, value in output.items() if key != "loss"}
        if "num_items" in output:
            counts = float(weight > 0)  # a microbatch of weight zero only keeps ranks together
            items = _checked(output["num_items"]) * counts
            return Contribution(_wide(output["loss"]) * counts, items, extras, Counting.EXACT)
        return Contribution(_wide(output["loss"]) * weight, weight, extras, counting)
    raise TypeError(
        "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
        f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
    )


def run_share(
    minibatch: Minibatch,
    *,
    engine: Engine,
    logbook: LogBook,
    step: Callable[[Task], Any],
    backward: Callable[[Tensor], None],
    normalize: int,
    device: torch.device,
) -> dict[str, Any]:
    """Run a rank's share of a minibatch; see Note [The last backward belongs to Lightning].

    Args:
        minibatch: the share.
        engine: told about every microbatch and its weight.
        logbook: told how much what was logged counts.
        step: the user's ``training_step`` on one microbatch.
        backward: backpropagates a loss that is not the last.
        normalize: ``accumulate_grad_batches``, by which Lightning divides the loss it is given.
        device: where a share without microbatches makes its zero.

    Returns:
        ``{"loss": ...}`` plus, for everything else that ``training_step`` returned, the list over microbatches.
    """
    engine.begin_minibatch(len(minibatch), minibatch.plan)
    totals = _Totals()
    pending: Tensor | None = None
    helping = minibatch.all_shares is not None
    for task in engine.tasks(minibatch):
        if pending is not None:
            backward(pending / normalize)
        pending = None
        item = contribution(step(task), task.weight, Counting.PLANNED)
        logbook.weigh(task.weight if item is None else item.weight)
        if item is None:
            continue
        engine.ledger.add(item.weight / normalize, item.counting)
        totals.add(item)
        pending = item.loss
        if helping:  # a rank may take over work only when its own is done: no backward pass is left for later
            backward(pending / normalize)
            pending = None
    value = totals.mean(device)
    if pending is None:
        pending = torch.zeros((), device=device, requires_grad=True)
    loss = cast(Tensor, _WithValue.apply(pending, value))  # type: ignore[no-untyped-call]
    return {"loss": loss, **totals.extras}


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


def _wide(loss: Tensor) -> Tensor:
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _checked(num_items: Any) -> float | Tensor:
    if isinstance(num_items, Tensor):
        return num_items.detach().double()  # summed as exactly as numbers of Python are
    if not isinstance(num_items, numbers.Real) or not 0 <= float(num_items) < math.inf:
        raise ValueError(
            f'"num_items" must be a finite number of at least 0, for example labels.ne(-100).sum(); got {num_items!r}.'
        )
    return float(num_items)
