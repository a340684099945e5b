"""Samples one after another in a row: few microbatches, as even as possible.

Where attention is dense (Note [Dense attention]), they are as many as cost least.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens
from lightning_odc.balance.microbatches import Bins, Microbatches, Samples


class Packed(Microbatches):
    """Samples one after another in a row."""

    most_lined_up = 32768

    def __init__(self, num_ranks: int, rows: Ints, cap: int, costs: MinibatchCosts) -> None:
        super().__init__(num_ranks, rows, cap, costs)
        self.bulk = range(len(rows))
        overhead: Floats = self.overhead[:, None]
        pair = costs.pair[:, None]
        self._has_pairs = bool(pair.any())
        if not self._has_pairs:
            self.near = (0, 1)  # more samples do not fit into fewer
        # What each sample adds to microbatches that are filled as far as it pays: beyond, pairs cost more.
        pays: Floats = np.sqrt(2 * overhead / np.maximum(pair, 1e-200))
        full = np.maximum(np.minimum(cap, pays), 1.0)
        overhead_shares = overhead * self.sizes / full
        pair_shares = pair * self.sizes * (full - self.sizes) / 2
        shares = np.where(self.sizes < full, overhead_shares + pair_shares, overhead)
        self.parts = self.costs + np.rint(shares).astype(np.int64)
        self.smallest = self.costs
        self._pair_of = self.by_rank(costs.pair)
        self._fills_of = self.by_rank(np.minimum(self.sizes / full, 1.0))

    def cost_of(self, rank: int, samples: Samples) -> int:
        found = self.overhead_of[rank] + self.alone(rank, samples)
        if self._has_pairs:
            pairs = pairs_of_tokens([self.tokens[sample] for sample in samples])
            found += round(self._pair_of[rank] * pairs)
        return found

    def load(self, rank: int, samples: Samples) -> int:
        if self._has_pairs:
            return sum([self.cost_of(rank, own) for own in self.bins(rank, samples)])
        found = self.cost_of(rank, samples)
        overhead = self.overhead_of[rank]
        if overhead:
            found += overhead * (len(self._best_fit(samples)) - 1)
        return found

    def bins(self, rank: int, samples: Samples) -> Bins:
        """Even microbatches, or best fit where the samples do not fit into as many."""
        even = self.along(rank, samples, [0] * self.likely(rank, samples))
        return even or self._best_fit(samples)

    def likely(self, rank: int, samples: Samples) -> int:
        """As few as best fit needs; where pairs cost, about as many as pay."""
        count = len(self._best_fit(samples))
        if self._has_pairs:
            fills = self._fills_of[rank]
            count = max(count, round(math.fsum([fills[sample] for sample in samples])))
        return count

    def _best_fit(self, samples: Samples) -> Bins:
        """Each sample, the largest first, goes into the fullest microbatch with room."""
        bins: Bins = []
        rooms: list[tuple[int, int]] = []  # and the microbatch of each, the fullest first
        for sample in sorted(samples, reverse=True):
            size = self.tokens[sample]
            place = bisect_left(rooms, (size,))
            if place == len(rooms):
                rooms.append((self.cap, len(bins)))
                bins.append([])
            room, number = rooms.pop(place)
            bins[number].append(sample)
            insort(rooms, (room - size, number))
        return bins

    def along(self, rank: int, samples: Samples, profile: list[int]) -> Bins:
        """Each sample, the costliest first, goes where there is room and its microbatch is least above the profile."""
        costs = self.costs_of[rank]
        pair = self._pair_of[rank]
        bins: Bins = [[] for _ in profile]
        rooms = [self.cap] * len(bins)
        empty = len(bins)
        above = sorted([(-limit, number) for number, limit in enumerate(profile)])
        falling = sorted(samples, key=costs.__getitem__, reverse=True)
        for done, sample in enumerate(falling):
            size = self.tokens[sample]
            needs_empty = len(samples) - done == empty  # or some would stay empty
            for place, (load, number) in enumerate(above):  # noqa: B007
                if rooms[number] >= size and not (needs_empty and bins[number]):
                    break
            else:
                return []
            load += costs[sample]
            if pair:
                load += round(pair * (self.cap - rooms[number]) * size)
            del above[place]
            insort(above, (load, number))
            empty -= not bins[number]
            bins[number].append(sample)
            rooms[number] -= size
        return bins
