"""What a microbatch counts in the gradient of its minibatch: as planned, or counted in the microbatch itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_odc.balance.arrays import Floats, Ints, floats
from lightning_odc.samples.content import named, parts_in
from lightning_odc.samples.packing import IGNORE_INDEX

Planned = Literal["sample", "token", "next_token", "sum", "num_items"]


@dataclass(frozen=True)
class LabelCounter:
    """A number that can be read off any microbatch: how many entries of one of its tensors count."""

    # keys and indices that lead to the tensor. `labels` alone are searched for, also inside lists and tuples.
    path: tuple[Any, ...] = ("labels",)
    # the entries that do not count; infinity: those that are not finite; `None`: the tensor is summed
    ignored: float | None = IGNORE_INDEX
    skips_first: bool = False  # the first column does not count, since the loss shifts

    def of(self, batch: Any) -> Tensor | None:
        """The count, a scalar in float64 on the device of the tensor; ``None`` for a batch without that tensor."""
        if self.path == ("labels",) and self.ignored != math.inf:
            found = named(batch, "labels")
            if found is not None and (found.is_floating_point() or found.dtype is torch.bool):
                return None  # targets of a regression, or of several classes at once
        else:
            found = batch
            for key in self.path:
                found = dict(parts_in(found)).get(key)
        if not isinstance(found, Tensor) or found.is_complex():
            return None
        if self.skips_first and found.dim() > 1:
            found = found[..., 1:]
        if self.ignored is not None:
            found = found.isfinite() & (found != self.ignored)
        return found.double().sum()

    def __str__(self) -> str:
        if self.path == ("labels",) and self.ignored == IGNORE_INDEX:
            return "labels, less the first of each sample" if self.skips_first else "labels"
        name = "batch" + "".join(f"[{key!r}]" for key in self.path)
        if self.skips_first:
            name += "[:, 1:]"
        if self.ignored is None:
            return f"the sum of {name}"
        if math.isinf(self.ignored):
            return f"the finite entries of {name}"
        return f"the entries of {name} that are not {self.ignored:g}"


@dataclass(frozen=True)
class Rule:
    """What a microbatch counts."""

    weighting: Planned  # what plans count, as in `BalancedDataLoader(weighting=...)`
    counter: LabelCounter | None = None  # what is counted in the microbatch instead, where it has that tensor

    @property
    def planned(self) -> Literal["sample", "token", "next_token", "sum"]:
        """What plans count; where only a microbatch tells, its tokens."""
        if self.counter is None and self.weighting != "num_items":
            return self.weighting
        return "token"

    @property
    def is_usual(self) -> bool:
        """Whether many projects mean it: samples, tokens, labels, masks."""
        counter = self.counter
        return counter is None or counter.ignored == IGNORE_INDEX or "mask" in str(counter.path)

    def __str__(self) -> str:
        if self.weighting == "sum":
            return "sum that trains as under DDP, with the mean over ranks of their sums"
        return f"mean over {self.counter or _PLANNED[self.weighting]}"


_PLANNED = {
    "sample": "samples",
    "token": "tokens",
    "next_token": "tokens, less one per sample",
    "num_items": "num_items, which training_step returns",
}


def planned_counts(weighting: str, tokens: Sequence[float] | Ints) -> Floats:
    """What plans count for each sample of so many tokens: these, where only a microbatch or the step tells."""
    counts = floats(tokens)
    if weighting in ("sample", "sum"):
        return np.ones(len(counts))
    if weighting == "next_token":
        return counts - 1
    return counts


def planned_count(rule: Rule, tokens: Sequence[float]) -> float:
    """What plans count for all of these samples."""
    return float(planned_counts(rule.weighting, tokens).sum())
