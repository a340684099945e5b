"""Shares the samples of a minibatch out to ranks: longest first, then exchanges between ranks.

*Longest first* gives each sample, the costliest first, to the rank that then ends earliest. Then pairs of ranks
exchange samples, judged by their true loads, which a `Microbatches` knows. Small minibatches are searched from several
starts side by side: a few hundred numbers cost numpy as much as one. Tables are also shared out whole, halved and
quartered, since the samples of all ranks pad least if they are cut together. Of large minibatches, the way whose
pieces are level already goes on.

Note [Exchanges]
~~~~~~~~~~~~~~~~
A heavy rank gives a set of samples to a light one and takes a set back. A list has the sets: every set where ranks have
few samples, else sets of up to two samples or one. Each sample carries its part of a load, so a set has a sum. For each
set that a heavy rank may give there is a sum to take back with which both ranks end at the same time. The two sets next
to it are found in the sorted sums, for all pairs of ranks at once. The most promising exchanges, whose larger load is
smallest by these sums, are then judged by their true loads.

A *turn* pairs the heavier half of the ranks with the lighter half: the heaviest with the lightest, the second heaviest
with the second lightest and so on, rotated by one partner after each turn. When that helps no more, a quarter as many
heavy ranks have several partners each; in the end the heaviest rank has them all. No turn makes the larger load of a
pair larger, so the largest load never grows.

Example: three equal ranks hold the costs ``{9, 7}``, ``{8}`` and ``{3}``. Let 9, 8, 7, 3 be samples 0 to 3, and 4 the
number of no sample. Each rank has two slots::

    members = [[0, 2],     loads = [16,
               [1, 4],               8,
               [3, 4]]               3]

The first round pairs rank 0 with rank 2. The sets of two slots are none, the first, the second and both. The sums
over them are 0, 9, 7, 16 on the heavy rank and 0, 3, 0, 3 on the light one, whose second slot is empty. Both end at
the same time if twice what is taken is ``3 - 16`` and twice what is given. The nearest sums, and the larger load::

    given       taken exactly   nearest   heavy: 16 - given + taken   light: 3 + given - taken   larger
    {}     0        -6.5           0                16                           3                 16
    {9}    9         2.5           3                10                           9                 10
    {7}    7         0.5           0                 9                          10                 10
    {9, 7} 16        9.5           3                 3                          16                 16

The first smallest entry, 10, gives 9 and takes 3: ``members`` becomes ``[[2, 3], [1, 4], [0, 4]]``, ``loads``
``[10, 8, 9]``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints
from lightning_odc.balance.microbatches import FEW_SAMPLES, Microbatches, as_rows

TOLERANCE = 1e-5
"""The search ends where the largest load is this close to the lower bound, relative to it."""

_MORE_STARTS_ABOVE = 1e-4
_STARTS = 16
_SAMPLES_IN_STARTS = 384
_STARTS_OF_FEW = 120
_TOLERANCE = 1e-3
_TURNS = 64
_TURNS_OF_MANY = 8
_FEW_RANKS, _TURNS_ON_FEW_RANKS = 8, 24
_MOST_ATTACKED = 24
_TRIES, _LEAST_TRIES, _LAST_TRIES = 12, 2, 48
_SHAKES = (0.1, 0.3)
_MOST_SETS = 46
_MOST_SLOTS = 64
_GOLDEN, _PLASTIC = 0.6180339887498949, 0.7548776662466927


def share_out(work: Microbatches) -> Ints:
    """The rank of every sample, such that the largest load is small; some ranks may get none."""
    # Pieces are shared out by their costs alone. If loads are more than the sum of those, samples are exchanged by true
    # loads afterwards.
    few, ranks, bound = len(work) <= FEW_SAMPLES, work.num_ranks, work.bound()
    good_enough = bound * (1 + (TOLERANCE if few or work.is_additive else _TOLERANCE))
    divisions = [(sizes, costs, longest_first(costs, ranks)) for sizes, costs in work.divisions()]
    if not few and divisions[1:]:
        divisions = [min(divisions, key=lambda division: _largest_sum(*division[1:]))]
    starts: list[Ints] = []
    for sizes, costs, start in divisions:
        # Samples that cost more or less than their parts are exchanged below, which is enough for many ranks.
        if work.is_additive or (not few and (ranks <= _FEW_RANKS or sizes.max() > 1)):
            start = partition(costs, start, ranks, bound, good_enough)
        starts.append(np.repeat(start, sizes))
    if work.is_additive or ranks == 1:
        return starts[0]
    for sizes, costs, _ in divisions if few else ():
        shaken = (_shaken(costs, index) for index in range(1, _STARTS_OF_FEW // len(work)))
        starts += [np.repeat(longest_first(moved, ranks), sizes) for moved in shaken]
    search = Search(work.parts, starts, ranks, work.loads)
    turns = _TURNS_OF_MANY if ranks > _FEW_RANKS else _TURNS_ON_FEW_RANKS
    search.run(good_enough, _TURNS if few else turns)
    return search.best()[1]


def partition(costs: Floats, start: Ints, num_ranks: int, bound: float, good_enough: float) -> Ints:
    """The rank of every piece, such that the largest sum of costs ``[1 or num_ranks, n]`` is small."""
    search = Search(costs, [start], num_ranks)
    search.run(good_enough, _TURNS)
    largest, owners = search.best()
    starts = min(_STARTS, _SAMPLES_IN_STARTS // costs.shape[1])
    if largest <= bound * (1 + _MORE_STARTS_ABOVE) or num_ranks == 1 or starts < 2:
        return owners
    shaken = (longest_first(_shaken(costs, index), num_ranks) for index in range(1, starts))
    search = Search(costs, [owners, *shaken], num_ranks)
    search.run(good_enough, _TURNS)
    return search.best()[1]


def _largest_sum(costs: Floats, owners: Ints) -> float:
    rows = owners if len(costs) > 1 else np.zeros_like(owners)
    return float(np.bincount(owners, costs[rows, np.arange(len(owners))]).max())


def _shaken(costs: Floats, index: int) -> Floats:
    """Costs moved by up to 10 or 30 percent give other partitions."""
    spread = (np.arange(costs.shape[1]) * _GOLDEN + index * _PLASTIC) * (1 + index) % 1.0
    return costs * (1 + _SHAKES[index % len(_SHAKES)] * (2 * spread - 1))


def longest_first(costs: Floats, num_ranks: int) -> Ints:
    """LPT: each of ``n`` pieces, the costliest first, goes to the rank that then ends earliest."""
    owners = [0] * costs.shape[1]
    falling = np.argsort(-costs.sum(0), kind="stable").tolist()
    if len(costs) == 1:
        heap, weights = [(0.0, rank) for rank in range(num_ranks)], costs[0].tolist()
        for piece in falling:
            load, owners[piece] = heap[0]
            heapq.heapreplace(heap, (load + weights[piece], owners[piece]))
        return np.array(owners)
    loads, by_piece = np.zeros(num_ranks), np.ascontiguousarray(costs.T)
    for piece in falling:
        ends = loads + by_piece[piece]
        owners[piece] = rank = int(ends.argmin())
        loads[rank] = ends[rank]
    return np.array(owners)


class _Sets(NamedTuple):
    """Sets of slots."""

    chosen: Bools  # [s, k] whether set s has slot k
    weights: Floats  # [k, s], the same for products
    sizes: Ints  # [s]


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
    return _Sets(chosen, np.ascontiguousarray(chosen.T, dtype=np.float64), chosen.sum(1))


class Search:
    """Improves several partitions of one minibatch side by side."""

    # Rows of the arrays are ranks: row ``c * num_ranks + r`` is rank ``r`` in candidate ``c``.

    def __init__(
        self,
        parts: Floats,  # [1 or num_ranks, n] whole numbers that each sample adds to a load
        candidates: Sequence[Ints],  # partitions: the rank of every sample, ``num_ranks`` if it takes no part
        num_ranks: int,
        loads: Callable[[Ints, Ints], Floats] | None = None,  # true loads; by default the sum of the parts
        base: Floats | None = None,  # [num_ranks] that ranks pay before any sample
        equal_counts: bool = False,  # exchange sets of equal size only
    ) -> None:
        self._parts, self._true_loads, self._equal = np.pad(parts, ((0, 0), (0, 1))), loads, equal_counts
        self._count, self._num_ranks = len(candidates), num_ranks
        self._base = np.zeros(self._num_ranks) if base is None else base
        self._ranks = np.tile(np.arange(self._num_ranks), self._count)
        self._first = np.arange(self._count)[:, None] * self._num_ranks
        self._nothing = parts.shape[1]
        self._members = as_rows(np.array(candidates), num_ranks)
        self._loads = self._loads_of(self._ranks, self._members)

    def best(self) -> tuple[float, Ints]:
        """The smallest largest load, and its partition."""
        largest = self._largest()
        best = int(largest.argmin())
        rows = self._members[best * self._num_ranks :][: self._num_ranks]
        ranks, slots = np.nonzero(rows < self._nothing)
        owners = np.full(self._nothing, self._num_ranks)
        owners[rows[ranks, slots]] = ranks
        return float(largest[best]), owners

    def run(self, good_enough: float, turns: int) -> None:
        """Improve until a candidate's largest load is ``good_enough``, or little more is to be expected."""
        heavy, largest = self._num_ranks // 2, self._largest()
        for turn in range(turns):
            if not heavy or largest.min() <= good_enough:
                break
            self._turn(heavy, turn)
            before, largest = largest, self._largest()
            if not (largest < before).any():
                heavy = max(heavy // 4, min(heavy - 1, 1))

    def _largest(self) -> Floats:
        """The largest load of each candidate."""
        return self._loads.reshape(self._count, -1).max(1)

    def _turn(self, heavy: int, turn: int) -> None:
        """Exchanges of the heaviest ranks in each candidate, each with as many of the lightest ones."""
        loads = self._loads.reshape(self._count, -1)  # [candidates, ranks]
        rising = np.argsort(loads, axis=1, kind="stable") + self._first
        partners = min((self._num_ranks - heavy) // heavy, _MOST_ATTACKED)
        lightest = rising[:, : heavy * partners].reshape(self._count, partners, heavy)
        light = np.roll(lightest, turn, axis=2).transpose(0, 2, 1).reshape(-1, partners)
        rows = heavy * self._count
        # At the end one rank is the heaviest, and estimates of a load that is whole microbatches mislead.
        tries = max(_TRIES // rows, _LEAST_TRIES) if rows > 1 else _LAST_TRIES
        tries = tries if self._true_loads else 1
        self._exchange(rising[:, ::-1][:, :heavy].ravel(), light, tries)

    def _exchange(self, heavy: Ints, light: Ints, tries: int) -> None:
        """One exchange of each of ``g`` heavy rows with one of its ``p`` light ones; see Note [Exchanges]."""
        sets, lines = _sets_of(self._members.shape[1]), np.arange(len(heavy))
        larger, takes = self._likely(sets, heavy, light)
        limits, picks = self._loads[heavy], np.empty((len(heavy), tries), dtype=np.int64)
        for number in range(tries):
            picks[:, number] = best = larger.argmin(1)
            if not number and (larger[lines, best] >= limits).all():
                return
            if tries > 1:
                larger[lines, best] = np.inf
        partner, give = np.divmod(picks.ravel(), 2 * len(sets.sizes))
        each = np.repeat(lines, tries)
        heavies, lights = heavy[each], light[each, partner]
        give, take = sets.chosen[give % len(sets.sizes)], sets.chosen[takes[each, picks.ravel()]]
        new = self._after(heavies, lights, give, take)
        both = np.concatenate([self._ranks[heavies], self._ranks[lights]])
        loads = self._loads_of(both, new).reshape(2, -1)
        best = lines * tries + loads.max(0).reshape(-1, tries).argmin(1)
        made = best[loads.max(0)[best] < limits]
        changed = np.concatenate([heavies[made], lights[made]])
        more = new.shape[1] - self._members.shape[1]
        if more > 0:  # a rank has more samples than slots now: all rows get more slots
            self._members = np.pad(self._members, ((0, 0), (0, more)), constant_values=self._nothing)
        self._members[changed] = new[np.concatenate([made, made + len(heavies)])]
        self._loads[changed] = loads[:, made].ravel()

    def _likely(self, sets: _Sets, heavy: Ints, light: Ints) -> tuple[Floats, Ints]:
        """Two sets to take for each that a heavy row may give: ``[g, p * 2 * s]`` larger loads, and these sets."""
        count, pairs = len(sets.sizes), light.size
        givers, takers = np.repeat(heavy, light.shape[1]), light.ravel()
        # Each [pairs, s]. What a set costs the rank that loses it, and what it costs the other: the same where ranks
        # are equal.
        given = lost = self._sums(sets, givers, self._members[givers])
        got = taken = self._sums(sets, takers, self._members[takers])
        if len(self._parts) > 1:
            given = self._sums(sets, takers, self._members[givers])
            got = self._sums(sets, givers, self._members[takers])
        left, reached = self._loads[givers, None] - lost, self._loads[takers, None] + given
        # Both ranks end at the same time if `left + got` is `reached - taken`. One search finds the nearest sums for
        # all pairs: those of different pairs, or of sets of different sizes, are far apart.
        wanted, offered = reached - left, got + taken
        apart = float(offered.max()) + 2.0
        np.clip(wanted, -1.0, apart - 1.0, out=wanted)
        if self._equal:
            wanted, offered = wanted + apart * sets.sizes, offered + apart * sets.sizes
            apart *= float(sets.sizes[-1] + 1)
        lines = np.arange(pairs)[:, None]
        order = np.argsort(offered, axis=1, kind="stable") + lines * count
        rising = offered.ravel()[order] + lines * apart
        above = np.searchsorted(rising.ravel(), wanted + lines * apart)
        nearest = [np.maximum(above - 1, lines * count), np.minimum(above, lines * count + (count - 1))]
        takes = order.ravel()[np.stack(nearest, 1)]  # [pairs, 2, s]
        larger = np.maximum(left[:, None] + got.ravel()[takes], reached[:, None] - taken.ravel()[takes])
        takes -= lines[:, None] * count
        if self._equal:
            larger[sets.sizes[takes] != sets.sizes] = np.inf
        return larger.reshape(len(heavy), -1), takes.reshape(len(heavy), -1)

    def _sums(self, sets: _Sets, rows: Ints, samples: Ints) -> Floats:
        """``[p, s]``: for each set of slots the sum over ``samples[p, k]``, on the ranks of ``rows[p]``."""
        # Not `values @ weights`: a BLAS may start threads for it, which on a busy machine takes ten times as long.
        return np.einsum("pk,ks->ps", self._at(self._ranks[rows], samples), sets.weights)

    def _at(self, ranks: Ints, samples: Ints) -> Floats:
        """Parts ``[p, k]`` of ``samples[p, k]`` on ``ranks[p]``."""
        if len(self._parts) == 1:
            return self._parts[0].take(samples)
        return self._parts.ravel().take(samples + (ranks * self._parts.shape[1])[:, None])

    def _loads_of(self, ranks: Ints, members: Ints) -> Floats:
        """The loads of ranks with these members, ``[p, k]``."""
        if self._true_loads:
            return self._true_loads(ranks, members)
        return self._at(ranks, members).sum(1) + self._base[ranks]

    def _after(self, heavy: Ints, light: Ints, give: Bools, take: Bools) -> Ints:
        """The samples of heavy and then of light rows after an exchange of slots; more slots if a row needs them."""
        mine, theirs, nothing = self._members[heavy], self._members[light], self._nothing
        pairs, slots = mine.shape
        new = np.full((2 * pairs, 2 * slots), nothing)
        # What each rank keeps, then what it gets, with gaps where a slot moved away. No sample has the highest
        # number, so sorting moves the gaps to the end: with give = {first} and take = {first},
        # [0, 2] and [3, 4] -> [4, 2 | 3, 4] and [4, 4 | 0, 4] -> [2, 3, 4, 4] and [0, 4, 4, 4].
        np.copyto(new[:pairs, :slots], mine, where=~give)
        np.copyto(new[:pairs, slots:], theirs, where=take)
        np.copyto(new[pairs:, :slots], theirs, where=~take)
        np.copyto(new[pairs:, slots:], mine, where=give)
        new.sort(1)
        unused = int((new[:, slots:] == nothing).all(0).sum())
        return new[:, : 2 * slots - unused]
