"""Samples one after another in a row: few microbatches, as even as possible.

Where attention is dense (Note [Dense attention]), they are as many as cost least.

Note [Guards]
~~~~~~~~~~~~~
A microbatch has a cap for each number of its samples. One subtraction compares all of them: a row of numbers is one
integer with a field for each, and in the room of a microbatch the top bit of every field is set, its *guard*. Where a
number is larger than the room for it, the subtraction borrows the guard. With fields of 4 bits, room for 6 tokens and 2
patches, and a sample of 3 tokens and 4 patches::

    room           1110 1010
    sample         0011 0100
    room - sample  1011 0110   the guard of the patches is gone: they do not fit
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

import numpy as np

from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens
from lightning_odc.balance.microbatches import Bins, Microbatches, Samples

_FIELD = 56  # bits, enough for all caps that matter
_GUARD = 1 << (_FIELD - 1)


class Packed(Microbatches):
    """Samples one after another in a row; tokens, and all other numbers, add up."""

    most_lined_up = 32768

    def __init__(self, rows: Ints, caps: Ints, costs: MinibatchCosts) -> None:
        order = np.argsort((rows / caps.max(0)).max(1), kind="stable")
        super().__init__(order, rows, caps, costs)
        self.bulk = range(len(rows))
        overhead = self.overhead[:, None]
        pair = costs.pair[:, None]
        self._has_pairs = bool(pair.any())
        # The number that fills most microbatches tells how full they are; the first one where pairs cost.
        filling = 0
        if not self._has_pairs:
            self.near = (0, 1)  # more samples do not fit into fewer
            filling = int(np.argmax(rows.sum(0) / caps.sum(0)))
        rows = rows[order]
        sizes = rows[:, filling]
        most = caps[: len(self.costs), filling, None]
        # What each sample adds to microbatches that are filled as far as it pays: beyond, pairs cost more.
        pays = np.sqrt(2 * overhead / np.maximum(pair, 1e-200))
        full = np.maximum(np.minimum(most, pays), 1.0)
        overhead_shares = overhead * sizes / full
        pair_shares = pair * sizes * (full - sizes) / 2
        shares = np.where(sizes < full, overhead_shares + pair_shares, overhead)
        self.parts = self.costs + np.rint(shares).astype(np.int64)
        self.smallest = self.costs
        self.fills = sizes / np.maximum(most, sizes)
        self._pair_of = self.by_rank(costs.pair)
        self._fills_of = self.by_rank(np.minimum(sizes / full, 1.0))
        # Note [Guards].
        self._sizes = _integers(rows)
        self._rooms = _integers(np.minimum(caps, _GUARD - 1) + _GUARD)
        (self._guards,) = _integers(np.full_like(rows[:1], _GUARD))

    def cost_of(self, rank: int, samples: Samples) -> int:
        found = self.overhead_of[rank] + self.alone(rank, samples)
        if self._has_pairs:
            pairs = pairs_of_tokens([self.numbers[0][sample] for sample in samples])
            found += round(self._pair_of[rank] * pairs)
        return found

    def load(self, rank: int, samples: Samples) -> int:
        if self._has_pairs:
            return sum([self.cost_of(rank, own) for own in self.bins(rank, samples)])
        found = self.cost_of(rank, samples)
        overhead = self.overhead_of[rank]
        if overhead:
            found += overhead * (len(self._best_fit(rank, samples)) - 1)
        return found

    def bins(self, rank: int, samples: Samples) -> Bins:
        """Even microbatches, or best fit where the samples do not fit into as many."""
        even = self.along(rank, samples, [0] * self.likely(rank, samples))
        return even or self._best_fit(rank, samples)

    def likely(self, rank: int, samples: Samples) -> int:
        """As few as best fit needs; where pairs cost, about as many as pay."""
        count = len(self._best_fit(rank, samples))
        if self._has_pairs:
            fills = self._fills_of[rank]
            count = max(count, round(math.fsum([fills[sample] for sample in samples])))
        return count

    def _best_fit(self, rank: int, samples: Samples) -> Bins:
        """Each sample, the largest first, goes into the fullest microbatch with room."""
        guards = self._guards
        bins: Bins = []
        rooms: list[tuple[int, int]] = []  # and the microbatch of each, the fullest first
        for sample in sorted(samples, reverse=True):
            size = self._sizes[sample]
            place = bisect_left(rooms, (size + guards,))
            while place < len(rooms) and (rooms[place][0] - size) & guards != guards:
                place += 1
            if place == len(rooms):
                rooms.append((self._rooms[rank], len(bins)))
                bins.append([])
            room, number = rooms.pop(place)
            bins[number].append(sample)
            insort(rooms, (room - size, number))
        return bins

    def along(self, rank: int, samples: Samples, profile: list[int]) -> Bins:
        """Each sample, the costliest first, goes where there is room and its microbatch is least above the profile."""
        costs = self.costs_of[rank]
        pair = self._pair_of[rank]
        guards = self._guards
        lengths = self.numbers[0]
        bins: Bins = [[] for _ in profile]
        rooms = [self._rooms[rank]] * len(bins)
        tokens = [0] * len(bins)
        empty = len(bins)
        above = sorted([(-limit, number) for number, limit in enumerate(profile)])
        falling = sorted(samples, key=costs.__getitem__, reverse=True)
        for done, sample in enumerate(falling):
            size = self._sizes[sample]
            needs_empty = len(samples) - done == empty  # or some would stay empty
            for place, (load, number) in enumerate(above):  # noqa: B007
                if (rooms[number] - size) & guards == guards and not (needs_empty and bins[number]):
                    break
            else:
                return []
            load += costs[sample]
            if pair:
                load += round(pair * tokens[number] * lengths[sample])
                tokens[number] += lengths[sample]
            del above[place]
            insort(above, (load, number))
            empty -= not bins[number]
            bins[number].append(sample)
            rooms[number] -= size
        return bins


def _integers(rows: Ints) -> list[int]:
    """Each row of numbers as one integer: Note [Guards]."""
    found = [0] * len(rows)
    for column in rows.T.tolist():
        found = [(whole << _FIELD) + number for whole, number in zip(found, column, strict=True)]
    return found
