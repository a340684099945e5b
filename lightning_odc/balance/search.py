"""Local search over partitions: pairs of ranks exchange the samples that make them most equal, many pairs at once.

Note [Exchanges]
~~~~~~~~~~~~~~~~
A heavy rank gives a set of samples to a light one and takes a set back. For each pair all sets of a table (every set
where ranks have few samples, else sets of up to two or one) are tried against all, for the smallest larger load: two
outer sums, a maximum and an ``argmin`` for all pairs together.

A *round* pairs the heaviest rank with the lightest, the second heaviest with the second lightest and so on, rotated by
one partner after each round; an *attack* tries the heaviest rank against all others and makes the best exchange.
Neither makes the larger load of a pair larger, so the largest load never grows. Several partitions are improved side
by side in the same arrays: a few hundred numbers cost numpy as much as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints
from lightning_odc.balance.starts import Groups
from lightning_odc.balance.workload import Workload

_MOST_SETS = 46
_MOST_SLOTS = 64
_PATIENCE = 4
_ATTACKS = 40


@dataclass(frozen=True, eq=False)
class _Sets:
    """Sets of slots: ``chosen[s, k]`` tells whether set ``s`` has slot ``k``."""

    chosen: Bools
    weights: Floats  # [k, s], `chosen` transposed, for products
    unequal: Floats  # [s, s], infinite where two sets differ in size

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
    unequal = np.where(sizes[:, None] == sizes, 0.0, np.inf)
    return _Sets(chosen, np.ascontiguousarray(chosen.T, dtype=np.float64), unequal)


@dataclass(frozen=True, eq=False)
class _Exchange:
    """For each of ``p`` pairs the best exchange and the loads after it."""

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
        loads = self._loads.reshape(self._count, -1)
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
        heaviest = loads.argmax(1)[:, None]
        light = (others + (others >= heaviest) + self._first).ravel()
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
        """See Note [Exchanges]."""
        work, ranks = self._work, self._ranks
        sets = _sets_of(self._members.shape[1])
        mine, theirs = self._members[heavy], self._members[light]
        given = lost = work.at(ranks[heavy], mine)  # lost on the heavy rank, given to the light one
        taken = got = work.at(ranks[light], theirs)
        if not work.alike:
            given, got = work.at(ranks[light], mine), work.at(ranks[heavy], theirs)
        sum_lost, sum_taken = sets.sums(lost), sets.sums(taken)
        sum_given, sum_got = (sum_lost, sum_taken) if work.alike else (sets.sums(given), sets.sums(got))
        larger = (self._loads[heavy, None] - sum_lost)[:, :, None] + sum_got[:, None, :]
        np.maximum(
            larger, (self._loads[light, None] + sum_given)[:, :, None] - sum_taken[:, None, :], out=larger
        )
        if self._equal:
            larger += sets.unequal
        give_set, take_set = np.divmod(larger.reshape(len(heavy), -1).argmin(1), len(sets.chosen))
        give, take = sets.chosen[give_set], sets.chosen[take_set]
        pair = np.arange(len(heavy))
        heavy_load = self._loads[heavy] - sum_lost[pair, give_set] + sum_got[pair, take_set]
        light_load = self._loads[light] - sum_taken[pair, take_set] + sum_given[pair, give_set]
        return _Exchange(heavy, light, give, take, heavy_load, light_load)

    def _allowed(self, exchange: _Exchange) -> Bools:
        """Under equal counts a slot may hold no sample; counts may still differ by one only."""
        if not self._equal or self._work.num_samples % self._work.num_ranks == 0:
            return np.ones(len(exchange.heavy), dtype=np.bool_)
        mine, theirs = self._members[exchange.heavy], self._members[exchange.light]
        held = mine < self._nothing, theirs < self._nothing
        moved = (held[0] & exchange.give).sum(1) - (held[1] & exchange.take).sum(1)
        fewest = self._work.num_samples // self._work.num_ranks
        counts = np.stack([held[0].sum(1) - moved, held[1].sum(1) + moved])
        return np.all((counts >= fewest) & (counts <= fewest + 1), axis=0)

    def _apply(self, exchange: _Exchange, pairs: Ints) -> None:
        """Make the exchanges of these pairs, which have no rank in common."""
        if not len(pairs):
            return
        heavy, light = exchange.heavy[pairs], exchange.light[pairs]
        give, take = exchange.give[pairs], exchange.take[pairs]
        mine, theirs, nothing = self._members[heavy], self._members[light], self._nothing
        width = self._members.shape[1]
        new = np.empty((2, len(heavy), 2 * width), dtype=np.int64)
        new[0, :, :width], new[0, :, width:] = np.where(give, nothing, mine), np.where(take, theirs, nothing)
        new[1, :, :width], new[1, :, width:] = np.where(take, nothing, theirs), np.where(give, mine, nothing)
        new.sort(2)
        if (new[:, :, width] < nothing).any():
            more = int((new < nothing).sum(2).max())
            padding = ((0, 0), (0, more - width))
            self._members, width = np.pad(self._members, padding, constant_values=nothing), more
        self._members[heavy], self._members[light] = new[0, :, :width], new[1, :, :width]
        self._loads[heavy], self._loads[light] = exchange.heavy_load[pairs], exchange.light_load[pairs]
