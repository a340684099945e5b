"""Samples one after another in a row: few microbatches, as even as possible.

Where attention is dense (Note [Dense attention]), they are as many as cost least.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_odc.balance.arrays import Bools, Floats, Ints
from lightning_odc.balance.costs import MinibatchCosts, pairs_of_tokens
from lightning_odc.balance.microbatches import (
    FEW_SAMPLES,
    Bins,
    Groups,
    Microbatches,
    Pieces,
    grid_scale,
    lower_bound,
    sums,
)

_FIELD = 64


class Packed(Microbatches):
    """Samples one after another in a row; tokens, and all other numbers, add up."""

    most_lined_up = 32768

    def __init__(self, rows: Ints, caps: Ints, costs: MinibatchCosts) -> None:
        rows, caps = rows.reshape(len(rows), -1), caps.reshape(len(caps), -1)
        order = np.argsort((rows / caps.max(0)).max(1), kind="stable")
        super().__init__(len(caps), order)
        kinds = 1 if costs.ranks_equal else self.num_ranks
        self.tokens, self._numbers, self._caps = rows[order, 0], list(rows[order].T), caps[:kinds].T
        overhead, pair = costs.overhead[:kinds], costs.pair[:kinds]
        samples = np.broadcast_to(costs.samples, (kinds, len(rows)))[:, order]
        self.is_additive = not (overhead.any() or pair.any())
        # The number that fills most microbatches tells how full they are; where pairs cost, it is the first one.
        self._filling = 0 if pair.any() else int(np.argmax(rows.sum(0) / caps.sum(0)))
        sizes = self._numbers[self._filling]
        most = self._caps[self._filling]
        self._full = np.where(
            pair > 0, np.minimum(most, np.sqrt(2 * overhead / np.where(pair > 0, pair, 1))), most
        )
        # What each sample adds to microbatches that are filled as far as it pays; beyond, pairs cost more.
        full = self._full[:, None]
        bins = overhead[:, None] * sizes / np.maximum(full, 1.0) + pair[:, None] * sizes * (full - sizes) / 2
        bins = np.where(sizes >= full, overhead[:, None], bins)
        self.scale = grid_scale(float(samples.max() + max(bins.max(), overhead.max())) * (len(rows) + 1))
        self.costs, self.overhead = np.rint(samples * self.scale), np.rint(overhead * self.scale)
        self.parts = np.rint((samples + bins) * self.scale)
        self._least = self.costs + np.floor(
            self.overhead[:, None] * (sizes / np.maximum(most[:, None], sizes))
        )
        self._pair = pair * self.scale
        self._lists: list[list[float]] = []

    def bound(self) -> float:
        alone = float((self.costs + self.overhead[:, None]).min(0).max())
        return max(lower_bound(self._least, self.num_ranks), alone)

    def divisions(self) -> Iterator[Pieces]:
        """Single samples; with their parts of microbatches that are full, or three quarters full, or without."""
        for filling in (1.0,) if self.is_additive or len(self) > FEW_SAMPLES else (1.0, 0.75, math.inf):
            costs = self.costs + np.rint((self.parts - self.costs) / filling)
            yield np.ones(len(self), dtype=np.int64), costs

    def costs_of(self, ranks: Ints, samples: Ints, begins: Ints) -> Floats:
        rows, counts = self.rows(ranks), np.diff(begins, append=len(samples))
        found = sums(self.costs[np.repeat(rows, counts), samples], begins) + self.overhead[rows]
        if not self._pair.any():
            return found
        tokens = self.tokens[samples]
        across = sums(tokens, begins) ** 2 - sums(tokens * tokens, begins)  # twice the pairs
        return found + np.rint(self._pair[rows] * (across // 2))

    def loads(self, ranks: Ints, groups: Ints) -> Floats:
        if self._pair.any():
            return self.bins(ranks, groups)[0]
        rows = self.rows(ranks)
        return self._alone(rows, groups) + self.overhead[rows] * self._used(rows, groups)

    def _alone(self, rows: Ints, groups: Ints) -> Floats:
        """What samples cost without overhead and pairs."""
        return np.where(groups < len(self), self.costs[rows[:, None], groups % len(self)], 0.0).sum(1)

    def _numbers_of(self, groups: Ints) -> list[Ints]:
        return [np.append(values, 0)[groups] for values in self._numbers]

    def _used(self, rows: Ints, groups: Ints) -> Ints:
        """In how many microbatches best fit puts sets of samples."""
        numbers, caps = self._numbers_of(groups), self._caps[:, rows]
        limits = np.minimum(_most(numbers, caps), groups.shape[1])
        is_even = np.zeros(len(rows), dtype=np.bool_)
        places, _, _ = _fill(numbers, caps, limits, is_even, self._filling, False)
        return np.where(groups[:, 0] < len(self), places.max(1) + 1, 0)

    def bins(self, ranks: Ints, groups: Ints) -> tuple[Floats, Ints]:
        """What costs least of several numbers of even microbatches, best fit, and each sample alone."""
        return self._bins(self.rows(ranks), groups, self._pair)

    def _bins(self, rows: Ints, groups: Ints, pair: Floats) -> tuple[Floats, Ints]:
        real, counts = groups < len(self), (groups < len(self)).sum(1)
        numbers, caps = self._numbers_of(groups), self._caps[:, rows]
        fewest = np.max(_fewest(numbers, caps), axis=0)
        limits = [fewest, fewest + 1] if len(numbers) > 1 else [fewest]
        if pair.any():
            filled = np.minimum(numbers[0] / np.maximum(self._full[rows, None], 1.0), 1.0)
            likely = np.cumsum(filled, 1)[:, -1].astype(np.int64)  # in this order on every processor
            limits += [np.maximum(likely + more, fewest) for more in (0, 1)]
        limits.append(_most(numbers, caps))  # for best fit
        times, shape = len(limits), (len(limits), *groups.shape)
        is_even = np.arange(times).repeat(len(groups)) < times - 1
        places, across, fits = _fill(
            [np.tile(own, (times, 1)) for own in numbers],
            np.tile(caps, times),
            np.minimum(limits, counts).ravel(),
            is_even,
            self._filling,
            bool(pair.any()),
        )
        used = np.where(np.tile(real, (times, 1)), places, -1).max(1) + 1.0
        rows_of = np.tile(rows, times)
        extra = used * self.overhead[rows_of] + np.rint(pair[rows_of] * across)
        extra = np.where(fits | ~is_even, extra, np.inf)
        best, lines = (extra + used).reshape(times, -1).argmin(0), np.arange(len(groups))
        extra, places = extra.reshape(times, -1)[best, lines], places.reshape(shape)[best, lines]
        if pair.any():  # each sample alone has no pairs
            alone = counts * self.overhead[rows]
            places = np.where((alone < extra)[:, None], np.arange(groups.shape[1]), places)
            extra = np.minimum(alone, extra)
        return self._alone(rows, groups) + extra, places

    def counts(self, groups: Ints) -> Sequence[int]:
        fewest, most = int(self._used(np.zeros(len(groups), dtype=np.int64), groups).max()), groups.shape[1]
        if not self._pair.any() or fewest == most:
            return [fewest]
        return sorted({round(fewest * (most / fewest) ** (step / 5)) for step in range(6)})

    def in_step(self, groups: Groups, counts: Sequence[int]) -> Iterator[list[Bins]]:
        """Even costs in each rank's microbatches."""
        for count in counts:
            yield [self.along(rank, group, [0.0] * count)[0] for rank, group in enumerate(groups)]

    def along(self, rank: int, samples: list[int], profile: list[float]) -> tuple[Bins, list[float]]:
        """Each sample, the costliest first, where it raises the profile least, and where most room is below it."""
        # Where the profile is nothing, that is the cheapest microbatch with room.
        if not self._lists:
            self._list()
        row = rank if len(self.costs) > 1 else 0
        costs, tokens, pair = self._lists[row], self._listed_tokens, self._pairs[row]
        bins: Bins = [[] for _ in profile]
        guards, empty = self._guards, len(bins)
        rooms, filled, loads = [self._cap | guards] * empty, [0] * empty, [self._overheads[row]] * empty

        def raised(entry: tuple[float, int]) -> tuple[float, float, int]:
            after = entry[0] + costs[sample] + pair * filled[entry[1]] * tokens[sample]
            return max(after, 0.0) - max(entry[0], 0.0), after, entry[1]

        # How far each is above the profile, and its place.
        ranked = sorted((-limit, place) for place, limit in enumerate(profile))
        falling = sorted(samples, key=costs.__getitem__, reverse=True)
        for left, sample in zip(range(len(samples), 0, -1), falling, strict=True):
            size = self._sizes[sample]
            # If pairs cost nothing, the one with most room below the profile is also raised least.
            for entry in sorted(ranked, key=raised) if pair else ranked:
                place = entry[1]
                if (rooms[place] - size) & guards == guards and (left > empty or not bins[place]):
                    break
            else:  # a sample finds no room
                bins = self._split(samples, len(profile))
                loads = [self._overheads[row] + sum([costs[sample] for sample in bin_]) for bin_ in bins]
                break
            ranked.remove(entry)
            insort(ranked, (entry[0] + costs[sample] + pair * filled[place] * tokens[sample], place))
            empty -= not bins[place]
            bins[place].append(sample)
            rooms[place] -= size
            filled[place] += tokens[sample]
            loads[place] += costs[sample]
        if pair:
            across = [pairs_of_tokens([tokens[sample] for sample in bin_]) for bin_ in bins]
            loads = [load + round(pair * pairs) for load, pairs in zip(loads, across, strict=True)]
        order = sorted(range(len(bins)), key=loads.__getitem__, reverse=True)
        return [bins[place] for place in order], [loads[place] for place in order]

    def _split(self, samples: list[int], count: int) -> Bins:
        """The fewest microbatches, of which the costliest are split until there are enough."""
        costs, row = self._lists[0], np.zeros(1, dtype=np.int64)
        places = self._bins(row, np.array([samples]), 0 * self._pair)[1][0].tolist()
        bins: Bins = [[] for _ in range(max(places) + 1)]
        for sample, place in zip(samples, places, strict=True):
            bins[place].append(sample)
        while len(bins) < count:
            costliest = max(
                (b for b in bins if len(b) > 1), key=lambda b: sum([costs[sample] for sample in b])
            )
            half = costliest[1::2]
            costliest[:] = costliest[::2]
            bins.append(half)
        return bins

    def _list(self) -> None:
        """What `_place` looks up, as lists, which are faster. A sample's numbers are one: each has 64 bits of it."""
        # Caps have the top bit of each number set, its *guard*. Where a number is larger than the room for it, the
        # subtraction borrows the guard.
        fields = range(0, _FIELD * len(self._numbers), _FIELD)
        self._lists, self._listed_tokens = self.costs.tolist(), self.tokens.tolist()
        self._overheads, self._pairs = self.overhead.tolist(), self._pair.tolist()
        self._guards = sum(1 << (field + _FIELD - 1) for field in fields)
        rows = np.append(np.array(self._numbers), self._caps[:, :1], axis=1).tolist()
        sizes = rows[0]
        for field, numbers in zip(fields[1:], rows[1:], strict=True):
            sizes = [size | number << field for size, number in zip(sizes, numbers, strict=True)]
        self._cap, self._sizes = sizes.pop(), sizes


def _fewest(numbers: list[Ints], caps: Ints) -> list[Ints]:
    """``[p]`` for each number: how many microbatches it alone needs at least."""
    return [-(-own.sum(1) // np.maximum(cap, 1)) for own, cap in zip(numbers, caps, strict=True)]


def _most(numbers: list[Ints], caps: Ints) -> Ints:
    """``[p]``: how many microbatches best fit needs at most: it fills any two beyond one cap."""
    return 2 * np.sum(_fewest(numbers, caps), axis=0) + 1


def _fill(
    numbers: list[Ints],  # [d][p, k] of each sample, which rise; then zeros
    caps: Ints,  # [d, p] of a microbatch
    limits: Ints,  # [p] most microbatches
    is_even: Bools,  # [p] each sample goes into the emptiest microbatch with room, else into the fullest
    filling: int,  # the number that tells how full one is
    has_pairs: bool,  # pairs of tokens are counted
) -> tuple[Ints, Floats, Bools]:
    """``[p, k]`` where each sample of ``p`` sets is, ``[p]`` pairs of tokens across samples, and whether all fit."""
    width = max(int(limits.max()), 1)
    sign, firsts = np.where(is_even, 1.0, -1.0)[:, None], np.arange(len(limits)) * width
    # Below zero where the fullest one is looked for, so that it is the smallest number, too.
    filled = np.where(np.arange(width) < np.maximum(limits, 1)[:, None], 0.0, sign * np.inf)
    signed, room_for = sign * numbers[filling], caps[filling, :, None] - numbers[filling]
    others = [number for number in range(len(caps)) if number != filling]
    rooms = [np.repeat(caps[number], width).reshape(-1, width) for number in others]
    places, across = np.zeros_like(numbers[0]), np.zeros(len(limits))
    for column in range(places.shape[1] - 1, -1, -1):
        fits = np.abs(filled) <= room_for[:, column, None]
        for room, number in zip(rooms, others, strict=True):
            fits &= room >= numbers[number][:, column, None]
        places[:, column] = place = np.where(fits, filled, np.inf).argmin(1)
        place += firsts
        before = filled.take(place)
        if has_pairs:
            across += np.abs(before) * numbers[filling][:, column]
        filled.put(place, before + signed[:, column])
        for room, number in zip(rooms, others, strict=True):
            room.put(place, room.take(place) - numbers[number][:, column])
    most = np.where(np.isfinite(filled), np.abs(filled), 0.0).max(1)
    fit = np.all([most <= caps[filling], *((room >= 0).all(1) for room in rooms)], axis=0)
    return places, across, fit
