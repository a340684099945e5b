"""Shares the samples of a minibatch out to ranks: longest first, then exchanges between ranks.

*Longest first* gives each sample, the costliest first, to the rank that then ends earliest. Then pairs of ranks
exchange samples, judged by their true loads, which a `Microbatches` knows. Small minibatches are searched from several
starts side by side: a few hundred numbers cost numpy as much as one. Tables are also shared out whole, halved and
quartered, since the samples of all ranks pad least if they are cut together.

Note [Exchanges]
~~~~~~~~~~~~~~~~
A heavy rank gives a set of samples to a light one and takes a set back. A list has the sets: every set where ranks have
few samples, else sets of up to two samples or one. For each pair of ranks, each set is tried against each other one.
First by an estimate: each sample carries its part of a load, so all exchanges of many pairs are two sums and a maximum.
The most promising one, whose larger load is smallest, is then made if the true loads agree.

A *round* pairs the heaviest rank with the lightest, the second heaviest with the second lightest and so on, rotated by
one partner after each round. An *attack* tries the heaviest rank against the lightest ones. Neither makes the larger
load of a pair larger, so the largest load never grows.

Example: three equal ranks hold the costs ``{9, 7}``, ``{8}`` and ``{3}``. Let 9, 8, 7, 3 be samples 0 to 3, and 4 the
number of no sample. Each rank has two slots::

    members = [[0, 2],     loads = [16,
               [1, 4],               8,
               [3, 4]]               3]

The first round pairs rank 0 with rank 2. The sets of two slots are none, the first, the second and both. The sums
over them are 0, 9, 7, 16 on the heavy rank and 0, 3, 0, 3 on the light one, whose second slot is empty. The larger
load after giving a set (rows) and taking one (columns)::

               {}    {3}   {}    {3}
    {}         16    19    16    19      heavy: 16 - given + taken
    {9}        12    10    12    10      light:  3 + given - taken
    {7}        10    12    10    12
    {9, 7}     19    16    19    16

The first smallest entry, 10, gives 9 and takes 3: ``members`` becomes ``[[2, 3], [1, 4], [0, 4]]``, ``loads``
``[10, 8, 9]``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints
from lightning_odc.balance.microbatches import FEW_SAMPLES, Microbatches

TOLERANCE = 1e-5
"""The search ends where the largest load is this close to the lower bound, relative to it."""

_MORE_STARTS_ABOVE = 1e-4
_STARTS = 16
_SAMPLES_IN_STARTS = 384
_STARTS_OF_FEW = 120
_TOLERANCE = 1e-3
_ROUNDS = 24
_ROUNDS_OF_MANY = 6
_ROUNDS_OF_STARTS = 5
_ATTACKS = 40
_ATTACKS_OF_MANY = 12
_MOST_ATTACKED = 24
_PATIENCE = 4
_TRIES = 12
_SHAKES = (0.1, 0.3)
_MOST_SETS = 46
_MOST_SLOTS = 64
_GOLDEN, _PLASTIC = 0.6180339887498949, 0.7548776662466927

Groups = list[list[int]]
"""The samples of every rank, numbered as in `Microbatches`."""


def share_out(work: Microbatches) -> Groups:
    """Samples for every rank such that the largest load is small; some ranks may get none.

    Pieces are shared out by their costs alone. If loads are more than the sum of those, samples are exchanged by true
    loads afterwards.
    """
    few, ranks, bound = len(work) <= FEW_SAMPLES, work.num_ranks, work.bound()
    good_enough = bound * (1 + (TOLERANCE if few or work.is_additive else _TOLERANCE))
    divisions = list(work.divisions())
    if not few and len(divisions) > 1:
        divisions = [
            min(divisions, key=lambda d: work.largest_load(d.samples(longest_first(d.costs, ranks))))
        ]
    starts: list[Groups] = []
    for division in divisions:
        starts.append(division.samples(partition(division.costs, ranks, bound, good_enough)))
        if work.is_additive or ranks == 1 or work.largest_load(starts[-1]) <= good_enough:
            return starts[-1]
    if few:
        shaken = range(1, _STARTS_OF_FEW // len(work))
        starts += [
            d.samples(longest_first(_shaken(d.costs, index), ranks)) for d in divisions for index in shaken
        ]
    search = Search(work.parts, starts, work.load)
    search.run(good_enough, *((_ROUNDS, _ATTACKS) if few else (_ROUNDS_OF_MANY, _ATTACKS_OF_MANY)))
    return search.best()[1]


def partition(costs: Floats, num_ranks: int, bound: float, good_enough: float) -> Groups:
    """Pieces for every rank such that the largest sum of costs is small.

    Args:
        costs: ``[1 or num_ranks, n]`` whole numbers.
        num_ranks: How many ranks there are.
        bound: No largest load is below it.
        good_enough: The search ends at this largest load.
    """
    search = Search(costs, [longest_first(costs, num_ranks)])
    search.run(good_enough, _ROUNDS)
    largest, groups = search.best()
    starts = min(_STARTS, _SAMPLES_IN_STARTS // costs.shape[1])
    if largest <= bound * (1 + _MORE_STARTS_ABOVE) or num_ranks == 1 or starts < 2:
        return groups
    shaken = (longest_first(_shaken(costs, index), num_ranks) for index in range(1, starts))
    search = Search(costs, [groups, *shaken])
    search.run(good_enough, _ROUNDS_OF_STARTS)
    return search.best()[1]


def _shaken(costs: Floats, index: int) -> Floats:
    """Costs moved by up to 10 or 30 percent give other partitions."""
    spread = (np.arange(costs.shape[1]) * _GOLDEN + index * _PLASTIC) * (1 + index) % 1.0
    return costs * (1 + _SHAKES[index % len(_SHAKES)] * (2 * spread - 1))


def longest_first(costs: Floats, num_ranks: int) -> Groups:
    """LPT: each of ``n`` pieces, the costliest first, goes to the rank that then ends earliest.

    Args:
        costs: ``[1 or num_ranks, n]``.
        num_ranks: How many ranks there are.
    """
    groups: Groups = [[] for _ in range(num_ranks)]
    falling = np.argsort(-costs.sum(0), kind="stable").tolist()
    if len(costs) == 1:
        heap, weights = [(0.0, rank) for rank in range(num_ranks)], costs[0].tolist()
        for piece in falling:
            load, rank = heap[0]
            groups[rank].append(piece)
            heapq.heapreplace(heap, (load + weights[piece], rank))
        return groups
    loads, by_piece = np.zeros(num_ranks), np.ascontiguousarray(costs.T)
    for piece in falling:
        ends = loads + by_piece[piece]
        rank = int(ends.argmin())
        groups[rank].append(piece)
        loads[rank] = ends[rank]
    return groups


@dataclass(frozen=True, eq=False)
class _Sets:
    """Sets of slots: ``chosen[s, k]`` is whether set ``s`` has slot ``k``."""

    chosen: Bools
    weights: Floats  # [k, s], `chosen` transposed, for products
    exchanges: Ints  # [2, e] sets that are given and taken: all pairs of sets, row by row of a table
    equal_exchanges: Ints  # the same, only of the pairs of sets of equal size

    def sums(self, values: Floats) -> Floats:
        """``[p, s]`` from ``[p, k]``: for each pair the sum over each set."""
        # Not `values @ weights`: a BLAS may start threads for it, which on a busy machine takes ten times as long.
        return np.einsum("pk,ks->ps", values, self.weights)


@lru_cache(maxsize=256)
def _sets_of(slots: int) -> _Sets:
    """All sets of up to as many slots as keep the list short; of some slots only, if there are very many."""
    used = (
        range(slots) if slots <= _MOST_SLOTS else np.linspace(0, slots - 1, _MOST_SLOTS).astype(int).tolist()
    )
    sets: list[tuple[int, ...]] = [()]
    for size in range(1, slots + 1):
        more = list(combinations(used, size))
        if size > 1 and len(sets) + len(more) > _MOST_SETS:
            break
        sets += more
    chosen = np.zeros((len(sets), slots), dtype=np.bool_)
    for row, members in enumerate(sets):
        chosen[row, list(members)] = True
    sizes = chosen.sum(1)
    everything = np.array(np.nonzero(np.ones((len(sets), len(sets)))))
    equal = np.array(np.nonzero(sizes[:, None] == sizes))
    weights = np.ascontiguousarray(chosen.T, dtype=np.float64)
    return _Sets(chosen, weights, everything, equal)


class Search:
    """Improves several partitions of one minibatch side by side.

    Rows of the arrays are ranks: row ``c * num_ranks + r`` is rank ``r`` in candidate ``c``.

    Args:
        parts: ``[1 or num_ranks, n]`` whole numbers, what each sample adds to a load.
        candidates: The partitions to improve.
        load: The true load of a rank with some samples, which rise; by default the sum of the parts.
        base: ``[num_ranks]``, what ranks pay before any sample.
        equal_counts: Exchange sets of equal size only, so that counts stay as they are.
    """

    def __init__(
        self,
        parts: Floats,
        candidates: Sequence[Groups],
        load: Callable[[int, list[int]], float] | None = None,
        base: Floats | None = None,
        equal_counts: bool = False,
    ) -> None:
        self._parts, self._load, self._equal = np.pad(parts, ((0, 0), (0, 1))), load, equal_counts
        self._count, self._num_ranks = len(candidates), len(candidates[0])
        self._base = np.zeros(self._num_ranks) if base is None else base
        self._ranks = np.tile(np.arange(self._num_ranks), self._count)
        self._first = np.arange(self._count)[:, None] * self._num_ranks
        self._nothing = parts.shape[1]
        rows = [group for groups in candidates for group in groups]
        width = max(1, *map(len, rows))
        self._members = np.array([group + [self._nothing] * (width - len(group)) for group in rows])
        self._members.sort(1)
        self._loads = np.array(self._true_loads(np.arange(len(rows)), self._members))

    def best(self) -> tuple[float, Groups]:
        """The smallest largest load, and its partition."""
        largest = self._largest()
        first = int(largest.argmin()) * self._num_ranks
        rows = self._members[first : first + self._num_ranks].tolist()
        return float(largest.min()), [[sample for sample in row if sample < self._nothing] for row in rows]

    def run(self, good_enough: float, rounds: int, attacks: int = _ATTACKS) -> None:
        """Improve until a candidate's largest load is ``good_enough``, or little more is to be expected."""
        largest, stale = self._largest(), 0
        for turn in range(rounds if self._num_ranks > 1 else 0):
            if largest.min() <= good_enough or stale == _PATIENCE:
                break
            self._round(turn)
            before, largest = largest, self._largest()
            stale = 0 if (largest < before).any() else stale + 1
        for _ in range(attacks if self._num_ranks > 1 else 0):
            if self._largest().min() <= good_enough or not self._attack():
                break

    def _largest(self) -> Floats:
        """The largest load of each candidate."""
        return self._loads.reshape(self._count, -1).max(1)

    def _round(self, turn: int) -> None:
        half = self._num_ranks // 2
        loads = self._loads.reshape(self._count, -1)  # [candidates, ranks]
        falling = np.argsort(-loads, axis=1, kind="stable") + self._first
        heavy = falling[:, :half].reshape(-1, 1)
        light = np.roll(falling[:, ::-1][:, :half], turn, axis=1).reshape(-1, 1)
        self._exchange(heavy, light, tries=1)

    def _attack(self) -> bool:
        """One exchange of the heaviest rank in each candidate; whether any got better."""
        loads = self._loads.reshape(self._count, -1)  # [candidates, ranks]
        rising = np.argsort(loads, axis=1, kind="stable") + self._first
        light = rising[:, :-1][:, :_MOST_ATTACKED]
        heavy = np.broadcast_to(rising[:, -1:], light.shape)
        return self._exchange(heavy, light, tries=_TRIES if self._load else 1)

    def _exchange(self, heavy: Ints, light: Ints, tries: int) -> bool:
        """Make one exchange for each of ``g`` heavy rows, with one of its ``p`` partners; see Note [Exchanges].

        Args:
            heavy: ``[g, p]`` rows, in each line the same one ``p`` times.
            light: ``[g, p]`` rows, all different.
            tries: How many exchanges are tried for each heavy row until the true loads agree with one.
        """
        sets = _sets_of(self._members.shape[1])
        gives, takes = sets.equal_exchanges if self._equal else sets.exchanges
        larger = self._larger(sets, gives, takes, heavy.ravel(), light.ravel()).reshape(len(heavy), -1)
        limits, waiting = self._loads[heavy[:, 0]], np.arange(len(heavy))
        for _ in range(tries):
            best = larger.argmin(1)[waiting]
            promising = larger[waiting, best] < limits[waiting]
            waiting, best = waiting[promising], best[promising]
            if not len(waiting):
                break
            partner, exchange = np.divmod(best, len(gives))
            made = self._make(
                heavy[waiting, 0],
                light[waiting, partner],
                sets.chosen[gives[exchange]],
                sets.chosen[takes[exchange]],
            )
            larger[waiting, best] = np.inf
            waiting = waiting[~made]
            if self._members.shape[1] > sets.chosen.shape[1]:
                break
        return bool((self._loads[heavy[:, 0]] < limits).any())

    def _larger(self, sets: _Sets, gives: Ints, takes: Ints, heavy: Ints, light: Ints) -> Floats:
        """``[p, e]``: an estimate of the larger load of each pair of rows after each exchange."""
        mine, theirs = self._members[heavy], self._members[light]  # [p, k] samples
        # What a sample costs the rank that loses it, and what it costs the other: the same where ranks are equal.
        # Each [p, s]: for each set that one of the two may give.
        lost = given = sets.sums(self._at(heavy, mine))
        taken = got = sets.sums(self._at(light, theirs))
        if len(self._parts) > 1:
            given = sets.sums(self._at(light, mine))
            got = sets.sums(self._at(heavy, theirs))
        less = lost.take(gives, 1) - got.take(takes, 1)
        more = less if len(self._parts) == 1 else given.take(gives, 1) - taken.take(takes, 1)
        larger = self._loads[heavy, None] - less
        return np.maximum(larger, self._loads[light, None] + more, out=larger)

    def _at(self, rows: Ints, samples: Ints) -> Floats:
        """Parts ``[p, k]`` of ``samples[p, k]`` on the ranks of ``rows[p]``."""
        if len(self._parts) == 1:
            return self._parts[0].take(samples)
        return self._parts.ravel().take(samples + (self._ranks[rows] * self._parts.shape[1])[:, None])

    def _true_loads(self, rows: Ints, members: Ints) -> list[float]:
        """The loads of rows with these members, ``[p, k]``."""
        ranks = self._ranks[rows]
        if self._load is None:
            return (self._at(rows, members).sum(1) + self._base[ranks]).tolist()
        groups = ([sample for sample in row if sample < self._nothing] for row in members.tolist())
        return [self._load(rank, group) for rank, group in zip(ranks.tolist(), groups, strict=True)]

    def _make(self, heavy: Ints, light: Ints, give: Bools, take: Bools) -> Bools:
        """Make the exchanges that truly lower the heavier load of ``p`` pairs of rows, and say which.

        ``give[p, k]`` and ``take[p, k]`` are slots of the heavy and of the light row.
        """
        mine, theirs, nothing = self._members[heavy], self._members[light], self._nothing
        # [p, 2k] what each rank keeps, then what it gets, with gaps where a slot moved away. No sample has the highest
        # number, so sorting moves the gaps to the end: with give = {first} and take = {first},
        # [0, 2] and [3, 4] -> [4, 2 | 3, 4] and [4, 4 | 0, 4] -> [2, 3, 4, 4] and [0, 4, 4, 4].
        kept_and_got = [np.where(give, nothing, mine), np.where(take, theirs, nothing)]
        kept_and_given = [np.where(take, nothing, theirs), np.where(give, mine, nothing)]
        new = np.stack([np.concatenate(kept_and_got, 1), np.concatenate(kept_and_given, 1)])
        new.sort(2)
        loads = np.array([self._true_loads(heavy, new[0]), self._true_loads(light, new[1])])
        made = loads.max(0) < self._loads[heavy]
        width = self._members.shape[1]
        more = int((new[:, made] < nothing).sum(2).max(initial=0)) - width
        if more > 0:  # a rank has more samples than slots now: all rows get more slots
            self._members = np.pad(self._members, ((0, 0), (0, more)), constant_values=nothing)
            width += more
        changed = np.stack([heavy, light])[:, made]
        self._members[changed] = new[:, made, :width]
        self._loads[changed] = loads[:, made]
        return made
