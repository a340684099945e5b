"""Whether the rule that weighs microbatches still explains their losses, while a run trains.

Note [The proof goes on]
~~~~~~~~~~~~~~~~~~~~~~~~
A rule is chosen before training, on a few samples. Later samples may be longer than what a step cuts, and from some
epoch on a loss may have a term that couples samples. So in the first minibatch, and after 10, 100, 1,000, ... of them,
every rank tries some of the samples that it trains with: up to eight, no more than its largest microbatch has room for.
Those of a microbatch are of like length, so the shortest and the longest are read again, and make a batch. A rank may
have long ones alone, so a sample of middle length is added. A stream cannot be read again, so there it is the largest
microbatch. ::

    each alone              L(a) = 3, L(b) = 2, with 2 and 8 labels
    all of them together    2.2 by the rule; 2.6 were found: it does not explain this loss

A step runs forward alone and leaves no trace, as in Note [The loss is tried]. Ranks do not wait for each other. What
one has found, all hear when they settle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_odc.data.content import sizes_of, some_of
from lightning_odc.data.minibatch import Task
from lightning_odc.data.weighting import Rule, planned_count
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf

_MOST_TRIED = 8  # samples

Move = Callable[[Any], Any]
"""Brings a batch that was read to the device."""
TryRule = Callable[[BatchOf, Sequence[int], Rule], Verdict]
"""Tries whether a rule explains the loss of samples; see `lightning_odc.trial.run.try_loss`."""


@dataclass
class Audit:
    """Tries a rule again and again; see Note [The proof goes on]."""

    rule: Rule
    minibatches: int = 0  # that have begun

    def is_due(self) -> bool:
        """Whether the minibatch that begins now is one to look at. Call it once for each."""
        number = self.minibatches
        self.minibatches += 1
        return number == 0 or (number >= 10 and math.log10(number).is_integer())

    def of(self, tasks: Iterable[Task], move: Move, try_rule: TryRule) -> str:
        """How the rule fails to explain the loss of some samples; empty if it explains it, or nothing can be tried."""
        candidates = [task for task in tasks if task.weight]
        with suppress(Exception):  # whatever a data set or a collate_fn raises
            mixed = _mixed(candidates)
            if mixed is not None:
                candidates = [mixed._replace(microbatch=move(mixed.microbatch))]
        if not candidates:
            return ""
        task = max(candidates, key=lambda task: sum(self._sizes(task)))
        sizes = self._sizes(task)
        if not sizes:
            return ""
        samples = _spread(sizes, _MOST_TRIED)

        def batch_of(group: Sequence[int]) -> object:
            return some_of(task.microbatch, [samples[position] for position in group])

        verdict = try_rule(batch_of, [sizes[sample] for sample in samples], self.rule)
        if verdict.has_failed:
            return ""
        return verdict.reason

    def _sizes(self, task: Task) -> list[int]:
        """The tokens of the samples, or 1 each; empty where it has a single one, or it does not show them."""
        detail = task.detail
        sizes = sizes_of(task.microbatch)
        # Rows may be anything, unless there are as many as samples.
        if detail is None or len(sizes) != detail.sample_count:
            return []
        if len(sizes) == len(detail.lengths):
            sizes = detail.lengths
        counts_tokens = self.rule.counter is None and self.rule.weighting in ("token", "next_token")
        if counts_tokens and not math.isclose(planned_count(self.rule, sizes), task.weight):
            return []
        return sizes


def _mixed(tasks: Sequence[Task]) -> Task | None:
    """A batch of the shortest to the longest sample of several microbatches; ``None`` if they cannot be read again."""
    tokens: list[int] = []
    indices: list[int] = []
    largest = 0
    samples = None
    for _, _, detail in tasks:
        if detail is None or detail.samples is None or len(detail.lengths) != len(detail.samples.indices):
            return None
        samples = detail.samples
        tokens += detail.lengths
        indices += samples.indices
        largest = max(largest, max(detail.lengths) * len(detail.lengths))
    if samples is None:
        return None
    if samples.typical is not None and samples.typical[0] not in indices:
        index, length = samples.typical
        indices.append(index)
        tokens.append(length)
    if len(indices) < 2:
        return None
    room = largest // max(*tokens, 1)
    chosen = _spread(tokens, min(max(room, 2), _MOST_TRIED))
    return samples.read([indices[position] for position in chosen])


def _spread(sizes: Sequence[int], most: int) -> list[int]:
    """Positions of so many samples, from the shortest to the longest."""
    by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
    places = np.linspace(0, len(sizes) - 1, min(len(sizes), most)).astype(int)
    return [by_size[place] for place in places]
