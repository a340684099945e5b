"""The samples that a loss is tested with, the batches that they make, and which of them go together."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_odc.samples.content import digest_of, some_rows
from lightning_odc.samples.probe import Probe, collated
from lightning_odc.samples.weighting import Rule
from lightning_odc.trial.decide import Counts

Group = Sequence[int]
"""Positions of samples that are tested together."""

_TRIED = 8  # samples
_SHORT = 16  # of those that were read


class TrialSamples:
    """Makes batches of samples. Equal samples make equal batches, whatever is random in the ``collate_fn``."""

    def __init__(self, probe: Probe) -> None:
        self._collate_fn = probe.collate_fn
        # Those that the `collate_fn` leaves out have no loss. If it leaves out all, training will raise an error.
        ran = probe.kept or list(range(len(probe.samples)))
        self._samples = [probe.samples[place] for place in ran]
        self.tokens: list[int] = probe.tokens[ran].tolist()
        everything = range(len(ran))
        # A random `collate_fn` (it masks some tokens, say) would show a sample alone in one way and among
        # others in another. So where it is, all batches are rows of a single one.
        self._whole = self._collated(everything, seed=0)
        if digest_of(self._whole) == digest_of(self._collated(everything, seed=1)):
            self._whole = None

    def batch_of(self, group: Sequence[int]) -> Any:
        """A batch of the samples at these positions."""
        if self._whole is None:
            return self._collated(group, seed=0)
        return copy.deepcopy(some_rows(self._whole, len(self._samples), group))

    def _collated(self, group: Sequence[int], seed: int) -> Any:
        return collated(self._collate_fn, [self._samples[position] for position in group], seed)


def distinguishing(counts: Sequence[Counts]) -> list[int]:
    """Samples that distinguish rules: the shortest, and some that make the group in which most rules differ.

    They are as short as possible: they pad each other. A longer one is taken only if it distinguishes usual rules.
    """
    rules = [*counts[0]]
    table = np.array([[own.get(rule, 0.0) for rule in rules] for own in counts])  # [samples, rules]
    of_first = np.where(table[0] == 0, 1.0, table[0])
    usual = [rule.is_usual for rule in rules]
    group: list[int] = []

    def how_good(sample: int) -> tuple[int, bool, int, int]:
        """How many usual rules differ in the group with this sample, and then how many rules at all."""
        own = weights[sample]
        return len({*own[usual].tolist()}), sample < _SHORT, len({*own.tolist()}), -sample

    while len(group) < min(_TRIED, len(counts)) - 1:
        weights = (table[group].sum(0) + table) / of_first  # of the group with each sample
        others = {*range(1, len(counts))} - {*group}
        group.append(max(others, key=how_good))
    return [0, *group]


def how_many_weights(counts: Sequence[Counts], rules: Iterable[Rule], group: Group) -> int:
    """How many different weights rules give to a group, as multiples of that of the first sample."""
    weights = set()
    for rule in rules:
        together = sum(counts[sample].get(rule, 0.0) for sample in group)
        weights.add(together / (counts[0].get(rule) or 1.0))
    return len(weights)


def confirming(others: Group, most: int) -> list[int]:
    """The last of other samples, which is the longest, and some of all lengths.

    They confirm a rule. One by itself is cheap: padding makes all samples of a batch as large as the longest.
    """
    count = min(most, len(others))
    return [others[-1 - index * len(others) // count] for index in range(count)]
