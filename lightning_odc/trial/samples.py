"""The samples that a loss is tried with, the batches that they make, and which of them go together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from lightning_odc.data.content import digest_of, some_rows
from lightning_odc.data.probe import Probe
from lightning_odc.data.rng import isolated_rng, seed_rng
from lightning_odc.trial.decide import Counts

Group = tuple[int, ...]
"""Positions of samples that are tried together."""

_TRIED = 6  # samples
#: So many others confirm a rule.
_CONFIRMING = {True: 2, False: 6}  # by whether it is usual


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
    """Samples that distinguish rules: the first one, then always the shortest of those in which most rules differ."""
    chosen = [0]
    rules = [rule for rule in counts[0] if all(rule in others for others in counts)]

    def how_many_differ(sample: int) -> tuple[int, int, int]:
        """The usual rules that differ in the chosen samples and this one, then all rules."""
        every = set()
        usual = set()
        for rule in rules:
            first = counts[0][rule] or 1.0
            multiples = tuple(counts[other][rule] / first for other in [*chosen[1:], sample])
            every.add(multiples)
            if rule.is_usual:
                usual.add(multiples)
        return len(usual), len(every), -sample

    while len(chosen) < min(_TRIED, len(counts)):
        others = [sample for sample in range(len(counts)) if sample not in chosen]
        chosen.append(max(others, key=how_many_differ))
    return chosen


def groups_to_try(chosen: Sequence[int]) -> list[Group]:
    """Each sample alone, a pair, and all of them: eight groups of six samples."""
    groups: list[Group] = [(sample,) for sample in chosen]
    return [*groups, (chosen[0], chosen[-1]), tuple(chosen)]


def groups_to_confirm(others: Sequence[int], partner: int, is_usual: bool) -> list[Group]:
    """Further samples alone, and together with one that was tried.

    Args:
        others: Samples that were not tried, the longest last. That one is taken, and some of all lengths.
        partner: The sample that was tried.
        is_usual: Whether many projects mean the rule. If not, it needs more samples.
    """
    count = min(_CONFIRMING[is_usual], len(others))
    further = [others[-1 - index * len(others) // count] for index in range(count)]
    groups: list[Group] = [(sample,) for sample in further]
    # The longest by itself: padding makes all samples of a batch as large as it.
    groups.append((partner, further[0]))
    if count > 1:
        groups.append((partner, *further[1:]))
    return groups
