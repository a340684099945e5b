"""Which count of a microbatch explains the losses of a few samples.

Note [The loss is tested]
~~~~~~~~~~~~~~~~~~~~~~~~~
A loss that is a weighted mean over samples has ``L(ab) = (w_a L(a) + w_b L(b)) / (w_a + w_b)``. So the losses of two
samples, alone and together, tell ``w_a : w_b``. What training needs is a number that can be counted in any microbatch
and has this ratio. Candidates are samples, tokens, and the entries of every tensor of the batch that are not ignored.
A candidate must add up, ``w(ab) = w(a) + w(b)``, and explain the loss of every group that was tested. ::

    a has 2 labels, b has 8                         L(a) = 3, L(b) = 2, and together
    mean over labels                                (2 * 3 + 8 * 2) / 10 = 2.2
    mean over samples                               (3 + 2) / 2 = 2.5
    sum                                             3 + 2 = 5
    neither: in-batch negatives, batch norm, ...    anything else, and batches must not be cut

How far off a candidate is, as a part of the difference between the losses, is its misfit. Losses of an untrained model
differ by 0.3 %, so the trial computes in float64. There, right candidates have misfits of 1e-12, wrong ones of 1e-2.

What holds for ``a`` and ``b`` holds for groups of samples. So five forward passes are enough, however many samples take
part::

    a short sample, seven more of them, and all eight   a rule is chosen, of dozens
    the longest sample, and that with the short one     it is confirmed, for a wrong one may fit by chance, or
                                                        because no sample is so long that the step cuts it

Groups hide what samples show. So where they do not tell rules apart, or an unusual one is chosen, or the longest sample
contradicts it, each of the seven is tested by itself, and then the longest together with five others. On demand, ranks
share the passes out: see Note [Ranks share the trial].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_odc.samples.content import tensors_of
from lightning_odc.samples.packing import IGNORE_INDEX
from lightning_odc.samples.weighting import LabelCounter, Rule, planned_count

_MISFIT = 1e-6
#: So many of the most common values of a row of classes may be ignored ones.
_CLASSES = 16
#: The same for the ends of a padded table.
_PADS = 3

Ignored = list[float | None]
"""Entries of a tensor that a loss may ignore; ``None``: the tensor may be summed."""

Counts = Mapping[Rule, float]
"""What samples count, by rule."""


@dataclass(frozen=True)
class Tried:
    """The loss of some samples in one batch."""

    samples: tuple[int, ...]  # their positions
    loss: float  # their loss
    counts: Counts  # what they count


@dataclass(frozen=True)
class Verdict:
    """What a trial has found."""

    rule: Rule | None  # what a microbatch counts; `None` if nothing explains the losses
    reason: str = ""  # why there is none
    has_failed: bool = False  # an exception has ended it
    communicates: str = ""  # the line by which the step talks to other ranks
    edits: bool = False  # the step changes parameters by itself
    is_wide: bool = False  # the arithmetic of training was too coarse, and float64 has decided
    # what may help where there is none: a weighting, `"num_items"`, which the step would have to return, or `"log"`
    remedy: str = ""


def decide(tried: Sequence[Tried], noise: float, chosen: Rule | None = None) -> Verdict:
    """Which rule explains all losses; see Note [The loss is tested].

    Args:
        tried: The losses.
        noise: How far off they are, as a part of them.
        chosen: The rule that explained some of them, before others were added.
    """
    fitting = fitting_rules(tried, noise)
    if not fitting:
        reason = "nothing in the batch explains the loss of samples together as a mean of their losses"
        if chosen is not None:
            reason = (
                f"what explains some samples does not explain others ({chosen}; training_step may cut or leave out "
                "long ones)"
            )
        if not all(math.isfinite(group.loss) for group, _ in _divided(tried)):
            return Verdict(None, "a loss is not finite")
        return Verdict(None, reason, remedy="num_items")
    rule = fitting[0]
    others = [other for other in fitting[1:] if not _agree(other, rule, tried)]
    if others:
        reason = f"the losses of all samples are too equal to tell whether it is a {rule}, or a {others[0]}"
        remedy = str(rule.weighting)
        if rule.counter == LabelCounter():
            remedy = "label"
        elif rule.counter is not None:
            remedy = "num_items"
        return Verdict(None, reason, remedy=remedy)
    return Verdict(rule)


def fitting_rules(tried: Sequence[Tried], noise: float) -> list[Rule]:
    """The rules that explain the losses of all groups that consist of others, the preferred one first."""
    divided = _divided(tried)
    finite = [abs(group.loss) for group, _ in divided if math.isfinite(group.loss)]
    bound = noise * max(finite, default=0.0)
    fitting = [rule for rule in tried[0].counts if all(_explains(rule, *each, bound) for each in divided)]
    return sorted(fitting, key=_preference)


def _divided(tried: Sequence[Tried]) -> list[tuple[Tried, list[Tried]]]:
    """The groups that consist of other tested ones, the largest of these first; and those others."""
    divided = []
    for group in tried:
        left = {*group.samples}
        parts = []
        for other in sorted(tried, key=lambda other: -len(other.samples)):
            if len(other.samples) < len(group.samples) and left.issuperset(other.samples):
                left.difference_update(other.samples)
                parts.append(other)
        if not left:
            divided.append((group, parts))
    return divided


def _explains(rule: Rule, group: Tried, parts: Sequence[Tried], bound: float) -> bool:
    """Whether a rule's counts add up, and what it predicts from the parts of a group is right, but for rounding."""
    if not group.counts.get(rule) and not abs(group.loss) > 0:
        return True  # a mean over nothing is NaN, or 0
    finite = [part.loss for part in parts if math.isfinite(part.loss)]
    spread = max(finite, default=0.0) - min(finite, default=0.0)
    error = abs(_predicted(rule, group, parts) - group.loss)
    return error <= bound + _MISFIT * max(spread, bound)  # NaN explains nothing


def _predicted(rule: Rule, group: Tried, parts: Iterable[Tried]) -> float:
    """The loss of a group by a rule; not finite where the counts of its parts do not add up, or there are none."""
    total = 0.0
    predicted = 0.0
    for part in parts:
        weight = part.counts.get(rule, math.nan)
        total += weight
        if rule.weighting == "sum":
            predicted += part.loss
        elif weight:  # a mean over nothing is NaN, and counts nothing
            predicted += weight * part.loss
    adds_up = math.isclose(total, group.counts.get(rule, math.nan))
    if not (total > 0 and adds_up):
        return math.nan
    if rule.weighting != "sum":
        predicted /= total
    return predicted


def contradiction(tried: Sequence[Tried], noise: float, rule: Rule) -> str:
    """How the last group, which consists of the others, contradicts a rule; empty if it does not. See `decide`."""
    *parts, group = tried
    if not group.counts.get(rule) or not math.isfinite(group.loss):
        return ""
    if _explains(rule, group, parts, noise * abs(group.loss)):
        return ""
    predicted = _predicted(rule, group, parts)
    off = abs(predicted - group.loss) / (abs(group.loss) or 1.0)
    return (
        f"the loss of {len(group.samples)} samples together is {group.loss:.6g}, and would be {predicted:.6g} "
        f"as a {rule} ({off:.2g} of it off)"
    )


def _agree(one: Rule, other: Rule, tried: Sequence[Tried]) -> bool:
    """Whether two rules weigh all samples alike."""
    if "sum" in (one.weighting, other.weighting):
        return one == other
    first = [group.counts.get(one, math.nan) for group in tried]
    second = [group.counts.get(other, math.nan) for group in tried]
    of_first = sum(first)
    of_second = sum(second)
    return all(math.isclose(a * of_second, b * of_first) for a, b in zip(first, second, strict=True))


def _preference(rule: Rule) -> tuple[bool, ...]:
    """Where several rules explain everything: labels, masks, samples, then any other; the plainest of each."""
    counter = rule.counter or LabelCounter(path=())
    ignores_others = counter.ignored != IGNORE_INDEX
    return (
        counter.path[-1:] != ("labels",) or ignores_others,
        not any("mask" in str(key) for key in counter.path),
        rule.weighting != "sample" or bool(counter.path),
        bool(counter.path),
        rule.weighting != "token",
        ignores_others,
        counter.skips_first,
        counter.ignored is None,
    )


def rules_of(batch: Any) -> list[Rule]:
    """Everything that may count in microbatches like this one, of samples of unlike length, so that padding shows."""
    rules = [Rule("sample"), Rule("token"), Rule("next_token"), Rule("sum")]
    for path, tensor in tensors_of(batch):
        if tensor.is_complex() or not tensor.dim() or not tensor.numel():
            continue
        candidates = _ignored_in(tensor)
        rules += [Rule("token", LabelCounter(path, ignored)) for ignored in candidates]
        if tensor.dim() > 1:
            rules += [Rule("token", LabelCounter(path, ignored, skips_first=True)) for ignored in candidates]
    return rules


def _ignored_in(tensor: Tensor) -> Ignored:
    """The entries of a tensor that may be ignored ones; ``None``: it may be summed."""
    if tensor.is_floating_point():
        ignored: Ignored = [0, None]
        if not tensor.isfinite().all():
            ignored.append(math.inf)
        return ignored
    common: Ignored = [*_common(tensor[..., [0, -1]], _PADS)]
    if tensor.dim() == 1:
        common = [*_common(tensor, _CLASSES), None]
    return list(dict.fromkeys([IGNORE_INDEX, -1, 0, *common]))


def _common(tensor: Tensor, most: int) -> list[float]:
    """The most common values."""
    values, numbers = tensor.flatten().unique(return_counts=True)
    order = numbers.argsort(descending=True)
    return list(map(float, values[order[:most]].tolist()))


def counts_of(rules: Sequence[Rule], batch: Any, tokens: Sequence[int]) -> dict[Rule, float]:
    """What the samples of a batch, of so many tokens, count by each rule that fits it."""
    counts = {}
    for rule in rules:
        if rule.counter is None:
            counts[rule] = planned_count(rule, tokens)
            continue
        count = rule.counter.of(batch)
        if count is not None:
            counts[rule] = float(count)
    return counts
