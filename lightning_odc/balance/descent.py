"""Exchanges of samples between the heaviest rank and the others, over the true loads.

Packing decides how much a rank's microbatches cost, and the cost rises in steps. So exchanges are first estimated, for
all sets of up to two samples and all partners at once. Then the promising ones are packed.

Example: a token costs 1, a microbatch 2, and has at most 10 tokens. Rank 0 holds samples of 6 and 5 tokens, which need
two microbatches, rank 1 one of 4 and rank 2 one of 3. The loads are 15, 6 and 5. Rank 0 is the heaviest and may give
nothing or one of its samples; it may take nothing or the sample of one other rank, its partner. The estimate of the
larger load of the two::

    take            {}      {4}     {}      {3}
    partner         1       1       2       2
    give {}         15      19      15      18      11 tokens in two microbatches, or more
    give {6}        12      11      11      10
    give {5}        11      12      10      11

The first smallest entry, 10, exchanges 6 for 3 with rank 2. The true loads are then 10, 6 and 8, so the exchange is
made. Rank 0 is still the heaviest, and the next step looks at a new table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints

_PACKED = 48
_PAIRS_UP_TO = 10
_MOST_SAMPLES = (
    4096  # of more samples, one is too small a part of a load to be worth a table of all exchanges
)


class Loads(Protocol):
    """What ranks pay for sets of samples, packing included."""

    def of(self, rank: int, group: list[int]) -> float:
        """The true load of a rank with these samples."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """What ranks pay for samples, without packing them.

    Attributes:
        costs: ``[1 or num_ranks, n]``, of each sample on each rank; one row if all ranks are alike in them.
        steps: ``[num_ranks]``, of each microbatch that full ones would be; 0 if ``costs`` have it already.
        sizes: ``[n]`` tokens.
        caps: ``[num_ranks]``, most tokens of a microbatch.
    """

    costs: Floats
    steps: Floats
    sizes: Ints
    caps: Ints


class Descent:
    """Exchanges between the heaviest rank and the others while the largest true load falls.

    Args:
        loads: the true loads.
        estimate: what it packs by.
        groups: Samples of every rank.
        pairs_too: Ranks of few samples exchange two at once.
    """

    def __init__(self, loads: Loads, estimate: Estimate, groups: list[list[int]], pairs_too: bool) -> None:
        self.groups = groups
        self._true, self._most_in_pairs = loads, _PAIRS_UP_TO if pairs_too else 0
        # Sample n is no sample: it has no tokens and costs nothing, so that sets of one and of none have two members.
        self._nothing = len(estimate.sizes)
        self._sizes = np.append(estimate.sizes, 0)  # [n + 1]
        padded = np.pad(estimate.costs, ((0, 0), (0, 1)))
        self._estimated = np.broadcast_to(padded, (len(groups), len(self._sizes)))  # [num_ranks, n + 1]
        self._steps, self._caps = estimate.steps, estimate.caps  # [num_ranks]
        self._sums, self._filled = np.zeros(len(groups)), np.zeros(len(groups), dtype=np.int64)
        self._loads = [0.0] * len(groups)
        for rank, group in enumerate(groups):
            self._assign(rank, group)

    def largest_load(self) -> float:
        return max(self._loads)

    def run(self, good_enough: float, steps: int) -> None:
        if self._nothing > _MOST_SAMPLES:
            return
        for _ in range(steps):
            if len(self.groups) == 1 or self.largest_load() <= good_enough or not self._step():
                break

    def _assign(self, rank: int, group: list[int]) -> None:
        self.groups[rank] = group
        self._sums[rank] = math.fsum(self._estimated[rank].take(group).tolist())
        self._filled[rank] = sum(self._sizes.take(group).tolist())
        self._loads[rank] = self._true.of(rank, group)

    def _step(self) -> bool:
        """Make the first exchange found that lowers the heaviest rank without making another as heavy."""
        limit = self.largest_load()
        heaviest = self._loads.index(limit)
        others = [rank for rank in range(len(self.groups)) if rank != heaviest]
        sets = [self._sets(self.groups[rank]) for rank in others]
        give = np.array(self._sets(self.groups[heaviest]))  # [g, 2] samples
        # Samples of one other rank: [t, 2], and that rank: [t].
        take = np.array([members for of_rank in sets for members in of_rank])
        partner = np.repeat(others, [len(of_rank) for of_rank in sets])
        larger = self._larger(heaviest, give, take, partner).ravel()  # [g * t]
        lower = np.flatnonzero(larger < limit)
        for flat in lower[np.argsort(larger[lower], kind="stable")[:_PACKED]].tolist():
            row, column = divmod(flat, len(take))
            other = int(partner[column])
            here = self._exchanged(self.groups[heaviest], give[row].tolist(), take[column].tolist())
            there = self._exchanged(self.groups[other], take[column].tolist(), give[row].tolist())
            if max(self._true.of(heaviest, here), self._true.of(other, there)) < limit:
                self._assign(heaviest, here)
                self._assign(other, there)
                return True
        return False

    def _sets(self, group: list[int]) -> list[tuple[int, int]]:
        """No sample, each alone, and each two if they are few."""
        none = self._nothing
        pairs = combinations(group, 2) if len(group) <= self._most_in_pairs else ()
        return [(none, none), *((sample, none) for sample in group), *pairs]

    def _exchanged(self, group: list[int], lost: list[int], got: list[int]) -> list[int]:
        kept = [sample for sample in group if sample not in lost]
        return kept + [sample for sample in got if sample != self._nothing]

    def _larger(self, heaviest: int, give: Ints, take: Ints, partner: Ints) -> Floats:
        """``[g, t]``: an estimate of the larger load of the two ranks after each exchange."""
        costs, sums, filled = self._estimated, self._sums, self._filled
        # Costs of what is given: [num_ranks, g] on every rank, [g, 1] on the heaviest, [g, t] on each partner.
        gives = costs[:, give[:, 0]] + costs[:, give[:, 1]]
        lost, given = gives[heaviest][:, None], gives[partner].T
        # Costs of what is taken: [t] on its partner, [t] on the heaviest.
        taken = costs[partner, take[:, 0]] + costs[partner, take[:, 1]]
        got = costs[heaviest, take[:, 0]] + costs[heaviest, take[:, 1]]
        # Tokens that leave the heaviest: [g, t].
        moved = self._sizes[give].sum(1)[:, None] - self._sizes[take].sum(1)
        # At least as many microbatches as full ones hold the tokens; -(-a // b) rounds up.
        bins_here = -(-(filled[heaviest] - moved) // self._caps[heaviest])
        bins_there = -(-(filled[partner] + moved) // self._caps[partner])
        here = sums[heaviest] - lost + got + self._steps[heaviest] * bins_here
        return np.maximum(here, sums[partner] + given - taken + self._steps[partner] * bins_there)
