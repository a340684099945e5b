"""Shares the samples of a minibatch out to ranks: longest first, then exchanges with the heaviest rank.

*Longest first* gives each sample, the costliest first, to the rank that then ends earliest. Then the heaviest rank
exchanges samples with a light one, as long as that makes it lighter, judged by their true loads, which a `Microbatches`
knows. Tables are also shared out whole, and in halves and quarters, since the samples of all ranks pad least if they
are cut together. Of many ways to begin, the most level ones go on: one of a large minibatch, several of a small one.

Note [Exchanges]
~~~~~~~~~~~~~~~~
The heaviest rank gives a set of samples to a light one and takes a set back. A list has the sets: every set where ranks
have few samples, else sets of up to two samples or one. Each sample carries its part of a load, so a set has a sum, and
a table has the larger load of both ranks after each exchange. The most promising exchanges, whose larger load is
smallest by these sums, are judged by their true loads. The first one that makes both ranks lighter than the heaviest
one was is made; else the heaviest rank tries the next lightest one. So the largest load never grows.

Example: three equal ranks hold the costs ``{9, 7}``, ``{8}`` and ``{3}``. Rank 0 is the heaviest, and rank 2 the
lightest. The larger load, for each set that rank 0 may give and each that it may take back::

              taken  {}   {3}
    given {}         16   19      heavy: 16 - given + taken
          {9}        12   10      light:  3 + given - taken
          {7}        10   12
          {9, 7}     19   16

The first smallest entry, 10, gives 9 and takes 3: now ranks hold ``{7, 3}``, ``{8}`` and ``{9}``. The heaviest rank is
still rank 0, with 10. No exchange with rank 1 or 2 makes it lighter, so the search ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from operator import itemgetter

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.microbatches import Groups, Load, Microbatches, Samples, additive, for_each_rank

TOLERANCE = 1e-4
"""The search ends where the largest load is this close to the lower bound, relative to it."""

_MOST_STARTS = 12
_SAMPLES_IN_STARTS = 384
_ATTEMPTS = 64
_TRIES = 4
_MOST_SETS = 46
_MOST_SLOTS = 64
_SHAKE = 0.2
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927
_NEVER = 2**62  # above all loads


def share_out(work: Microbatches) -> Groups:
    """The samples of every rank, such that the largest load is small; some ranks may get none."""
    enough = work.bound() * (1 + TOLERANCE)
    attempts = _ATTEMPTS + work.num_ranks
    count = max(1, _SAMPLES_IN_STARTS // len(work))
    starts = []
    for pieces, costs in work.divisions():
        load = additive(work.by_rank(costs))
        for index in range(min(count, _MOST_STARTS)):
            groups: Groups = [[] for _ in range(work.num_ranks)]
            longest_first(shaken(costs, index), range(len(pieces)), groups, [0] * work.num_ranks)
            largest = max(for_each_rank(load, groups))
            starts.append((largest, (pieces, costs, load, groups)))
    starts.sort(key=itemgetter(0))
    options = []
    for _, (pieces, costs, load, groups) in starts[:count]:
        if len(pieces) < len(work):
            improve(groups, costs, load, enough, attempts)
        samples = [[sample for piece in group for sample in pieces[piece]] for group in groups]
        largest = improve(samples, work.parts, work.load, enough, attempts)
        options.append((largest, samples))
        if largest <= enough:
            break
    return min(options, key=itemgetter(0))[1]


def longest_first(
    costs: Ints | Floats,
    pieces: Sequence[int],
    groups: Groups,
    loads: Sequence[float],
    limits: Sequence[int] | None = None,
) -> None:
    """Each piece, the costliest first, goes to the rank that then ends earliest, of those below their limits.

    Args:
        costs: Costs of pieces, ``[1 or num_ranks, n]``.
        pieces: The pieces that are shared out.
        groups: The pieces that every rank has before; they get more.
        loads: What they cost.
        limits: The most pieces of each rank. There is room for all.

    Example:
        >>> costs = np.array([[9, 8, 7, 3]])
        >>> groups = [[], [], []]
        >>> longest_first(costs, range(4), groups, [0, 0, 0])
        >>> groups
        [[0], [1], [2, 3]]
    """
    limits = limits or [costs.shape[1]] * len(groups)
    sums: list[float] = costs.sum(0).tolist()
    falling = sorted(pieces, key=sums.__getitem__, reverse=True)
    by_rank = np.array(loads)
    for piece, own in zip(falling, costs.T[falling], strict=True):
        after = by_rank + own
        rank = int(after.argmin())
        groups[rank].append(piece)
        by_rank[rank] = after[rank]
        if len(groups[rank]) == limits[rank]:
            by_rank[rank] = _NEVER


def shaken(costs: Ints, index: int) -> Ints:
    """Costs moved by up to 20 percent lead to other groups; with index 0 they stay."""
    if not index:
        return costs
    spread = (np.arange(costs.shape[1]) * _GOLDEN + index * _PLASTIC) * (1 + index) % 1.0
    return np.rint(costs * (1 + _SHAKE * (2 * spread - 1))).astype(np.int64)


def improve(
    groups: Groups, parts: Ints, load: Load, enough: float, attempts: int, equal_counts: bool = False
) -> int:
    """Exchange samples until the largest load is ``enough``, or nothing helps; see Note [Exchanges].

    Args:
        groups: The samples of every rank, which change.
        parts: What each sample adds to a load, roughly, ``[1 or num_ranks, n]``.
        load: The cost of a rank's samples.
        enough: The largest load that is good enough.
        attempts: Pairs of ranks to try.
        equal_counts: Whether only sets of equal size are exchanged.

    Returns:
        The largest load.

    Example:
        >>> groups = [[0, 2], [1], [3]]
        >>> costs = np.array([[9, 8, 7, 3]])
        >>> improve(groups, costs, additive(costs.tolist() * 3), 0, 9)
        10
        >>> groups
        [[2, 3], [1], [0]]
    """
    loads = for_each_rank(load, groups)
    partner = 0
    for _ in range(attempts):
        rising = sorted(range(len(groups)), key=loads.__getitem__)
        heavy = rising.pop()
        if loads[heavy] <= enough or partner == len(rising):
            break
        light = rising[partner]
        partner += 1
        for mine, theirs in _exchanges(groups, parts, loads, heavy, light, equal_counts):
            heavy_load = load(heavy, mine)
            light_load = load(light, theirs)
            if max(heavy_load, light_load) < loads[heavy]:
                groups[heavy] = mine
                groups[light] = theirs
                loads[heavy] = heavy_load
                loads[light] = light_load
                partner = 0
                break
    return max(loads)


def _exchanges(
    groups: Groups, parts: Ints, loads: list[int], heavy: int, light: int, equal_counts: bool
) -> Iterator[tuple[Samples, Samples]]:
    """What two ranks have after the most promising exchanges."""
    mine = groups[heavy]
    theirs = groups[light]
    gives = _sets_of(len(mine))
    takes = _sets_of(len(theirs))
    here = parts[heavy % len(parts)]
    there = parts[light % len(parts)]
    left = loads[heavy] - gives @ here[mine]
    reached = loads[light] + gives @ there[mine]
    heavy_loads = left[:, None] + takes @ here[theirs]
    light_loads = reached[:, None] - takes @ there[theirs]
    larger: Floats = np.maximum(heavy_loads, light_loads)
    if equal_counts:
        larger[gives.sum(1)[:, None] != takes.sum(1)] = _NEVER
    for _ in range(_TRIES):
        best = int(larger.argmin())
        if larger.flat[best] >= loads[heavy]:
            return
        larger.flat[best] = _NEVER
        give, take = divmod(best, len(takes))
        given, kept = _parted(mine, gives[give])
        taken, left_there = _parted(theirs, takes[take])
        yield kept + taken, left_there + given


def _parted(samples: Samples, chosen: Ints) -> tuple[Samples, Samples]:
    """Those that are chosen, and the others."""
    parts: tuple[Samples, Samples] = ([], [])
    for sample, is_chosen in zip(samples, chosen.tolist(), strict=True):
        parts[1 - is_chosen].append(sample)
    return parts


@lru_cache(maxsize=256)
def _sets_of(slots: int) -> Ints:
    """Sets of slots, ``[sets, slots]``: 1 where a set has a slot.

    All sets of up to as many slots as keep the list short; of some slots only, if there are very many.
    """
    step = -(-slots // _MOST_SLOTS) or 1
    used = range(0, slots, step)
    sets: list[tuple[int, ...]] = [()]
    for size in range(1, len(used) + 1):
        more = list(combinations(used, size))
        if size > 1 and len(sets) + len(more) > _MOST_SETS:
            break
        sets += more
    chosen = np.zeros((len(sets), slots), dtype=np.int64)
    for row, members in enumerate(sets):
        chosen[row, list(members)] = 1
    return chosen
