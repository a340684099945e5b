"""Aligned microbatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_odc.balance.bins import Bins, RankSamples, pack_bins, pack_exact_count
from lightning_odc.balance.equal_counts import align
from tests.balance.test_bins import check, many


def span(ranks: list[RankSamples], packed: list[Bins]) -> float:
    loads = [
        sorted((sum(own.costs[p] for p in members) for members in bins), reverse=True)
        for own, bins in zip(ranks, packed, strict=True)
    ]
    return float(np.array(loads).max(0).sum())


@many
@given(
    st.lists(st.lists(st.integers(1, 100), min_size=6, max_size=6), min_size=1, max_size=6),
    st.integers(100, 300),
)
def test_aligned_bins_are_no_worse(rows: list[list[int]], cap: int) -> None:
    ranks = [RankSamples(range(len(row)), row, [float(size * size) for size in row]) for row in rows]
    count = max(len(pack_bins(row, cap)) for row in rows)
    packed = [pack_exact_count(own.sizes, own.costs, cap, count) for own in ranks]
    aligned = align(ranks, packed, cap)
    for own, bins in zip(ranks, aligned, strict=True):
        check(bins, list(own.sizes), cap)
        assert len(bins) == count
    assert span(ranks, aligned) <= span(ranks, packed) * (1 + 1e-12)


def test_alignment_puts_work_beside_the_largest_sample() -> None:
    large, small = (
        RankSamples([0, 1], [100, 10], [100.0, 10.0]),
        RankSamples([0, 1, 2, 3], [30, 30, 30, 20], [30.0, 30.0, 30.0, 20.0]),
    )
    packed = [[[0], [1]], [[0, 3], [1, 2]]]
    assert span([large, small], packed) == 100 + 50
    assert span([large, small], align([large, small], packed, 100)) == pytest.approx(100 + 20)
