"""What a microbatch counts in the gradient of its minibatch, and which count explains the losses of a few samples.

Note [The loss is tried]
~~~~~~~~~~~~~~~~~~~~~~~~
A loss that is a weighted mean over samples has ``L(ab) = (w_a L(a) + w_b L(b)) / (w_a + w_b)``. So the losses of two
samples, alone and together, tell ``w_a : w_b``. What training needs is a number that can be counted in any microbatch
and has this ratio. Candidates are samples, tokens, and the entries of every tensor of the batch that are not ignored.
A candidate must add up, ``w(ab) = w(a) + w(b)``, and explain the loss of every group that was tried. ::

    a has 2 labels, b has 8                         L(a) = 3, L(b) = 2, and together
    mean over labels                                (2 * 3 + 8 * 2) / 10 = 2.2
    mean over samples                               (3 + 2) / 2 = 2.5
    sum                                             3 + 2 = 5
    neither: in-batch negatives, batch norm, ...    anything else, and batches must not be cut

How far off a candidate is, as a part of the difference between the losses, is its misfit. Losses of an untrained model
differ by 0.3 %, so the trial computes in float64. There, right candidates have misfits of 1e-12, wrong ones of 1e-2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_odc.data.packing import IGNORE_INDEX

Planned = Literal["sample", "token", "next_token", "sum", "num_items"]

_MISFIT = 1e-6
#: So many of the most common values of a row of classes, and of the ends of a padded table, may be ignored ones.
_CLASSES, _PADS = 16, 3


@dataclass(frozen=True)
class Counter:
    """A number that can be read off any microbatch: how many entries of one of its tensors count."""

    # keys and indices that lead to the tensor. `labels` alone are searched for, also inside lists and tuples.
    path: tuple[Any, ...] = ("labels",)
    ignored: float | None = IGNORE_INDEX  # the entries that do not count; `None`: the tensor is summed
    skips_first: bool = False  # the first column does not count, since the loss shifts

    def of(self, batch: Any) -> Tensor | None:
        """The count, a scalar in float64 on the device of the tensor; ``None`` for a batch without that tensor."""
        found = named(batch, "labels") if self.path == ("labels",) else dict(tensors_of(batch)).get(self.path)
        if found is None or found.is_complex():
            return None
        if self.path == ("labels",) and (found.is_floating_point() or found.dtype is torch.bool):
            return None  # targets of a regression, or of several classes at once
        if self.skips_first and found.dim() > 1:
            found = found[..., 1:]
        return (found if self.ignored is None else found != self.ignored).sum().double()

    def __str__(self) -> str:
        if self.path == ("labels",) and self.ignored == IGNORE_INDEX:
            return "its labels that are not -100" + " and not in the first column" * self.skips_first
        name = "batch" + "".join(f"[{key!r}]" for key in self.path) + "[:, 1:]" * self.skips_first
        if self.ignored is None:
            return f"the sum of {name}"
        return f"the entries of {name} that are not {self.ignored:g}"


@dataclass(frozen=True)
class Rule:
    """What a microbatch counts."""

    weighting: Planned  # what plans count, as in `BalancedDataLoader(weighting=...)`
    counter: Counter | None = None  # what is counted in the microbatch instead, where it has that tensor

    @property
    def is_usual(self) -> bool:
        """Whether many projects mean it: samples, tokens, labels, masks."""
        counter = self.counter
        return counter is None or counter.ignored == IGNORE_INDEX or "mask" in str(counter.path)

    def __str__(self) -> str:
        if self.counter is not None:
            return f"a microbatch counts {self.counter}"
        if self.weighting == "sum":
            return "your loss is a sum, and trains as under DDP: the mean over ranks of their sums"
        return f"a microbatch counts its {_PLANNED[self.weighting]}"


_PLANNED = {
    "sample": "samples",
    "token": "tokens",
    "next_token": "tokens, less one per sample",
    "num_items": "num_items, which training_step returns",
}


@dataclass(frozen=True)
class Tried:
    """The loss of some samples in one batch."""

    samples: tuple[int, ...]  # their positions
    loss: float  # their loss
    counts: Mapping[Rule, float]  # what they count, by rule


@dataclass(frozen=True)
class Verdict:
    """What a trial has found."""

    rule: Rule | None  # what a microbatch counts; `None` if nothing explains the losses
    reason: str = ""  # why there is none


def decide(tried: Sequence[Tried], noise: float) -> Verdict:
    """Which rule explains all losses; see Note [The loss is tried]. A group that was tried twice must have one loss."""
    alone = {one.samples[0]: one for one in tried if len(one.samples) == 1}
    groups = {one.samples: one for one in tried if len(one.samples) > 1}
    if not all(math.isfinite(one.loss) for one in groups.values()):
        return Verdict(None, "a loss is not finite")
    bound = noise * max(abs(one.loss) for one in groups.values())
    again = [one for one in tried if one is not groups.get(one.samples) and len(one.samples) > 1]
    if any(abs(one.loss - groups[one.samples].loss) > bound for one in again):
        return Verdict(None, "the loss of the same samples changes from call to call")
    fitting = [rule for rule in tried[0].counts if _explains(rule, alone, list(groups.values()), bound)]
    if not fitting:
        return Verdict(None, "the loss of samples together is not a weighted mean of their losses")
    rule = min(fitting, key=_preference)
    if others := [other for other in fitting if not _agree(other, rule, tried)]:
        return Verdict(
            None, f"the losses of all samples are too equal to tell whether {rule}, or {others[0]}"
        )
    return Verdict(rule)


def _explains(rule: Rule, alone: Mapping[int, Tried], groups: Sequence[Tried], bound: float) -> bool:
    """Whether a rule's counts add up, and its predictions are right, but for rounding."""
    for group in groups:
        parts = [alone[sample] for sample in group.samples]
        weights = [part.counts.get(rule, math.nan) for part in parts]
        if not (sum(weights) > 0 and math.isclose(sum(weights), group.counts.get(rule, math.nan))):
            return False
        # A mean over nothing is NaN, and counts nothing.
        total = sum(weight * part.loss for weight, part in zip(weights, parts, strict=True) if weight)
        predicted = total if rule.weighting == "sum" else total / sum(weights)
        losses = [part.loss for part in parts if math.isfinite(part.loss)] or [0.0]
        spread = max(losses) - min(losses)
        error = max(abs(predicted - group.loss) - bound, 0.0)
        if not math.isfinite(error) or error > _MISFIT * max(spread, bound):
            return False
    return True


def _agree(one: Rule, other: Rule, tried: Sequence[Tried]) -> bool:
    """Whether two rules weigh all samples alike."""
    if "sum" in (one.weighting, other.weighting):
        return one == other
    pairs = [(each.counts.get(one, math.nan), each.counts.get(other, math.nan)) for each in tried]
    first, second = (sum(counts) for counts in zip(*pairs, strict=True))
    return all(math.isclose(a * second, b * first) for a, b in pairs)


def _preference(rule: Rule) -> tuple[bool, ...]:
    """Where several rules explain everything: labels, masks, samples, then any other; the plainest of each."""
    counter = rule.counter or Counter(path=())
    return (
        counter.path[-1:] != ("labels",) or counter.ignored != IGNORE_INDEX,
        not any("mask" in str(key) for key in counter.path),
        rule.weighting != "sample" or bool(counter.path),
        bool(counter.path),
        rule.weighting != "token",
        counter.ignored != IGNORE_INDEX,
        counter.skips_first,
        counter.ignored is None,
    )


def rules_of(batch: Any) -> list[Rule]:
    """Everything that may count in microbatches like this one, of samples of unlike length, so that padding shows."""
    rules = [Rule("sample"), Rule("token"), Rule("next_token"), Rule("sum")]
    for path, tensor in tensors_of(batch):
        if tensor.is_complex() or not tensor.dim() or not tensor.numel():
            continue
        ignored: list[float | None] = [0]
        if not tensor.is_floating_point():
            ends = tensor if tensor.dim() == 1 else tensor[..., [0, -1]]
            values, numbers = ends.flatten().unique(return_counts=True)
            common = values[numbers.argsort(descending=True)[: _CLASSES if tensor.dim() == 1 else _PADS]]
            ignored = [IGNORE_INDEX, -1, 0, *map(float, common.tolist())]
        if tensor.dim() == 1 or tensor.is_floating_point():
            ignored.append(None)
        shifts = (False, True) if tensor.dim() > 1 else (False,)
        for skips in shifts:
            rules += [Rule("token", Counter(path, value, skips)) for value in dict.fromkeys(ignored)]
    return rules


def planned_count(rule: Rule, tokens: Sequence[float]) -> float:
    """What plans count for samples of so many tokens. Of ``"num_items"``, which only the step knows, the tokens."""
    shifted = len(tokens) if rule.weighting == "next_token" else 0
    return float(len(tokens) if rule.weighting in ("sample", "sum") else sum(tokens) - shifted)


def named(batch: Any, name: str) -> Tensor | None:
    """The tensor of that name in a mapping or an object, also if that stands in a list or tuple."""
    value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    if isinstance(value, Tensor):
        return value
    is_row = isinstance(batch, list | tuple) and not isinstance(next(iter(batch), 0), int | float | str)
    if not is_row:  # nor a long row of plain values, each of which would be looked at
        return None
    return next((found for part in batch if (found := named(part, name)) is not None), None)


def tensors_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """All tensors in nested containers and data classes, with their paths."""
    if isinstance(batch, Tensor):
        yield path, batch
        return
    for key, part in parts_in(batch):
        yield from tensors_of(part, (*path, key))


def parts_in(batch: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, with keys, indices or names; nothing of a row of plain values, which may be long."""
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, list | tuple):
        is_plain = all(isinstance(value, int | float | str) for value in batch)
        return () if is_plain else enumerate(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [(one.name, getattr(batch, one.name)) for one in fields(batch)]
    return ()
