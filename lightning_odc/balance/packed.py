"""Samples one after another in a row: as few microbatches as best fit finds, as even as possible.

Where attention is dense (Note [Dense attention]), they are as many as cost least.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens
from lightning_odc.balance.microbatches import (
    FEW_SAMPLES,
    Bins,
    Microbatches,
    Pieces,
    Rooms,
    grid_scale,
    lower_bound,
)


class Packed(Microbatches):
    """Samples one after another in a row; tokens, and all other numbers, add up.

    Args:
        rows: ``[n]`` or ``[n, d]``, of each sample.
        caps: ``[num_ranks]`` or ``[num_ranks, d]``.
        costs: What samples cost; see `MinibatchCosts.forbid_unfitting` for caps that differ.
    """

    most_lined_up = 32768

    def __init__(self, rows: Ints, caps: Ints, costs: MinibatchCosts) -> None:
        rows, caps = rows.reshape(len(rows), -1), caps.reshape(len(caps), -1)
        order = np.argsort((rows / caps.max(0)).max(1), kind="stable")
        super().__init__(len(caps), order)
        self._rows, self.tokens = rows[order], rows[order, 0]
        kinds = 1 if costs.ranks_equal else self.num_ranks
        self._rooms = Rooms(rows.shape[1])
        self._sizes, self._caps = self._rooms.sizes(self._rows), self._rooms.sizes(caps[:kinds])
        overhead, pair = costs.overhead[:kinds], costs.pair[:kinds]
        samples = np.broadcast_to(costs.samples, (kinds, len(rows)))[:, order]
        self.is_additive = not (overhead.any() or pair.any())
        # The number that fills most microbatches tells how full they are; where pairs cost, it is the first one.
        number = 0 if pair.any() else int(np.argmax(rows.sum(0) / caps.sum(0)))
        self._filling, self._listed_tokens = self._rows[:, number], self.tokens.tolist()
        self._listed_filling = self._filling.tolist()
        bins = _parts_of_full_bins(self._filling, caps[:kinds, number], overhead, pair)
        fractions = self._filling / np.maximum(caps[:kinds, number, None], self._filling)
        self.scale = grid_scale(float(samples.max() + max(bins.max(), overhead.max())) * (len(rows) + 1))
        self.costs, self.overhead = np.rint(samples * self.scale), np.rint(overhead * self.scale)
        self.parts = np.rint((samples + bins) * self.scale)
        self._least = self.costs + np.floor(self.overhead[:, None] * fractions)
        self._pair, self._overheads = (pair * self.scale).tolist(), self.overhead.tolist()
        self._most_tokens = [
            _best_filling(*terms) for terms in zip(caps[:kinds, 0].tolist(), overhead, pair, strict=True)
        ]

    def bound(self) -> float:
        alone = float((self.costs + self.overhead[:, None]).min(0).max())
        return max(lower_bound(self._least, self.num_ranks), alone)

    def divisions(self) -> Iterator[Pieces]:
        """Single samples; with their parts of microbatches that are full, or three quarters full, or without."""
        for filling in (1.0,) if self.is_additive or len(self) > FEW_SAMPLES else (1.0, 0.75, math.inf):
            costs = self.costs + np.rint((self.parts - self.costs) / filling)
            yield Pieces([[sample] for sample in range(len(self))], costs)

    def cost(self, rank: int, bin_: Sequence[int]) -> float:
        row = self.row(rank)
        return sum(map(self.listed(row).__getitem__, bin_)) + self._extra(row, [bin_])

    def _make_bins(self, row: int, samples: list[int]) -> tuple[float, Bins]:
        falling = samples[::-1]
        bins = self._fewest_bins(row, falling)
        if self._pair[row] and len(bins) < len(samples):
            full = self._most_tokens[row]
            likely = int(sum(1.0 if size >= full else size / full for size in self.tokens[samples].tolist()))
            counts = {min(max(count, len(bins)), len(samples)) for count in range(likely - 1, likely + 3)}
            options = [
                self._place(row, falling, self._listed_filling, [0] * count)
                for count in sorted({*counts, len(samples)})
            ]
            bins = min([bins, *filter(None, options)], key=lambda option: self._extra(row, option))
        return sum(map(self.listed(row).__getitem__, samples)) + self._extra(row, bins), bins

    def _extra(self, row: int, bins: Sequence[Sequence[int]]) -> float:
        """What microbatches cost besides their samples."""
        extra = len(bins) * self._overheads[row]
        if not self._pair[row]:
            return extra
        sizes = self._listed_tokens
        across = sum([pairs_of_tokens([sizes[sample] for sample in bin_]) for bin_ in bins if len(bin_) > 1])
        return extra + round(self._pair[row] * across)

    def _fewest_bins(self, row: int, falling: list[int]) -> Bins:
        """As few as best fit needs or fewer, as even as possible."""
        sizes, cap, fits = self._sizes, self._caps[row], self._rooms.fits
        total = sum(map(sizes.__getitem__, falling))
        fewest = min(-(-total // cap), len(falling))
        while fewest < len(falling) and not fits(total, fewest * cap):
            fewest += 1
        if fewest < 2 or fewest == len(falling):
            return [falling] if fewest == 1 else [[sample] for sample in falling]
        if even := self._place(row, falling, self._listed_filling, [0] * fewest):
            return even
        most = self._best_fit(row, falling)
        for count in range(fewest + 1, len(most) + 1):
            if even := self._place(row, falling, self._listed_filling, [0] * count):
                return even
        return most

    def _best_fit(self, row: int, falling: list[int]) -> Bins:
        """Each sample into the fullest microbatch that has room, or a new one."""
        guards, bins, rooms = self._rooms.guards, list[list[int]](), list[int]()
        for sample in falling:
            size, target, least = self._sizes[sample], -1, math.inf
            for place, room in enumerate(rooms):
                if room < least and (room - size) & guards == guards:
                    target, least = place, room
            if target < 0:
                target = len(bins)
                bins.append([])
                rooms.append(self._caps[row] | guards)
            bins[target].append(sample)
            rooms[target] -= size
        return bins

    def counts(self, groups: list[list[int]]) -> Sequence[int]:
        fewest = max(len(self._fewest_bins(0, group[::-1])) for group in groups)
        most = max(map(len, groups))
        if not any(self._pair) or fewest == most:
            return [fewest]
        return sorted({round(fewest * (most / fewest) ** (step / 5)) for step in range(6)})

    def in_step(self, groups: list[list[int]], counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Even costs in each rank's microbatches."""
        for count in counts:
            yield [self.along(rank, group, [0.0] * count) for rank, group in enumerate(groups)]

    def along(self, rank: int, samples: list[int], profile: list[float]) -> Bins:
        """The costliest sample first."""
        row, costs = self.row(rank), self.listed(self.row(rank))
        falling = sorted(samples, key=costs.__getitem__, reverse=True)
        bins = self._place(row, falling, costs, profile, self._pair[row])
        bins = bins or self._split(row, samples, len(profile))
        return sorted(bins, key=lambda bin_: -self.cost(rank, bin_))

    def _place(
        self,
        row: int,
        samples: list[int],
        weights: Sequence[float],
        profile: Sequence[float],
        pair: float = 0.0,
    ) -> Bins | None:
        """Each sample, in this order, where it raises the profile least, and there where most room is left below it.

        Where the profile is nothing, that is the lightest microbatch with room. None if a sample finds no room.
        """
        guards, sizes, tokens = self._rooms.guards, self._sizes, self._listed_tokens
        bins: Bins = [[] for _ in profile]
        rooms, filled, empty = [self._caps[row] | guards] * len(bins), [0] * len(bins), len(bins)

        def raised(entry: tuple[float, int]) -> tuple[float, float, int]:
            after = entry[0] + weights[sample] + pair * filled[entry[1]] * tokens[sample]
            return max(after, 0.0) - max(entry[0], 0.0), after, entry[1]

        # How far each is above the profile, and its place.
        ranked = sorted((-limit, place) for place, limit in enumerate(profile))
        for left, sample in zip(range(len(samples), 0, -1), samples, strict=True):
            size = sizes[sample]
            # If pairs cost nothing, the one with most room below the profile is also raised least.
            for entry in sorted(ranked, key=raised) if pair else ranked:
                place = entry[1]
                if (rooms[place] - size) & guards == guards and (left > empty or not bins[place]):
                    break
            else:
                return None
            ranked.remove(entry)
            insort(ranked, (entry[0] + weights[sample] + pair * filled[place] * tokens[sample], place))
            empty -= not bins[place]
            bins[place].append(sample)
            rooms[place] -= size
            filled[place] += tokens[sample]
        return bins

    def _split(self, row: int, samples: list[int], count: int) -> Bins:
        """The fewest microbatches, of which the costliest are split until there are enough."""
        bins = [list(bin_) for bin_ in self._fewest_bins(row, samples[::-1])]
        while len(bins) < count:
            costliest = max((b for b in bins if len(b) > 1), key=lambda b: float(self.costs[row, b].sum()))
            half = costliest[1::2]
            costliest[:] = costliest[::2]
            bins.append(half)
        return bins

    def pairs(self, count: int) -> Bins:
        if 2 * count > len(self):
            return []
        # If any pairs fit, then the shortest with the longest of the shortest, and so on.
        pairs = [[i, 2 * count - 1 - i] for i in range(count)]
        fit = all(self._rooms.fits(self._sizes[a] + self._sizes[b], self._caps[0]) for a, b in pairs)
        return pairs if fit else []

    def _size(self, unit: list[int]) -> int:
        return int(self.tokens[unit].sum())

    def _glue(self, units: Bins, flat: list[int], firsts: Ints) -> None:
        across = np.array([pairs_of_tokens(self.tokens[unit].tolist()) for unit in units])
        pair = np.rint(np.array(self._pair)[:, None] * across)
        self.costs, self.parts = (
            np.add.reduceat(array[:, flat], firsts, axis=1) + pair for array in (self.costs, self.parts)
        )
        self.tokens = np.add.reduceat(self.tokens[flat], firsts)
        self._listed_tokens = self.tokens.tolist()
        self._filling = np.add.reduceat(self._filling[flat], firsts)
        self._listed_filling = self._filling.tolist()
        self._sizes = [sum(self._sizes[sample] for sample in unit) for unit in units]


def _best_filling(cap: float, overhead: float, pair: float) -> float:
    """Tokens up to which filling a microbatch pays: beyond, pairs cost more than another microbatch would."""
    return min(float(cap), math.sqrt(2 * overhead / pair)) if pair else float(cap)


def _parts_of_full_bins(sizes: Ints, caps: Ints, overhead: Floats, pair: Floats) -> Floats:
    """``[1 or num_ranks, n]``: what each sample adds to the cost of microbatches that are filled as far as it pays."""
    terms = zip(caps.tolist(), overhead.tolist(), pair.tolist(), strict=True)
    full = np.array([[_best_filling(*rank)] for rank in terms])
    overhead, pair = overhead[:, None], pair[:, None]
    parts = overhead * sizes / np.maximum(full, 1.0) + pair * sizes * (full - sizes) / 2
    return np.where(sizes >= full, overhead, parts)
