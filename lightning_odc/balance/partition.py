"""Divide samples over ranks: a first partition, and a local search that improves it.

First partitions of a workload are made by longest first (LPT) and by largest differencing (Karmarkar-Karp). A
partition is a list of samples for every rank, numbered as in `Workload`. In the search, pairs of ranks exchange the
samples that make them most equal, many pairs at once.

Note [Exchanges]
~~~~~~~~~~~~~~~~
A heavy rank gives a set of samples to a light one and takes a set back. A table lists the sets: every set where ranks
have few samples, else sets of up to two samples or one. For each pair of ranks, each set is tried against each other
one (under equal counts, against those of its size), and the exchange whose larger load is smallest is taken. For all
pairs together that is two sums, a maximum and an ``argmin``.

A *round* pairs the heaviest rank with the lightest, the second heaviest with the second lightest and so on, rotated by
one partner after each round; an *attack* tries the heaviest rank against all others and makes the best exchange.
Neither makes the larger load of a pair larger, so the largest load never grows. Several partitions are improved side
by side in the same arrays: a few hundred numbers cost numpy as much as one.

Example: three alike ranks hold the costs ``{9, 7}``, ``{8}`` and ``{3}``. Samples are numbered by falling cost, so 9,
8, 7, 3 are samples 0 to 3, and 4 is the number of no sample. Each rank has two slots::

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints
from lightning_odc.balance.exact import MOST_RANKS, MOST_SAMPLES, best_partition, sums_of_sets
from lightning_odc.balance.workload import Workload, lower_bound

#: How many more starts are searched from where the first one leaves something to gain.
STARTS = 16
#: By default the search ends where the largest load is this close to the lower bound, relative to it.
TOLERANCE = 1e-5
_MORE_STARTS_ABOVE = 1e-4
_SAMPLES_IN_STARTS = 384
_ROUNDS = 24
_ROUNDS_OF_STARTS = 5
_SHAKES = (0.1, 0.3)
_GOLDEN = 0.6180339887498949


def partition(
    work: Workload, equal_counts: bool = False, starts: int = STARTS, tolerance: float = TOLERANCE
) -> Groups:
    """Samples for every rank such that the largest load is small.

    Args:
        work: the workload.
        equal_counts: ranks get equally many samples, or one less where ``num_ranks`` does not divide them.
        starts: how many more starts to search from, where the first one's result is not good enough; fewer, and at
            last none, for more than ``384 / starts`` samples, which leave less to gain. If not 0, up to 10 samples
            are shared out in the best possible way.
        tolerance: the search ends where the largest load is this close to the lower bound, relative to it.

    Returns:
        For every rank its samples, numbered as in the workload; some ranks may get none.
    """
    bound = lower_bound(work, equal_counts)
    good_enough = bound * (1 + tolerance)
    first = _start(work, equal_counts)
    if work.num_ranks == 1:
        return first
    search = Search(work, [first], equal_counts)
    search.run(good_enough, _ROUNDS)
    span, groups = search.best()
    if span <= bound * (1 + _MORE_STARTS_ABOVE) or starts < 1:
        return groups
    if not equal_counts and work.num_samples <= MOST_SAMPLES and work.num_ranks <= MOST_RANKS:
        loads = sums_of_sets(work.costs[:, :-1]) + work.base[:, None]
        return best_partition(np.broadcast_to(loads, (work.num_ranks, loads.shape[1])))
    starts = min(starts, _SAMPLES_IN_STARTS // work.num_samples)
    if starts < 1:
        return groups
    more = Search(work, [groups, *_more_starts(work, starts, equal_counts)], equal_counts)
    more.run(good_enough, _ROUNDS_OF_STARTS)
    return more.best()[1]


def _start(work: Workload, equal_counts: bool) -> Groups:
    if not equal_counts:
        return longest_first(work)
    return largest_to_fastest(work, balanced_differencing(work.means.tolist(), work.num_ranks))


def _more_starts(work: Workload, count: int, equal_counts: bool) -> list[Groups]:
    """Karmarkar-Karp, then starts from costs shaken by up to 10 or 30 percent."""
    if not equal_counts:
        karmarkar_karp = largest_differencing(work.means.tolist(), work.num_ranks)
        shaken = [longest_first(work, _shaken(work.means, index)) for index in range(1, count)]
        return [largest_to_fastest(work, karmarkar_karp), *shaken]
    starts = []
    for index in range(1, count + 1):
        costs = _shaken(work.means, index)
        order = np.argsort(-costs, kind="stable")
        groups = balanced_differencing(costs[order].tolist(), work.num_ranks)
        starts.append(largest_to_fastest(work, [order[group].tolist() for group in groups]))
    return starts


def _shaken(costs: Floats, index: int) -> Floats:
    """Costs times factors around 1, from the multiples of the golden ratio: spread evenly, and no random state."""
    steps = np.arange(len(costs)) * _GOLDEN + index * 0.7548776662466927
    spread = (steps * (1 + index)) % 1.0
    return costs * (1 + _SHAKES[index % len(_SHAKES)] * (2 * spread - 1))


Groups = list[list[int]]


def longest_first(work: Workload, costs: Floats | None = None) -> Groups:
    """LPT: each sample, the largest first, goes to the rank that then ends earliest.

    Args:
        work: the workload.
        costs: ``[n]``, sort and place by these instead of the true costs, to get other partitions; only where ranks
            are alike.
    """
    if not work.alike:
        return _earliest_end(work, costs)
    weights = (work.means if costs is None else costs).tolist()
    samples = range(len(weights)) if costs is None else np.argsort(-costs, kind="stable").tolist()
    heap = [(load, rank) for rank, load in enumerate(work.base.tolist())]
    heapq.heapify(heap)
    groups: Groups = [[] for _ in heap]
    for sample in samples:
        load, rank = heap[0]
        groups[rank].append(sample)
        heapq.heapreplace(heap, (load + weights[sample], rank))
    return groups


def _earliest_end(work: Workload, costs: Floats | None) -> Groups:
    """LPT for ranks that differ; ``costs`` only set the order."""
    loads = work.base.copy()
    columns = np.ascontiguousarray(work.costs.T)
    groups: Groups = [[] for _ in range(work.num_ranks)]
    samples = range(work.num_samples) if costs is None else np.argsort(-costs, kind="stable").tolist()
    for sample in samples:
        ends = loads + columns[sample]
        rank = int(ends.argmin())
        groups[rank].append(sample)
        loads[rank] = ends[rank]
    return groups


def largest_differencing(costs: Sequence[float], num_ranks: int) -> Groups:
    """Karmarkar-Karp for ``num_ranks`` alike: merge the two most uneven partial partitions, large against small.

    A partial partition keeps only its non-empty groups, largest first. So most merges touch few groups, and the whole
    takes milliseconds where lists of ``num_ranks`` mostly empty groups take a second.

    Args:
        costs: ``[n]``, one per sample, falling.
        num_ranks: the number of groups.

    Source: Karmarkar and Karp, *The Differencing Method of Set Partitioning*, 1982; in its k-way form.
    """
    heap = [(-cost, index, [cost], [[index]]) for index, cost in enumerate(costs)]
    return _merge_all(heap, num_ranks)


def balanced_differencing(costs: Sequence[float], num_ranks: int) -> Groups:
    """Karmarkar-Karp with equal counts: begins with rows of ``num_ranks`` samples of similar cost.

    Each merge gives every group one more sample. If ``num_ranks`` does not divide ``n``, some groups have one less.

    Args:
        costs: ``[n]``, one per sample, falling.
        num_ranks: the number of groups.
    """
    heap = []
    for row, first in enumerate(range(0, len(costs), num_ranks)):
        samples = range(first, min(first + num_ranks, len(costs)))
        sums = [costs[sample] for sample in samples]
        spread = sums[0] - (sums[-1] if len(sums) == num_ranks else 0)
        heap.append((-spread, row, sums, [[sample] for sample in samples]))
    heapq.heapify(heap)
    return _merge_all(heap, num_ranks)


def _merge_all(heap: list[tuple[float, int, list[float], Groups]], num_ranks: int) -> Groups:
    """Merge partial partitions ``(-spread, age, sums, groups)``, groups by falling sum, until one is left."""
    age = len(heap)
    while len(heap) > 1:
        _, _, sums, groups = heapq.heappop(heap)
        sums, groups = _merge(sums, groups, heap[0][2], heap[0][3], num_ranks)
        spread = sums[0] - (sums[-1] if len(sums) == num_ranks else 0)
        heapq.heapreplace(heap, (-spread, age, sums, groups))
        age += 1
    groups = heap[0][3]
    return groups + [[] for _ in range(num_ranks - len(groups))]


def _merge(
    sums: list[float], groups: Groups, other_sums: list[float], other_groups: Groups, num_ranks: int
) -> tuple[list[float], Groups]:
    """The largest group of one with the smallest of the other, of ``num_ranks`` each, counting the empty ones."""
    alone, end = num_ranks - len(other_sums), len(sums)
    if alone >= end:
        sums, groups = sums + other_sums, groups + other_groups
    else:
        partner = num_ranks - 1
        both = range(alone, end)
        sums = (
            sums[:alone] + [sums[j] + other_sums[partner - j] for j in both] + other_sums[: num_ranks - end]
        )
        groups = (
            groups[:alone]
            + [groups[j] + other_groups[partner - j] for j in both]
            + other_groups[: num_ranks - end]
        )
    falling = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)
    return [sums[j] for j in falling], [groups[j] for j in falling]


def largest_to_fastest(work: Workload, groups: Groups) -> Groups:
    """Give the groups of a partition for equal ranks to ranks that differ: the largest to the fastest."""
    if work.alike:
        return groups
    fastest = np.argsort(work.costs.sum(1), kind="stable").tolist()
    means = work.means.tolist()
    falling = sorted(groups, key=lambda group: -sum(means[sample] for sample in group))
    placed: Groups = [[] for _ in groups]
    for rank, group in zip(fastest, falling, strict=True):
        placed[rank] = group
    return placed


_MOST_SETS = 46
_MOST_SLOTS = 64
_PATIENCE = 4
_ATTACKS = 40


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
    """All sets of up to as many slots as keep the table small; of some slots only, if there are very many."""
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


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The best exchange for each of ``p`` pairs, and the loads after it."""

    heavy: Ints  # [p] rows
    light: Ints
    give: Bools  # [p, k] slots of the heavy rank
    take: Bools  # [p, k] slots of the light rank
    heavy_load: Floats
    light_load: Floats

    @property
    def larger(self) -> Floats:
        return np.maximum(self.heavy_load, self.light_load)


class Search:
    """Improves partitions of one workload, side by side.

    Rows of the arrays are ranks: row ``c * num_ranks + r`` is rank ``r`` in candidate ``c``.

    Args:
        work: the workload.
        candidates: the partitions to improve.
        equal_counts: exchange sets of equal size only, so that counts stay as they are.
    """

    def __init__(self, work: Workload, candidates: list[Groups], equal_counts: bool = False) -> None:
        self._work = work
        self._equal = equal_counts
        self._count = len(candidates)
        self._ranks = np.tile(np.arange(work.num_ranks), self._count)
        self._first = np.arange(self._count)[:, None] * work.num_ranks
        rows = [group for groups in candidates for group in groups]
        width = max(len(group) for group in rows)
        self._nothing = work.num_samples
        self._members = np.array([group + [self._nothing] * (width - len(group)) for group in rows])
        self._members.sort(1)
        self._loads = work.at(self._ranks, self._members).sum(1) + work.base[self._ranks]

    def spans(self) -> Floats:
        """The largest load of each candidate."""
        return self._loads.reshape(self._count, -1).max(1)

    def best(self) -> tuple[float, Groups]:
        """The smallest largest load, and its partition."""
        spans = self.spans()
        candidate = int(spans.argmin())
        ranks = self._work.num_ranks
        rows = self._members[candidate * ranks : (candidate + 1) * ranks].tolist()
        return float(spans[candidate]), [[s for s in row if s < self._nothing] for row in rows]

    def run(self, good_enough: float, rounds: int) -> None:
        """Improve until a candidate's largest load is ``good_enough``, or little more is to be expected."""
        spans, stale = self.spans(), 0
        for turn in range(rounds):
            if spans.min() <= good_enough or stale == _PATIENCE:
                break
            self._round(turn)
            before, spans = spans, self.spans()
            stale = 0 if (spans < before).any() else stale + 1
        for _ in range(_ATTACKS):
            if self.spans().min() <= good_enough or not self._attack():
                break

    def _round(self, turn: int) -> None:
        half = self._work.num_ranks // 2
        loads = self._loads.reshape(self._count, -1)  # [candidates, ranks]
        falling = np.argsort(-loads, axis=1, kind="stable") + self._first
        heavy = falling[:, :half].ravel()
        light = np.roll(falling[:, ::-1][:, :half], turn, axis=1).ravel()
        exchange = self._best_exchange(heavy, light)
        self._apply(
            exchange, np.flatnonzero(self._allowed(exchange) & (exchange.larger < self._loads[heavy]))
        )

    def _attack(self) -> bool:
        """One exchange of the heaviest rank in each candidate; whether any got better."""
        others = np.arange(self._work.num_ranks - 1)
        loads = self._loads.reshape(self._count, -1)
        heaviest = loads.argmax(1)[:, None]  # [candidates, 1]
        light = (others + (others >= heaviest) + self._first).ravel()  # all rows but the heaviest of each
        heavy = np.repeat((heaviest + self._first).ravel(), len(others))
        if not len(light):
            return False
        exchange = self._best_exchange(heavy, light)
        larger = np.where(self._allowed(exchange), exchange.larger, np.inf).reshape(self._count, -1)
        partner = larger.argmin(1)
        better = larger.min(1) < loads.max(1)
        self._apply(exchange, (partner + np.arange(self._count) * len(others))[better])
        return bool(better.any())

    def _best_exchange(self, heavy: Ints, light: Ints) -> _Exchange:
        """The best exchange of each of ``p`` pairs of rows with ``k`` slots and ``s`` sets; see Note [Exchanges]."""
        work, ranks = self._work, self._ranks
        sets = _sets_of(self._members.shape[1])
        mine, theirs = self._members[heavy], self._members[light]  # [p, k] samples
        # What a sample costs the rank that loses it, and what it costs the other: the same where ranks are alike.
        # Each [p, s]: for each set that one of the two may give.
        lost = given = sets.sums(work.at(ranks[heavy], mine))
        taken = got = sets.sums(work.at(ranks[light], theirs))
        if not work.alike:
            given = sets.sums(work.at(ranks[light], mine))
            got = sets.sums(work.at(ranks[heavy], theirs))
        gives, takes = sets.equal_exchanges if self._equal else sets.exchanges
        # [p, e] what each exchange takes off the heavy rank, and what it adds to the light one.
        less = lost.take(gives, 1) - got.take(takes, 1)
        more = less if work.alike else given.take(gives, 1) - taken.take(takes, 1)
        larger = self._loads[heavy, None] - less
        best = np.maximum(larger, self._loads[light, None] + more, out=larger).argmin(1)  # [p]
        pair = np.arange(len(heavy))
        heavy_load, light_load = self._loads[heavy] - less[pair, best], self._loads[light] + more[pair, best]
        give, take = sets.chosen[gives[best]], sets.chosen[takes[best]]
        return _Exchange(heavy, light, give, take, heavy_load, light_load)

    def _allowed(self, exchange: _Exchange) -> Bools:
        """Whether an exchange is allowed. Under equal counts a slot may be empty, but counts differ by at most one."""
        if not self._equal or self._work.num_samples % self._work.num_ranks == 0:
            return np.ones(len(exchange.heavy), dtype=np.bool_)
        mine, theirs = self._members[exchange.heavy], self._members[exchange.light]
        held = mine < self._nothing, theirs < self._nothing  # [p, k] slots with a sample
        moved = (held[0] & exchange.give).sum(1) - (held[1] & exchange.take).sum(1)
        fewest = self._work.num_samples // self._work.num_ranks
        counts = np.stack([held[0].sum(1) - moved, held[1].sum(1) + moved])
        return np.all((counts >= fewest) & (counts <= fewest + 1), axis=0)

    def _apply(self, exchange: _Exchange, pairs: Ints) -> None:
        """Make the exchanges of these pairs, which have no rank in common."""
        if not len(pairs):
            return
        heavy, light = exchange.heavy[pairs], exchange.light[pairs]  # [p] rows
        give, take = exchange.give[pairs], exchange.take[pairs]  # [p, k] slots
        mine, theirs, nothing = self._members[heavy], self._members[light], self._nothing
        # [p, 2k] what each rank keeps, then what it gets, with gaps where a slot moved away. No sample has the highest
        # number, so sorting moves the gaps to the end: with give = {first} and take = {first},
        # [0, 2] and [3, 4] -> [4, 2 | 3, 4] and [4, 4 | 0, 4] -> [2, 3, 4, 4] and [0, 4, 4, 4].
        kept_and_got = [np.where(give, nothing, mine), np.where(take, theirs, nothing)]
        kept_and_given = [np.where(take, nothing, theirs), np.where(give, mine, nothing)]
        new = np.stack([np.concatenate(kept_and_got, 1), np.concatenate(kept_and_given, 1)])
        new.sort(2)
        width = self._members.shape[1]
        more = int((new < nothing).sum(2).max()) - width
        if more > 0:  # a rank has more samples than slots now: all rows get more slots
            self._members = np.pad(self._members, ((0, 0), (0, more)), constant_values=nothing)
            width += more
        self._members[heavy], self._members[light] = new[0, :, :width], new[1, :, :width]
        self._loads[heavy], self._loads[light] = exchange.heavy_load[pairs], exchange.light_load[pairs]
