"""Partitions when a microbatch costs something besides its samples, so that packing and balancing depend on each other.

A rank's load is the cost of its samples, plus its overhead times the microbatches they need, plus what samples cost
each other in one microbatch (Note [Dense attention]). Packing decides how much that is, and in steps. So first the
search works without steps: each sample carries its part of a well-filled microbatch. Then a descent over the true loads
lets the heaviest rank exchange samples with others; it estimates all exchanges, and packs the promising ones.

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
from dataclasses import replace
from itertools import combinations

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.bins import bin_fraction, pack_bins, packing_cost
from lightning_odc.balance.costs import Terms
from lightning_odc.balance.exact import MOST_RANKS, MOST_SAMPLES, best_partition, bins_of_sets, sums_of_sets
from lightning_odc.balance.partition import TOLERANCE, partition
from lightning_odc.balance.workload import Workload, lower_bound

_FEW_SAMPLES = 32
_STEPS_FOR_FEW = 64
_STEPS = 12
_PACKED = 48
_PAIRS_UP_TO = 10
_FILLINGS = (1.0, 0.75, math.inf)


def partition_with_overheads(lengths: Ints, cap: int, terms: Terms, starts: int) -> list[Ints]:
    """For every rank the indices of its samples.

    Without pair costs, up to 10 samples are shared out in the best possible way. A few more are tried with the parts of
    microbatches that are full or three quarters full, and without parts.

    Args:
        lengths: ``[n]`` tokens.
        cap: most tokens of a microbatch.
        terms: the costs.
        starts: see `Planner`.
    """
    num_ranks, few = len(terms.overhead), len(lengths) <= _FEW_SAMPLES and starts > 0
    if few and len(lengths) <= MOST_SAMPLES and num_ranks <= MOST_RANKS and not terms.pair.any():
        loads = sums_of_sets(terms.rows) + terms.overhead[:, None] * bins_of_sets(lengths, cap)
        return [np.array(group, dtype=np.int64) for group in best_partition(loads)]
    bin_costs = _bin_costs(lengths, cap, terms)
    least = terms.samples + _bin_costs(lengths, cap, replace(terms, pair=0 * terms.pair))
    bound = Workload.of(least, num_ranks)
    good_enough = lower_bound(bound) / bound.scale * (1 + TOLERANCE)
    best: _Descent | None = None
    for filling in _FILLINGS if few else _FILLINGS[:1]:
        work = Workload.of(terms.samples + bin_costs / filling, num_ranks)
        groups = [work.order[group].tolist() for group in partition(work, starts=starts)]
        descent = _Descent(lengths, cap, terms, bin_costs, groups, pairs_too=few)
        descent.run(good_enough, _STEPS_FOR_FEW if few else _STEPS)
        if best is None or descent.largest_load() < best.largest_load():
            best = descent
        if best.largest_load() <= good_enough:
            break
    assert best is not None
    return [np.array(group, dtype=np.int64) for group in best.groups]


def _bin_costs(lengths: Ints, cap: int, terms: Terms) -> Floats:
    """``[1 or num_ranks, n]``: what each sample adds to the cost of microbatches, see `bin_fraction`."""
    ranks = 1 if terms.are_alike else len(terms.overhead)
    costs = zip(terms.overhead[:ranks].tolist(), terms.pair[:ranks].tolist(), strict=True)
    return np.array([[bin_fraction(size, cap, *cost)[1] for size in lengths.tolist()] for cost in costs])


class _Descent:
    """Exchanges between the heaviest rank and the others while the largest true load falls.

    Args:
        lengths: ``[n]`` tokens.
        cap: Most tokens of a microbatch.
        terms: The costs.
        bin_costs: ``[1 or num_ranks, n]``, of `_bin_costs`.
        groups: For every rank its samples.
        pairs_too: Ranks of few samples exchange two at once.
    """

    def __init__(
        self,
        lengths: Ints,
        cap: int,
        terms: Terms,
        bin_costs: Floats,
        groups: list[list[int]],
        pairs_too: bool,
    ) -> None:
        self.groups = groups
        self._cap, self._terms, self._most_in_pairs = cap, terms, _PAIRS_UP_TO if pairs_too else 0
        # Sample n is no sample: it has no tokens and costs nothing, so that sets of one and of none have two members.
        self._nothing = len(lengths)
        self._sizes = np.append(lengths, 0)  # [n + 1]
        self._costs = np.pad(terms.rows, ((0, 0), (0, 1)))  # [num_ranks, n + 1]
        # Microbatches are estimated by the tokens that fill them, or, where filling them costs, by each sample's part.
        by_parts = bool(terms.pair.any())
        self._estimated = self._costs + np.pad(bin_costs, ((0, 0), (0, 1))) if by_parts else self._costs
        self._steps = np.zeros_like(terms.overhead) if by_parts else terms.overhead  # [num_ranks]
        self._extras: dict[tuple[float, ...], float] = {}
        self._sums, self._filled = np.zeros(len(groups)), np.zeros(len(groups), dtype=np.int64)
        self._loads = [0.0] * len(groups)
        for rank, group in enumerate(groups):
            self._assign(rank, group)

    def largest_load(self) -> float:
        return max(self._loads)

    def run(self, good_enough: float, steps: int) -> None:
        for _ in range(steps):
            if len(self.groups) == 1 or self.largest_load() <= good_enough or not self._step():
                break

    def _assign(self, rank: int, group: list[int]) -> None:
        self.groups[rank] = group
        self._sums[rank] = math.fsum(self._estimated[rank, group].tolist())
        self._filled[rank] = self._sizes[group].sum()
        self._loads[rank] = self._load(rank, group)

    def _load(self, rank: int, group: list[int]) -> float:
        """The true load, packing included."""
        overhead, pair = float(self._terms.overhead[rank]), float(self._terms.pair[rank])
        sizes = sorted(self._sizes[group].tolist())
        key = (overhead, pair, *sizes)
        if key not in self._extras:
            bins = pack_bins(sizes, self._cap, overhead, pair)
            self._extras[key] = packing_cost(bins, sizes, overhead, pair)
        return math.fsum([*self._costs[rank, group].tolist(), self._extras[key]])

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
            if max(self._load(heaviest, here), self._load(other, there)) < limit:
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
        bins_here = -(-(filled[heaviest] - moved) // self._cap)
        bins_there = -(-(filled[partner] + moved) // self._cap)
        here = sums[heaviest] - lost + got + self._steps[heaviest] * bins_here
        return np.maximum(here, sums[partner] + given - taken + self._steps[partner] * bins_there)
