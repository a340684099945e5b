"""Every sample's gradient is in the sums of every unit once, wherever passes break off: the books, without a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_odc.engine.additions import Added, Additions, TakenBackError


class Accumulators:
    """The sums of a model in which unit u runs ``calls[u]`` times, and passes break off when they are told to.

    Args:
        calls: By unit.
        breaks: One number for every pass: after so many additions it breaks off, if it has as many.
    """

    def __init__(self, calls: list[int], breaks: list[int]) -> None:
        self.order = [unit for unit, count in enumerate(calls) for _ in range(count)][::-1]
        self.calls = dict(enumerate(calls))
        self.breaks = list(breaks)
        self.additions = Additions()
        self.sums: Counter[tuple[int, int, str]] = Counter()

    def backward(self, samples: list[str], before: Added, sign: int = 1) -> Added | None:
        """Run a pass; returns what has been added if it breaks off."""
        self.additions.begin(before, takes_back=sign < 0)
        last, ran = self.breaks.pop() if self.breaks else len(self.order), Counter[int]()
        for position, unit in enumerate(self.order):
            if position == last:
                return self.additions.broken_off(self.calls)
            ran[unit] += 1
            if self.additions.begin_adding(unit):
                self.sums.update({(unit, ran[unit], sample): sign for sample in samples})
                self.additions.end_adding()
        self.additions.end()
        return None

    def run(self, samples: list[str], before: Added) -> list[str]:
        """Run a microbatch, in halves where it breaks off; returns the samples that were left out."""
        added = self.backward(samples, before)
        if added is None:
            return []
        if len(samples) > 1:
            half = len(samples) // 2
            return self.run(samples[:half], added) + self.run(samples[half:], added)
        if added.times:
            self.breaks.clear()
            with pytest.raises(TakenBackError):
                self.backward(samples, added, sign=-1)
            self.additions.broken_off(self.calls)
        return samples


@given(
    calls=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    count=st.integers(1, 6),
    breaks=st.lists(st.integers(0, 12), max_size=8),
)
def test_every_gradient_is_added_once_or_not_at_all(calls: list[int], count: int, breaks: list[int]) -> None:
    samples = [f"x{number}" for number in range(count)]
    model = Accumulators(calls, breaks)
    left_out = model.run(samples, Added())
    ran = [sample for sample in samples if sample not in left_out]
    expected = {
        (u, n, sample): 1 for u in range(len(calls)) for n in range(1, calls[u] + 1) for sample in ran
    }
    assert {where: times for where, times in model.sums.items() if times} == expected
    model.breaks.clear()
    before = model.sums.total()
    assert model.backward(["next"], Added()) is None
    assert model.sums.total() == before + sum(calls), "the next microbatch adds everything"


def test_a_unit_that_runs_another_number_of_times_is_found() -> None:
    added = Added(times={0: 1, 2: 1}, calls={0: 1, 1: 4, 2: 2})
    assert added.differs({0: 1, 1: 2, 2: 2}) == []
    assert added.differs({0: 0, 1: 2, 2: 2}) == [], "a part may do without a unit"
    assert added.differs({0: 1, 1: 4, 2: 1}) == [2]


def test_what_breaks_off_while_it_adds_is_known() -> None:
    additions: Any = Additions()
    additions.begin(Added())
    assert additions.begin_adding(3)
    assert additions.adding == 3
    assert additions.broken_off({3: 1}).times == {}


def test_a_sample_has_nothing_to_take_back_of_a_unit_that_it_does_not_run() -> None:
    added = Added(times={0: 1, 2: 1}, calls={0: 1, 1: 1, 2: 1})
    additions: Any = Additions()
    additions.begin(added.within({0: 1, 1: 1, 2: 0}), takes_back=True)
    assert additions.begin_adding(0)
    with pytest.raises(TakenBackError):
        additions.end_adding()
    with pytest.raises(TakenBackError):
        Additions().begin(added.within({1: 1}), takes_back=True)


def test_what_a_part_added_stands_for_its_own_calls() -> None:
    additions: Any = Additions()
    additions.begin(Added(times={0: 1}, calls={0: 3, 1: 4}))
    additions.begin_adding(1)
    additions.end_adding()
    added = additions.broken_off({0: 3, 1: 2})
    assert added.times == {0: 1, 1: 1}
    assert added.differs({0: 3, 1: 2}) == []
    assert added.differs({0: 3, 1: 4}) == [1]


def test_a_pass_is_torn_from_its_first_addition_to_its_end() -> None:
    additions: Any = Additions()
    additions.begin(Added())
    assert not additions.is_torn
    additions.begin_adding(0)
    assert additions.is_torn
    additions.end()
    assert not additions.is_torn
