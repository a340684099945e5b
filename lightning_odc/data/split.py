"""Cuts a microbatch in two, between samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_odc.data.minibatch import MicrobatchFacts, Task
from lightning_odc.samples.content import sizes_of, some_of
from lightning_odc.samples.weighting import Rule, planned_count


def middle(sizes: Sequence[float]) -> int:
    """Where to cut a sequence so that the sums differ least: ``[5, 1, 1, 1, 2]`` at 1 (5 and 5), ``[1, 9]`` at 1."""
    *sums, total = accumulate(sizes)
    differences = [abs(total - 2 * first_part) for first_part in sums]
    return 1 + differences.index(min(differences))


def parts_of(task: Task, rule: Rule) -> list[Task]:
    """The two parts of a microbatch; empty if it cannot be cut."""
    detail = task.detail
    if detail is not None and detail.samples is not None:
        indices = detail.samples.indices
        if len(indices) < 2:
            return []
        at = middle(detail.lengths)
        read = [detail.samples.read(indices[:at]), detail.samples.read(indices[at:])]
        # What ran may count less than was planned.
        planned = sum(part.weight for part in read) or 1.0
        return [part._replace(weight=task.weight * part.weight / planned) for part in read]
    sizes = sizes_of(task.microbatch)
    if not sizes:
        return []
    at = middle(sizes)
    parts = [some_of(task.microbatch, places) for places in (range(at), range(at, len(sizes)))]
    details: list[MicrobatchFacts | None] = [None, None]
    if detail is not None and len(detail.lengths) == len(sizes):
        # The first part has the random numbers that the whole began with.
        details = [
            MicrobatchFacts(detail.lengths[:at], detail.seed),
            MicrobatchFacts(detail.lengths[at:], (*detail.seed, at)),
        ]
    # A loss that is a mean is then `sum_p weight_p L_p / sum_p weight_p` over the parts.
    counts = []
    if rule.counter is not None:
        counts = [float(rule.counter.of(part) or 0.0) for part in parts]
    if not sum(counts):  # nothing is counted, or no part has anything that counts
        counts = [planned_count(rule, sizes[:at]), planned_count(rule, sizes[at:])]
    weights = [task.weight * count / sum(counts) for count in counts]
    return [Task(*facts) for facts in zip(parts, weights, details, strict=True)]
