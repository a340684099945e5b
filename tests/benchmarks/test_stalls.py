"""A rank that stands still is waited for and reported; it goes on where it was, or all give up at the timeout."""

from __future__ import annotations

import pytest

from benchmarks.robustness.stalls import give_up, pause, slow_loader, undisturbed


@pytest.fixture(scope="module")
def expected() -> str:
    return undisturbed()


@pytest.mark.parametrize("place", ["adding, lock held", "publishing"])
def test_a_stopped_rank_is_waited_for(expected, place):
    result = pause(place, expected, seconds=1.0)
    assert result.same
    assert result.reports == result.named == 2
    assert result.seconds < 10


def test_a_rank_that_stays_stopped_is_given_up(expected):
    result = give_up("before the meeting", timeout=1.0)
    assert result.gave_up is not None
    assert 0.9 < result.gave_up < 10
    assert result.reports == result.named == 2


def test_a_slow_loader_is_waited_for(expected):
    result = slow_loader(expected, factor=50)
    assert result.same
    assert result.reports == result.named == 2
