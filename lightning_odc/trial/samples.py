"""The samples that a loss is tried with, the batches that they make, and which of them go together."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_odc.data.content import digest_of, some_rows
from lightning_odc.data.probe import Probe
from lightning_odc.data.rng import isolated_rng, seed_rng
from lightning_odc.data.weighting import Rule
from lightning_odc.trial.decide import Counts

Group = Sequence[int]
"""Positions of samples that are tried together."""

_TRIED = 8  # samples
#: So many others confirm a rule.
_CONFIRMING = {True: 1, False: 6}  # by whether it is usual


class TrialSamples:
    """Makes batches of samples. Equal samples make equal batches, whatever is random in the ``collate_fn``."""

    def __init__(self, probe: Probe) -> None:
        self._collate_fn = probe.collate_fn
        # Those that the `collate_fn` leaves out have no loss. If it leaves out all, training will meet its error, too.
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
        with isolated_rng():
            seed_rng(seed)
            return self._collate_fn([copy.deepcopy(self._samples[position]) for position in group])


def distinguishing(counts: Sequence[Counts]) -> list[int]:
    """Samples that distinguish rules: the shortest, and some that make the group in which most rules differ.

    They are as short as possible: they pad each other. A longer one is taken only if it distinguishes usual rules.
    """
    rules = [rule for rule in counts[0] if all(rule in others for others in counts)]
    usual = [rule for rule in rules if rule.is_usual]
    short = range(max(_TRIED, len(counts) // 4))
    group: list[int] = []

    def how_good(sample: int) -> tuple[int, bool, int, int]:
        """How many usual rules differ in the group with this sample, and then how many rules at all."""
        larger = [*group, sample]
        of_usual = how_many_weights(counts, usual, larger)
        return of_usual, sample in short, how_many_weights(counts, rules, larger), -sample

    while len(group) < min(_TRIED, len(counts)) - 1:
        others = {*range(1, len(counts))} - {*group}
        group.append(max(others, key=how_good))
    return [0, *group]


def how_many_weights(counts: Sequence[Counts], rules: Iterable[Rule], group: Group) -> int:
    """How many different weights rules give to a group, as multiples of that of the first sample."""
    weights = set()
    for rule in rules:
        together = sum(counts[sample][rule] for sample in group)
        weights.add(together / (counts[0][rule] or 1.0))
    return len(weights)


def groups_to_try(chosen: Group) -> list[Group]:
    """One sample, all others, and all of them together."""
    groups = [chosen[:1], chosen[1:], chosen]
    return groups[: len(chosen)]  # a single sample has no others


def groups_to_confirm(others: Group, partner: Group, is_usual: bool) -> list[Group]:
    """Further samples, and these together with some that were tried.

    Args:
        others: Samples that were not tried, the longest last. That one is taken, and some of all lengths.
        partner: A group that was tried.
        is_usual: Whether many projects mean the rule. If not, it needs more samples.
    """
    # For usual ones, the longest by itself: padding makes all samples of a batch as large as it.
    count = min(_CONFIRMING[is_usual], len(others))
    further = [others[-1 - index * len(others) // count] for index in range(count)]
    return [further, [*partner, *further]]
