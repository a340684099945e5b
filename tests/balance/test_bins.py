"""Packing under the token cap: few bins and even bins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance.bins import (
    Bins,
    best_fit,
    pack_bins,
    pack_exact_count,
    packing_cost,
)

many = settings(deadline=None, max_examples=200, derandomize=True)


def check(bins: Bins, sizes: list[int], cap: int) -> None:
    assert sorted(position for members in bins for position in members) == list(range(len(sizes)))
    assert all(members and sum(sizes[p] for p in members) <= cap for members in bins)


@many
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 300))
def test_no_more_bins_than_best_fit(sizes: list[int], cap: int) -> None:
    bins = pack_bins(sizes, cap)
    check(bins, sizes, cap)
    falling = sorted(range(len(sizes)), key=lambda p: -sizes[p])
    assert -(-sum(sizes) // cap) <= len(bins) <= len(best_fit(sizes, falling, cap))


@settings(many, max_examples=60)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 14))
def test_as_few_bins_as_possible(sizes: list[int], cap: int) -> None:
    def fits(count: int) -> bool:
        return any(
            all(sum(s for s, b in zip(sizes, where, strict=True) if b == t) <= cap for t in range(count))
            for where in product(range(count), repeat=len(sizes))
        )

    count = len(pack_bins(sizes, cap))
    assert count == 1 or not fits(count - 1)


def test_fewer_bins_than_best_fit_decreasing_finds() -> None:
    sizes, cap = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 61
    falling = list(range(len(sizes)))
    assert len(best_fit(sizes, falling, cap)) == 4
    assert len(pack_bins(sizes, cap)) == 3


def ways_to_pack(items: list[int]) -> Iterator[list[list[int]]]:
    """All partitions of a list into bins."""
    if not items:
        yield []
        return
    for bins in ways_to_pack(items[1:]):
        yield [[items[0]], *bins]
        for chosen in range(len(bins)):
            yield [*bins[:chosen], [items[0], *bins[chosen]], *bins[chosen + 1 :]]


@many
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.integers(100, 200),
    st.sampled_from([0, 50, 1000]),
)
def test_bins_that_cost_little(sizes: list[int], cap: int, overhead: int) -> None:
    bins = pack_bins(sizes, cap, overhead, 1.0)
    check(bins, sizes, cap)
    best = min(
        packing_cost(way, sizes, overhead, 1.0)
        for way in ways_to_pack(list(range(len(sizes))))
        if all(sum(sizes[p] for p in members) <= cap for members in way)
    )
    found = packing_cost(bins, sizes, overhead, 1.0)
    alone = sum(size * size for size in sizes) / 2
    assert best <= found <= best + 0.1 * (best + alone)


def test_bins_are_even() -> None:
    assert sorted(
        sum([50, 50, 40, 30, 20, 10][p] for p in b) for b in pack_bins([50, 50, 40, 30, 20, 10], 110)
    ) == [
        100,
        100,
    ]


@many
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(100, 300), st.data())
def test_exactly_as_many_bins_as_asked(sizes: list[int], cap: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(len(pack_bins(sizes, cap)), len(sizes)))
    bins = pack_exact_count(sizes, [size * size for size in sizes], cap, count)
    check(bins, sizes, cap)
    assert len(bins) == count
