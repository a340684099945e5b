"""Caps that follow the memory of microbatches: pure functions of what was measured, and plans that use them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from lightning_odc import BalancedDataLoader
from lightning_odc.data.memory_cap import LaggedCap, MemoryCap, MemoryUse, RanOut
from lightning_odc.data.minibatch import Minibatch

GB = 10**9
BASE, USABLE = 10 * GB, 80 * GB


def linear(tokens: int) -> int:
    return BASE + tokens * GB // 512


def dense(tokens: int) -> int:
    """As in eager attention over a packed row."""
    return BASE + tokens * tokens * 4


def use(tokens: int, takes: Callable[[int], int] = linear, usable: int = USABLE) -> MemoryUse:
    return MemoryUse(tokens, BASE, takes(tokens), usable)


def out(tokens: int, samples: int = 2) -> RanOut:
    return RanOut(tokens, samples)


def run(
    cap: MemoryCap, steps: int, takes: Callable[[int], int], usable: tuple[int, ...] = (USABLE,)
) -> list[Any]:
    """Every rank fills its cap; the caps that follow."""
    found = []
    for _ in range(steps):
        cap.observe([use(own, takes, free) for own, free in zip(cap.caps, usable, strict=True)])
        found.append(cap.value)
    return found


@pytest.mark.parametrize("takes", [linear, dense, lambda tokens: BASE + GB])
def test_it_rises_to_what_fits_and_never_above(takes: Callable[[int], int]) -> None:
    caps = run(MemoryCap(1, 1000, 900, apart=True), 40, takes)
    assert caps[:2] == [1000, 1000], "not by a single minibatch"
    for before, after in pairwise(caps):
        assert before <= after <= 2 * before
    assert takes(caps[-1]) <= 0.9 * USABLE
    if takes is not linear and takes is not dense:
        return
    assert takes(caps[-1]) > 0.8 * USABLE, "most of it is used"
    assert len(set(caps)) < 10


def test_it_falls_at_once_where_the_margin_is_touched() -> None:
    cap = MemoryCap(2, 40_000, 900, apart=False)
    cap.observe([use(39_000), use(20_000)])
    assert cap.value == 39_000 * 62 * 512 // 39_000
    assert linear(cap.caps[0]) <= 0.9 * USABLE


def test_it_never_falls_below_the_longest_sample() -> None:
    cap = MemoryCap(1, 1000, 900, apart=True)
    cap.observe([MemoryUse(1000, 79 * GB, 80 * GB, USABLE)])
    assert cap.value == 900


def test_short_microbatches_tell_nothing() -> None:
    cap = MemoryCap(2, 1000, 900, apart=False)
    for _ in range(5):
        cap.observe([use(1000), use(700)])
        cap.observe([use(1000), None])
    assert cap.value == 1000
    cap.observe([None, MemoryUse(10, 70 * GB, 73 * GB, USABLE)])  # something else took it
    assert 500 < cap.caps[0] < 1000


@pytest.mark.parametrize(("apart", "expected"), [(True, [2000, 800]), (False, [800, 800])])
def test_unlike_devices_have_unlike_caps_where_plans_allow_it(apart: bool, expected: Any) -> None:
    cap = MemoryCap(2, 1000, 500, apart=apart)
    small = BASE + 2 * GB
    for _ in range(3):
        cap.observe([use(1000), MemoryUse(1000, BASE, BASE + GB, small)])
    assert cap.caps == expected


def test_small_changes_leave_plans_alone() -> None:
    cap = MemoryCap(1, 31_000, 900, apart=True)
    assert set(run(cap, 20, linear)) == {31_000}


def test_equal_measurements_give_equal_caps_and_a_state_goes_on() -> None:
    first, second = MemoryCap(2, 1000, 900, True), MemoryCap(2, 1000, 900, True)
    usable = (USABLE, USABLE // 2)
    run(first, 4, linear, usable)
    second.load_state_dict(first.state_dict())
    assert run(first, 20, linear, usable) == run(second, 20, linear, usable)
    with pytest.raises(ValueError, match="2 ranks, and there are 3"):
        MemoryCap(3, 1000, 900, True).load_state_dict(first.state_dict())


# -- after running out -----------------------------------------------------------------------------------------


def test_a_cap_falls_below_what_ran_out_on_all_ranks_that_had_it() -> None:
    cap = MemoryCap(3, [4000, 4000, 1500], 1000, apart=True, rises=False)
    cap.observe([None] * 3, [[], [out(3000)], []])
    assert cap.value == [2400, 2400, 1500]
    cap.observe([None] * 3, [[], [], [out(0)]])
    assert cap.value == [2400, 2400, 1200], "not known: that of a full microbatch"
    cap.observe([None] * 3, [[out(2900), out(1450)], [], []])
    assert cap.value == [1160, 1160, 1200], "two microbatches"
    assert cap.ran_out == 4
    cap.observe([None] * 3, [[out(1000, samples=1)], [], []])
    assert (cap.value, cap.ran_out) == ([1160, 1160, 1200], 5), (
        "no cap helps a sample that does not fit alone"
    )


def test_plans_made_before_that_run_out_too_change_nothing_more() -> None:
    cap = MemoryCap(2, 1000, 100, apart=False, rises=False)
    for _ in range(3):
        cap.observe([None, None], [[out(1000)], [out(990)]])
    assert cap.value == 792


def test_a_cap_stays_above_the_longest_sample() -> None:
    cap = MemoryCap(2, 1000, 900, apart=False, rises=False)
    cap.observe([None, None], [[out(950)], []])
    assert cap.value == 900
    unlike = MemoryCap(2, [1000, 500], 900, apart=True, rises=False)
    unlike.observe([None, None], [[out(1000)], [out(500)]])
    assert unlike.value == [900, 400], "the longest sample fits on rank 0"


def test_a_number_of_the_users_never_rises() -> None:
    cap = MemoryCap(1, 1000, 10, apart=True, rises=False)
    cap.observe([None], [[out(1000)]])
    assert set(run(cap, 100, linear)) == {800}


def test_a_measured_cap_rises_again_after_a_while_and_not_to_what_ran_out() -> None:
    cap = MemoryCap(1, 10_000, 900, apart=True)
    cap.observe([use(10_000)], [[out(10_000)]])
    assert cap.value == 8000
    caps = run(cap, 200, linear)
    assert caps[:62] == [8000] * 62
    assert set(caps[62:]) == {8000, 9000}
    assert caps[-1] == 9000, "though 31,000 would fit, by what is measured"


def test_a_full_memory_lowers_a_cap_that_has_fallen_at_once() -> None:
    cap = MemoryCap(1, 31_000, 900, apart=True)
    cap.observe([None], [[out(31_000)]])
    cap.observe([MemoryUse(24_800, BASE, 79 * GB, USABLE)])
    assert cap.caps[0] < 24_800


def test_equal_records_give_equal_caps_and_a_state_goes_on_after_running_out() -> None:
    first, second = MemoryCap(2, 1000, 10, True), MemoryCap(2, 1000, 10, True)
    first.observe([use(1000), use(1000)], [[], [out(1000)]])
    run(first, 60, linear, (USABLE, USABLE))
    second.load_state_dict(first.state_dict())
    caps = run(first, 20, linear, (USABLE, USABLE))
    assert caps == run(second, 20, linear, (USABLE, USABLE))
    assert caps[0] == 800 and caps[-1] == 900


@pytest.mark.parametrize(
    ("given", "rises", "message"),
    [(900, False, r"began with \[1000\]"), (1000, True, r"began with \[1000\]")],
)
def test_what_was_learnt_is_left_where_the_user_has_chosen_another_cap(
    given: int, rises: bool, message: str
) -> None:
    before = MemoryCap(1, 1000, 10, True, rises=rises)
    before.observe([None], [[out(500)]])
    now = MemoryCap(1, given, 10, True, rises=False)
    with pytest.raises(ValueError, match=message):
        now.load_state_dict(before.state_dict())
    assert now.value == given


def test_what_is_logged() -> None:
    cap = MemoryCap(2, 1000, 10, True)
    assert cap.values() == {"memory/max_tokens": 1000, "memory/ran_out": 0}
    cap.observe([MemoryUse(900, 0, 50, 100), MemoryUse(900, 0, 70, 100)], [[], [out(900)]])
    assert cap.values() == {"memory/max_tokens": 720, "memory/ran_out": 1, "memory/used_fraction": 0.7}


def test_plans_use_what_was_known_some_minibatches_before() -> None:
    lagged = LaggedCap(MemoryCap(1, 1000, 900, True))
    lagged.lag = 2
    for number in range(4):
        assert lagged.begin() == number
        assert lagged.at(number) == 1000
        lagged.observe([[number, [*use(1000)], []]])
    assert lagged.cap.value == 2000
    assert [lagged.at(number) for number in (4, 5)] == [2000, 2000]
    lagged.observe([None])
    other = LaggedCap(MemoryCap(1, 1000, 900, True))
    other.load_state_dict(lagged.state_dict())
    other.lag = 2
    assert (other.at(4), other.begun) == (lagged.at(4), lagged.begun)


# -- in a loader -----------------------------------------------------------------------------------------------

LENGTHS = [9, 7, 8, 5, 6, 4, 9, 3] * 8


def loader(max_tokens: Any = "auto", **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"minibatch_size": 8, "num_replicas": 1, "rank": 0, "collate_fn": list}
    return BalancedDataLoader(
        [list(range(length)) for length in LENGTHS],
        max_tokens=max_tokens,
        **{"lengths": LENGTHS, **defaults, **options},
    )


def adapt(
    loader: BalancedDataLoader, measures_memory: bool = True, begins: bool = True
) -> BalancedDataLoader:
    loader.adapt(
        prior=None,
        dense=False,
        measured=True,
        minibatches_per_step=1,
        measures_memory=measures_memory,
        begins=begins,
    )
    return loader


def train(own: BalancedDataLoader, steps: int) -> list[int]:
    """The tokens of the largest microbatch of some minibatches, half of the memory used by nine tokens."""
    found: list[int] = []
    for minibatch in own:
        assert isinstance(minibatch, Minibatch)
        assert minibatch.origin is not None
        cap, number = minibatch.origin.cap, minibatch.origin.number
        largest = max(sum(map(len, batch)) for batch in minibatch)
        found.append(largest)
        if cap is not None:
            cap.observe([[number, [largest, 0, largest * 10, 400], []]])
        if len(found) == steps:
            break
    return found


def test_a_loader_follows_the_memory() -> None:
    own = adapt(loader())
    largest = train(own, 8)
    assert largest[:3] == [9, 9, 9]
    assert largest[3:6] == [18, 18, 18]
    assert own.max_tokens == 25, "18 * sqrt(360 / 180)"
    assert own.follows_memory
    state = own.state_dict()
    resumed = adapt(loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
        assert resumed.max_tokens == 25
    assert resumed.plan(1, 1).text == own.plan(1, 1).text
    again = adapt(loader())
    again.load_state_dict(state)
    assert train(resumed, 3) == train(again, 3)
    adapt(own, begins=False)
    assert own.max_tokens > 18  # type: ignore[operator]
    adapt(own)
    assert own.max_tokens == 9, "another fit may be of another model"


@pytest.mark.parametrize(
    ("options", "measures"),
    [
        ({"max_tokens": None}, True),
        ({"max_tokens": 18}, True),
        ({}, False),
        ({"unroll": True, "policy": "lb_micro"}, True),
    ],
)
def test_it_is_asked_for_and_needs_somebody_who_measures(options: dict[str, Any], measures: bool) -> None:
    own = adapt(loader(**options), measures)
    assert not own.follows_memory
    assert own.max_tokens == (options.get("max_tokens") or 9)


@pytest.mark.parametrize(("max_tokens", "expected"), [(36, 28), (None, 9), ([36], [28])])
def test_any_cap_of_a_loader_falls_and_a_resumed_run_has_it(max_tokens: Any, expected: Any) -> None:
    own = adapt(loader(max_tokens), measures_memory=False)
    minibatches = iter(own)
    for _ in range(3):
        largest, minibatch = 0, next(minibatches)
        assert isinstance(minibatch, Minibatch) and minibatch.origin is not None
        largest = max(sum(map(len, batch)) for batch in minibatch)
        ran_out = [[36, 4]] if minibatch.origin.number == 1 else []
        assert ("memory" in own.state_dict()) == (minibatch.origin.number > 1), "nothing is learnt before"
        assert minibatch.origin.cap is not None
        minibatch.origin.cap.observe([[minibatch.origin.number, None, ran_out]] if ran_out else [None])
    assert own.max_tokens == expected
    assert largest <= (28 if max_tokens else 9)
    state = own.state_dict()
    resumed = adapt(loader(max_tokens), measures_memory=False)
    resumed.load_state_dict(state)
    assert resumed.max_tokens == expected
    assert resumed.plan(1, 1).text == own.plan(1, 1).text
    other = adapt(loader(30), measures_memory=False)
    with pytest.warns(UserWarning, match=r"What max_tokens had learnt is not taken over: it began with"):
        other.load_state_dict(state)
    assert other.max_tokens == 30
    assert own.memory_values == {"memory/max_tokens": 28 if max_tokens else 9, "memory/ran_out": 1}
    adapt(own, measures_memory=False)
    assert own.max_tokens == (max_tokens or 9), "another fit may be of another model"


@pytest.mark.parametrize(
    "changes",
    [{"unroll": True, "policy": "lb_micro"}, {"lengths": [(length, 1) for length in LENGTHS]}],
    ids=["unrolled", "several numbers"],
)
def test_caps_that_stay(changes: dict[str, Any]) -> None:
    own = adapt(loader(None, **changes))
    assert own.memory_values == {}
    fixed = loader(None)
    fixed.adapt(prior=None, dense=False, measured=False, minibatches_per_step=1, repeats=True)
    assert fixed.max_tokens == 9
    assert fixed.memory_values == {}, "runs that must be bit-equal"
