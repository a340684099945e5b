"""Partitions when a microbatch costs something besides its samples, so that packing and balancing depend on each other.

A rank's load is the cost of its samples, plus its overhead times the microbatches they need, plus what samples cost
each other in one microbatch (Note [Dense attention]). Packing decides how much that is, and in steps. So first the
search works without steps: each sample carries its share of a well-filled microbatch. Then a descent over the true
loads lets the heaviest rank exchange samples with others; it estimates all exchanges, and packs the promising ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.bins import pack, packing_cost, share
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

    Without pair costs, up to 10 samples are shared out in the best possible way. A few more are tried with shares for
    microbatches that are full, three quarters full, and with no shares.

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
    shares = _shares(lengths, cap, terms)
    bound = Workload.of(terms.samples + _shares(lengths, cap, replace(terms, pair=0 * terms.pair)), num_ranks)
    good_enough = lower_bound(bound) / bound.scale * (1 + TOLERANCE)
    best: _Descent | None = None
    for filling in _FILLINGS if few else _FILLINGS[:1]:
        work = Workload.of(terms.samples + shares / filling, num_ranks)
        groups = [work.order[group].tolist() for group in partition(work, starts=starts)]
        descent = _Descent(lengths, cap, terms, shares, groups, pairs_too=few)
        descent.run(good_enough, _STEPS_FOR_FEW if few else _STEPS)
        if best is None or descent.largest_load() < best.largest_load():
            best = descent
        if best.largest_load() <= good_enough:
            break
    assert best is not None
    return [np.array(group, dtype=np.int64) for group in best.groups]


def _shares(lengths: Ints, cap: int, terms: Terms) -> Floats:
    """``[1 or num_ranks, n]``: what each sample adds to the cost of microbatches on average, see `share`."""
    ranks = 1 if terms.are_alike else len(terms.overhead)
    costs = zip(terms.overhead[:ranks].tolist(), terms.pair[:ranks].tolist(), strict=True)
    return np.array([[share(size, cap, *cost)[1] for size in lengths.tolist()] for cost in costs])


@dataclass(frozen=True, eq=False)
class _Moves:
    """Exchanges of the heaviest rank with any other, by an estimate of the larger load that they cause."""

    give: Ints  # [g, 2] samples of the heaviest rank; `num_samples` stands for none
    take: Ints  # [t, 2] samples of one other rank
    partner: Ints  # [t] that rank
    best: Ints  # indices into [g * t], the most promising first


class _Descent:
    """Exchanges between the heaviest rank and the others while the largest true load falls."""

    def __init__(
        self,
        lengths: Ints,
        cap: int,
        terms: Terms,
        shares: Floats,
        groups: list[list[int]],
        pairs_too: bool,
    ) -> None:
        self.groups = groups
        self._cap, self._terms, self._most_in_pairs = cap, terms, _PAIRS_UP_TO if pairs_too else 0
        self._sizes = np.append(lengths, 0)
        self._costs = np.pad(terms.rows, ((0, 0), (0, 1)))
        # Microbatches are estimated by the tokens that fill them, or, where filling them costs, by shares.
        by_shares = bool(terms.pair.any())
        self._estimated = self._costs + np.pad(shares, ((0, 0), (0, 1))) if by_shares else self._costs
        self._steps = np.zeros_like(terms.overhead) if by_shares else terms.overhead
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
            self._extras[key] = packing_cost(pack(sizes, self._cap, overhead, pair), sizes, overhead, pair)
        return math.fsum([*self._costs[rank, group].tolist(), self._extras[key]])

    def _step(self) -> bool:
        """Make the first exchange found that lowers the heaviest rank without making another as heavy."""
        limit = self.largest_load()
        heaviest = self._loads.index(limit)
        moves = self._moves(heaviest, limit)
        for flat in moves.best.tolist():
            give, take = (
                moves.give[flat // len(moves.take)].tolist(),
                moves.take[flat % len(moves.take)].tolist(),
            )
            partner = int(moves.partner[flat % len(moves.take)])
            here, there = _exchanged(
                self.groups[heaviest], self.groups[partner], give, take, len(self._sizes) - 1
            )
            if max(self._load(heaviest, here), self._load(partner, there)) < limit:
                self._assign(heaviest, here)
                self._assign(partner, there)
                return True
        return False

    def _moves(self, heaviest: int, limit: float) -> _Moves:
        others = [rank for rank in range(len(self.groups)) if rank != heaviest]
        sets = [self._sets(self.groups[rank]) for rank in others]
        give = np.array(self._sets(self.groups[heaviest]))
        take = np.array([members for of_rank in sets for members in of_rank])
        partner = np.repeat(others, [len(of_rank) for of_rank in sets])
        larger = self._larger(heaviest, give, take, partner).ravel()
        lower = np.flatnonzero(larger < limit)
        best = lower[np.argsort(larger[lower], kind="stable")[:_PACKED]]
        return _Moves(give, take, partner, best)

    def _sets(self, group: list[int]) -> list[tuple[int, int]]:
        """No sample, each alone, and each two if they are few."""
        none = len(self._sizes) - 1
        pairs = combinations(group, 2) if len(group) <= self._most_in_pairs else ()
        return [(none, none), *((sample, none) for sample in group), *pairs]

    def _larger(self, heaviest: int, give: Ints, take: Ints, partner: Ints) -> Floats:
        """``[g, t]``: an estimate of the larger of the two loads."""
        costs, sums, filled = self._estimated, self._sums, self._filled
        gives = costs[:, give[:, 0]] + costs[:, give[:, 1]]
        given, lost = gives[partner].T, gives[heaviest][:, None]
        taken = costs[partner, take[:, 0]] + costs[partner, take[:, 1]]
        got = costs[heaviest, take[:, 0]] + costs[heaviest, take[:, 1]]
        moved = (self._sizes[give[:, 0]] + self._sizes[give[:, 1]])[:, None]
        moved = moved - self._sizes[take[:, 0]] - self._sizes[take[:, 1]]
        here = (
            sums[heaviest] - lost + got + self._steps[heaviest] * -(-(filled[heaviest] - moved) // self._cap)
        )
        there = sums[partner] + given - taken
        return np.maximum(here, there + self._steps[partner] * -(-(filled[partner] + moved) // self._cap))


def _exchanged(
    here: list[int], there: list[int], give: list[int], take: list[int], none: int
) -> tuple[list[int], list[int]]:
    """Two groups after one gave ``give`` and took ``take``."""
    kept_here = [sample for sample in here if sample not in give]
    kept_there = [sample for sample in there if sample not in take]
    got, given = ([sample for sample in moved if sample != none] for moved in (take, give))
    return kept_here + got, kept_there + given
