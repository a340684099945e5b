"""How many samples a microbatch really holds, which its ``collate_fn`` may have left out or made more of.

Note [What ran counts]
~~~~~~~~~~~~~~~~~~~~~~
A plan counts the samples that a ``collate_fn`` is given. One that leaves out what is too long or ``None`` makes fewer,
and the mean over samples is then over those it made. Nothing in a batch says which of its sizes is that of samples, so
of a few that are collated, alone and together, the size that follows their number tells. ::

    samples        0        1        0 and 1
    input_ids      [1, 5]   [1, 9]   [2, 9]       the first size is 1, 1, 2, and the second one is not
    cu_seqlens     [2]      [2]      [3]          one more than the samples
    left out        [1, 5]   error    [1, 5]       still adds up

Where the sizes of a microbatch differ from its plan, each of its samples is collated alone once more, which shows what
was made of it. One of which nothing is left is replaced by a sample that counts nothing, so that ranks run as many
microbatches as planned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.data.minibatch import LoaderFacts, MicrobatchFacts, Rereader, Task
from lightning_odc.data.plan import Recipe
from lightning_odc.samples.probe import Probe, counts_in
from lightning_odc.samples.weighting import planned_counts

ReadBatch = Callable[[list[int]], Any]
"""Makes a batch of the samples at some positions."""


@dataclass(frozen=True)
class Ran:
    """Where a batch shows the samples that it holds, and what they count; see Note [What ran counts]."""

    rows: Hashable = None  # the name of a size, see `counts_in`
    stand_in: int | None = None  # the position of a short sample that is not left out

    def task(
        self,
        batch: Any,
        weight: float,
        indices: Sequence[int],
        lengths: Ints,
        seed: tuple[int, ...],
        recipe: Recipe,
        read: ReadBatch,
        again: Rereader | None = None,
    ) -> Task:
        """A microbatch that was read, and what it counts; or the stand-in if nothing is left of it.

        Args:
            batch: The microbatch.
            weight: What it is planned to count.
            indices: The positions of its samples.
            lengths: Their lengths.
            seed: The seed of its random numbers.
            recipe: How samples become minibatches.
            read: Makes a batch of the samples at some positions.
            again: Its samples, where they can be read again.
        """
        samples = self.samples(batch)
        collation = recipe.collation
        tokens = None  # where rows are equally long anyway, nothing shows that lengths count tokens
        if collation.fixed is None:
            tokens = int(lengths.sum())
        detail = MicrobatchFacts(collation.rows(lengths), seed, again, samples, tokens)
        if samples == 0 and self.stand_in is not None:
            return Task(read([self.stand_in]), 0.0, detail)
        # Weights are what was planned: not of sums, and not where tensors of the batch are counted.
        if recipe.counter is None and recipe.weighting != "sum" and samples not in (None, len(indices)):
            weight *= self._part(samples or 0, indices, planned_counts(recipe.weighting, lengths), read)
        return Task(batch, weight, detail)

    def samples(self, batch: Any) -> int | None:
        """The number of samples; ``None`` where the batch does not show it. It waits for no device."""
        if batch is None:
            return 0
        return dict(counts_in(batch)).get(self.rows)

    def _part(self, samples: int, indices: Sequence[int], planned: Floats, read: ReadBatch) -> float:
        """What so many samples count, as a part of what those at the positions were planned to count."""
        if len(set(planned.tolist())) > 1:
            alone = [self.samples_alone(index, read) or 0 for index in indices]
            if sum(alone) == samples:
                return float((planned * alone).sum() / planned.sum())
        return samples / len(planned)

    def samples_alone(self, position: int, read: ReadBatch) -> int | None:
        """How many samples are made of one; ``None`` where its batch does not show it."""
        with suppress(Exception):  # of a sample that is left out, it may fail
            return self.samples(read([position]))
        return 0


def ran_of(probe: Probe) -> Ran:
    """What batches show, as a look at a few of them says."""
    stand_in = None
    if probe.kept:
        stand_in = probe.indices[probe.kept[0]]
    return Ran(_rows(probe), stand_in)


def _rows(probe: Probe) -> Hashable:
    """The name of the size that is 1 for most samples, and adds up in most pairs."""
    alone = [seen.counts for seen in probe.alone]
    shown = [(counts, tokens) for counts, tokens in zip(alone, probe.tokens.tolist(), strict=True) if counts]
    pairs = [(pair, seen.counts) for pair, seen in probe.together.items() if seen.counts]
    for name in dict.fromkeys(name for counts in alone for name in counts):
        sizes = [counts.get(name) for counts, _ in shown]
        if sizes == [tokens for _, tokens in shown] and {*sizes} != {1}:
            continue  # it may be the tokens of a row
        sums = []
        for (first, second), counts in pairs:
            parts = alone[first].get(name, 0) + alone[second].get(name, 0)
            sums.append(counts.get(name, 0) == parts > 0)
        if 2 * sizes.count(1) >= len(sizes) and 2 * sum(sums) >= len(sums) > 0:
            return name
    return None


def warn_of_others(origin: LoaderFacts) -> bool:
    """Say which microbatch holds fewer or more samples than planned; returns whether there is one."""
    for detail in origin.details:
        planned = len(detail.lengths)
        if detail.ran not in (None, planned):
            warnings.warn(
                f"collate_fn made {detail.ran} samples of {planned}. What ran counts in the gradient, not what was "
                "planned. Plans are better if the data set leaves such samples out. This message appears once.",
                stacklevel=2,
            )
            return True
    return False
