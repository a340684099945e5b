"""Every sample's gradient is in the sums of every unit once, wherever passes break off: the books, without a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_odc.engine.additions import Added, Additions
from lightning_odc.errors import ODCError


class Model:
    """Units that run forward and add their gradients. Passes break off when they are told to.

    Args:
        calls: How many times each unit runs.
        breaks: One number for every pass: after so many additions it breaks off, if it has as many.
    """

    def __init__(self, calls: list[int], breaks: list[int]) -> None:
        self.calls = calls
        self.breaks = list(breaks)
        self.ran: list[int] = []
        self.additions = Additions([f"unit {unit}" for unit in range(len(calls))], lambda: self.ran)
        self.sums: Counter[tuple[int, int, str]] = Counter()

    def forward(self, calls: list[int]) -> None:
        self.additions.begin_forward()
        self.ran += [unit for unit, count in enumerate(calls) for _ in range(count)]

    def backward(self, samples: list[str]) -> Added | None:
        """Run a pass; returns what has been added if it breaks off."""
        order, times = self.ran[::-1], Counter[int]()
        self.additions.begin_backward()
        last = self.breaks.pop() if self.breaks else len(order)
        for position, unit in enumerate(order):
            if position == last:
                added = self.additions.undo()
                self.ran.clear()
                return added
            times[unit] += 1
            if self.additions.begin_adding(unit):
                self.sums.update({(unit, times[unit], sample): 1 for sample in samples})
                self.additions.end_adding()
        self.additions.end_backward()
        self.ran.clear()
        return None

    def run(self, samples: list[str], before: Added) -> None:
        """Run a microbatch, in halves where it breaks off; a single sample runs until it comes to its end."""
        self.forward(self.calls)
        self.additions.retry(before)
        added = self.backward(samples)
        if added is not None and len(samples) > 1:
            half = len(samples) // 2
            self.run(samples[:half], added)
            self.run(samples[half:], added)
        elif added is not None:
            self.run(samples, added)


@given(
    calls=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    count=st.integers(1, 6),
    breaks=st.lists(st.integers(0, 12), max_size=8),
)
def test_every_gradient_is_added_once(calls: list[int], count: int, breaks: list[int]) -> None:
    samples = [f"x{number}" for number in range(count)]
    model = Model(calls, breaks)
    model.run(samples, Added())
    model.breaks.clear()
    model.run(["next"], Added())
    assert model.sums == {
        (u, n, sample): 1
        for u in range(len(calls))
        for n in range(1, calls[u] + 1)
        for sample in [*samples, "next"]
    }


@pytest.mark.parametrize(("calls", "fits"), [([1, 2, 2], True), ([0, 2, 2], True), ([1, 4, 1], False)])
def test_a_unit_that_runs_another_number_of_times_is_found(calls: list[int], fits: bool) -> None:
    """A part may do without a unit. Unit 1 has added nothing, so it may run as often as it likes."""
    model = Model([1, 4, 2], [])
    model.forward(calls)
    model.additions.retry(Added(times={0: 1, 2: 1}, calls={0: 1, 1: 4, 2: 2}))
    if fits:
        assert model.backward(["x"]) is None
        return
    with pytest.raises(ODCError, match=r"Unit 'unit 2' ran 2 times .* and 1 times for a part"):
        model.backward(["x"])


def test_what_a_part_added_stands_for_its_own_calls() -> None:
    model = Model([3, 2], [])
    model.forward([3, 2])
    model.additions.retry(Added(times={0: 1}, calls={0: 3, 1: 4}))
    model.additions.begin_backward()
    assert not model.additions.begin_adding(0)
    assert model.additions.begin_adding(1)
    model.additions.end_adding()
    added = model.additions.undo()
    assert added is not None
    assert added.times == {0: 1, 1: 1}
    assert (added.calls[0], added.calls[1]) == (3, 2)


def test_a_pass_that_broke_off_is_refused_once_it_has_added_unless_it_is_undone() -> None:
    additions = Additions([""] * 4, list)
    additions.begin_backward()
    additions.check_none_broke_off()
    assert additions.begin_adding(3)
    assert additions.adding == 3
    with pytest.raises(ODCError, match="a part of its gradient has been added"):
        additions.check_none_broke_off()
    added = additions.undo()
    assert added is not None and added.times == {}
    assert additions.undo() is None, "before its backward pass"
    additions.check_none_broke_off()
