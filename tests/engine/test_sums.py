"""Gradients that a rank sums, adds to their owners once, or drops: the books, without a model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_odc.engine.additions import OF_THE_USER, Added, Additions, Pass
from lightning_odc.engine.late_gradients import Placeholders
from lightning_odc.engine.unit_sum import UnitSum
from lightning_odc.errors import DisagreementError, ODCError
from lightning_odc.protocol.protocol import DISCARD
from lightning_odc.protocol.transports.base import Segment

OWNERS = 2
ROWS = [(2, 3), (1, 2), (3, 2)]  # of three parameters: rows and columns
PADDED = [3, 2, 4]  # numbers of each in a shard, with the padding of the first and the last
PLACES = [0, 3, 5]  # where these begin
NUMEL = 9  # of each owner's row


class Slot:
    """A parameter, cut along its rows."""

    def __init__(self, number: int) -> None:
        self.grad_offset = PLACES[number]

    def shards_of(self, whole: Tensor, owners: int) -> tuple[Tensor, ...]:
        return whole.chunk(owners)


class Accumulators:
    """In the place of a unit's windows: what was added to them."""

    owners = OWNERS
    spec = SimpleNamespace(grad_numel=NUMEL, grad_dtype=torch.float32)

    def __init__(self) -> None:
        self.rows = torch.zeros(OWNERS, NUMEL)
        self.touched: list[list[tuple[int, int]]] = []  # by each addition

    def accumulate(self, chunks: Tensor, segments: list[Segment]) -> None:
        self.touched.append([(part.target, part.numel) for part in segments])
        for part in segments:
            rows = chunks.view(OWNERS, -1)[:, part.source : part.source + part.numel]
            self.rows[:, part.target : part.target + part.numel] += rows


def made() -> tuple[UnitSum, Accumulators, list[Any]]:
    """A sum, what it is added to, and its parameters."""
    accumulators: Any = Accumulators()
    slots: list[Any] = [Slot(number) for number in range(3)]
    unit: Any = SimpleNamespace(
        name="a unit", index=0, slots=slots, grad_slots=slots, reduced_in_step=set(), reduced_now={}
    )
    unit.whole = [Segment(0, 0, NUMEL)]
    total = UnitSum(unit, accumulators, Additions([unit], list))
    total.waits = True
    return total, accumulators, slots


def gradient(number: int, seed: int) -> Tensor:
    return torch.randn(ROWS[number], generator=torch.Generator().manual_seed(seed))


def take(total: UnitSum, slots: list[Any], **gradients: Tensor) -> None:
    """Gradients of a microbatch, by `p0`, `p1` and `p2`."""
    total._additions.begin_backward(Pass(is_announced=True, is_last=False))
    for name, gradient in gradients.items():
        parameter: Any = SimpleNamespace(grad=gradient)
        total.arrives(slots[int(name[1:])], parameter)
        assert parameter.grad is None
    total.take_in()
    total._additions.end_backward()


def rows_of(number: int, whole: Tensor) -> Tensor:
    """How `fully_shard` lays out a gradient: a row per owner, with padding."""
    padded = torch.zeros(OWNERS * -(-len(whole) // OWNERS), whole.shape[1])
    padded[: len(whole)] = whole
    return padded.view(OWNERS, PADDED[number])


def test_sums_are_laid_out_as_fully_shard_lays_out_gradients():
    """The second parameter has no gradient in the second microbatch, the third one has none at all."""
    total, accumulators, slots = made()
    take(total, slots, p0=gradient(0, 0), p1=gradient(1, 1))
    take(total, slots, p0=gradient(0, 2))
    assert not accumulators.touched
    for _ in range(2):  # nothing is left the second time
        total.give()
    assert accumulators.touched == [[(0, NUMEL)]]
    expected = torch.zeros(OWNERS, NUMEL)
    expected[:, :3] = rows_of(0, gradient(0, 0) + gradient(0, 2))
    expected[:, 3:5] = rows_of(1, gradient(1, 1))
    assert torch.equal(accumulators.rows, expected)


def test_the_last_microbatch_is_added_with_the_sums():
    """`fully_shard` reduces the first and the last parameter of three, of which the last has no sum."""
    total, accumulators, slots = made()
    take(total, slots, p0=gradient(0, 0), p1=gradient(1, 1))
    last = torch.cat([rows_of(0, gradient(0, 2)), rows_of(2, gradient(2, 3))], 1)
    total.add(last.reshape(-1), [Segment(0, 0, 3), Segment(5, 3, 4)])
    total.give()
    assert len(accumulators.touched) == 1
    wholes = [gradient(0, 0) + gradient(0, 2), gradient(1, 1), gradient(2, 3)]
    expected = torch.cat([rows_of(number, whole) for number, whole in enumerate(wholes)], 1)
    assert torch.equal(accumulators.rows, expected)


def test_what_a_broken_off_pass_left_is_forgotten_and_what_is_not_summed_is_left_to_fully_shard():
    total, accumulators, slots = made()
    additions = total._additions
    unit = total._unit
    additions.begin_backward(Pass(is_announced=True, is_last=False))
    total.arrives(slots[0], SimpleNamespace(grad=gradient(0, 0)))  # type: ignore[arg-type]
    assert additions.undo() == Added()
    total.forget_arrived()
    for waits, is_last in ((False, False), (True, True)):
        total.waits = waits
        additions.begin_backward(Pass(is_announced=True, is_last=is_last))
        parameter: Any = SimpleNamespace(grad=gradient(0, 0))
        total.arrives(slots[0], parameter)
        assert parameter.grad is not None
        assert unit.reduced_now.pop(slots[0]) is parameter
        additions.end_backward()
    total.give()
    assert not accumulators.touched
    assert not unit.reduced_in_step


def test_what_is_dropped_has_no_part_in_what_is_added_later_and_what_is_given_back_has():
    for drops in (True, False):
        total, accumulators, slots = made()
        take(total, slots, p0=gradient(0, 0), p1=gradient(1, 1))
        if drops:
            total.clear(slots[0])
        else:
            total.release()
            assert not total.waits
            total.waits = True
        take(total, slots, p0=gradient(0, 5))
        total.give()
        first = gradient(0, 5)
        if not drops:
            first = first + gradient(0, 0)
        assert torch.allclose(accumulators.rows[:, :3], rows_of(0, first))
        assert torch.equal(accumulators.rows[:, 3:5], rows_of(1, gradient(1, 1)))


# -- added once, wherever passes break off --


def units(count: int) -> list[Any]:
    """Units of one parameter."""
    return [SimpleNamespace(index=one, name=f"unit {one}", slots=[object()]) for one in range(count)]


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
        self.units = units(len(calls))
        self.additions = Additions(self.units, lambda: self.ran)
        self.sums: Counter[tuple[int, int, str]] = Counter()

    def forward(self, calls: list[int]) -> None:
        self.additions.begin_forward()
        self.ran += [unit for unit, count in enumerate(calls) for _ in range(count)]

    def backward(self, samples: list[str]) -> Added | None:
        """Run a pass; returns what has been added if it breaks off."""
        order = self.ran[::-1]
        times = Counter[int]()
        self.additions.begin_backward(OF_THE_USER)
        if self.breaks:
            last = self.breaks.pop()
        else:
            last = len(order)
        for position, unit in enumerate(order):
            if position == last:
                added = self.additions.undo()
                self.ran.clear()
                return added
            times[unit] += 1
            slot = self.units[unit].slots[0]
            if self.additions.arrives(slot):
                self.sums.update({(unit, times[unit], sample): 1 for sample in samples})
                self.additions.end_adding([slot])
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
    expected = {
        (u, n, sample): 1
        for u in range(len(calls))
        for n in range(1, calls[u] + 1)
        for sample in [*samples, "next"]
    }
    assert model.sums == expected


@pytest.mark.parametrize(("calls", "fits"), [([1, 2, 2], True), ([0, 2, 2], True), ([1, 4, 1], False)])
def test_a_unit_that_runs_another_number_of_times_is_found(calls: list[int], fits: bool) -> None:
    """A part may do without a unit. Unit 1 has added nothing, so it may run as often as it likes."""
    model = Model([1, 4, 2], [])
    model.forward(calls)
    added = Added({model.units[unit].slots[0]: 1 for unit in (0, 2)}, calls={0: 1, 1: 4, 2: 2})
    model.additions.retry(added)
    if fits:
        assert model.backward(["x"]) is None
        return
    with pytest.raises(ODCError, match=r"Unit 'unit 2' ran 2 times .* and 1 times for a part"):
        model.backward(["x"])


def test_a_pass_that_broke_off_is_refused_once_it_has_added_unless_it_is_undone() -> None:
    (unit,) = units(1)
    additions = Additions([unit], list)
    additions.begin_backward(OF_THE_USER)
    additions.check_none_broke_off()
    assert additions.arrives(unit.slots[0])
    additions.check_none_broke_off()
    additions.adding = unit.name
    assert additions.adding == unit.name
    with pytest.raises(ODCError, match="a part of its gradient has been added"):
        additions.check_none_broke_off()
    added = additions.undo()
    assert added is not None
    assert added.times == {}
    assert additions.undo() is None, "before its backward pass"
    additions.check_none_broke_off()


# -- who drops which gradient, with stand-ins for all that a rank has --


class SlotStub:
    padded_numel = 1

    def __init__(self, number: int, is_emptied: bool) -> None:
        self.name = f"p{number}"
        self.grad_offset = number
        self.sharded_param = SimpleNamespace(grad=SimpleNamespace(zeroed=is_emptied))


def dropped(laid: set[int], emptied: set[int], others: list[str], came_for: str) -> set[int]:
    """What a rank drops of three parameters: some have a placeholder, of which the user emptied some."""
    slots = [SlotStub(number, number in emptied) for number in range(3)]
    cleared = set[int]()
    forgotten = set[int]()
    unit = SimpleNamespace(index=0, slots=slots, grad_slots=slots, reduced_in_step=set())
    window = SimpleNamespace(clear=lambda at, _: cleared.add(at))
    held = SimpleNamespace(clear=lambda slot: forgotten.add(slot.grad_offset))
    protocol: Any = SimpleNamespace(windows=[window], meet=lambda kind, item=None: None)
    parts: list[Any] = [[unit], [held], protocol]
    placeholders: Any = Placeholders(*parts)
    placeholders.laid = {slots[number]: slots[number].sharded_param.grad for number in laid}
    placeholders.lift = lambda: None
    protocol.drop_together(others, came_for)
    assert cleared == forgotten, "nor does it add later what it dropped"
    return cleared


def test_a_rank_drops_what_others_drop_unless_it_has_added_since():
    for came_for in (DISCARD, "optimizer step"):
        assert dropped(set(), set(), ["0x1", "0x4"], came_for) == {0, 2}
    # The user left the gradient of p1 here, as one may for one's own shard.
    assert dropped({0, 1}, {0}, ["0x7"], DISCARD) == {0, 2}
    with pytest.raises(DisagreementError, match=r"emptied the gradient of 'p1'(?s:.*)settle_gradients\(\)"):
        dropped({1}, set(), ["0x7"], "optimizer step")
