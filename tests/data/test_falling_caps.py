"""Caps that fall when a microbatch has run out of memory, and plans that use them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_odc import BalancedDataLoader
from lightning_odc.data.learning import DelayedCap
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import RunInfo


def out(tokens: int, samples: int = 2) -> list[int]:
    return [tokens, samples]


def observe(cap: DelayedCap, *ran_out: list[list[int]]) -> None:
    """What ran out in a step, by rank."""
    cap.observe([[0, own] if own else None for own in ran_out])


def test_a_cap_falls_below_what_ran_out_on_all_ranks_that_had_it() -> None:
    cap = DelayedCap(3, [4000, 4000, 1500], 1000)
    observe(cap, [], [out(3000)], [])
    assert cap.value == [2400, 2400, 1500]
    observe(cap, [], [], [out(0)])
    assert cap.value == [2400, 2400, 1200], "not known: that of a full microbatch"
    observe(cap, [out(2900), out(1450)], [], [])
    assert cap.value == [1160, 1160, 1200], "two microbatches"
    assert cap.ran_out == 4
    observe(cap, [out(1000, samples=1)], [], [])
    assert (cap.value, cap.ran_out) == ([1160, 1160, 1200], 5), (
        "no cap helps a sample that does not fit alone"
    )


def test_plans_made_before_that_run_out_too_change_nothing_more() -> None:
    cap = DelayedCap(2, 1000, 100)
    for _ in range(3):
        observe(cap, [out(1000)], [out(990)])
    assert cap.value == 792


def test_a_cap_stays_above_the_longest_sample() -> None:
    cap = DelayedCap(2, 1000, 900)
    observe(cap, [out(950)], [])
    assert cap.value == 900
    unlike = DelayedCap(2, [1000, 500], 900)
    observe(unlike, [out(1000)], [out(500)])
    assert unlike.value == [900, 400], "the longest sample fits on rank 0"


def test_equal_reports_give_equal_caps_and_a_state_goes_on() -> None:
    first, second = DelayedCap(2, 1000, 10), DelayedCap(2, 1000, 10)
    observe(first, [], [out(1000)])
    second.load_state_dict(first.state_dict())
    for cap in (first, second):
        observe(cap, [out(700)], [])
    assert first.value == second.value == 560
    assert first.state_dict() == second.state_dict()
    with pytest.raises(ValueError, match="2 ranks, and there are 3"):
        DelayedCap(3, 1000, 900).load_state_dict(first.state_dict())


def test_what_was_learnt_is_left_where_the_user_has_chosen_another_cap() -> None:
    before, now = DelayedCap(1, 1000, 10), DelayedCap(1, 900, 10)
    observe(before, [out(500)])
    with pytest.raises(ValueError, match=r"began with \[1000\]"):
        now.load_state_dict(before.state_dict())
    assert now.value == 900


def test_what_is_logged() -> None:
    cap = DelayedCap(2, 1000, 10)
    assert cap.values() == {"memory/max_tokens": 1000, "memory/ran_out": 0}
    observe(cap, [], [out(900)])
    assert cap.values() == {"memory/max_tokens": 720, "memory/ran_out": 1}


def test_plans_use_what_was_known_some_minibatches_before() -> None:
    cap = DelayedCap(1, 1000, 10)
    cap.lag = 2
    for number in range(2):
        assert cap.begin() == number
        assert cap.at(number) == 1000
        cap.observe([[number, [out(1000)]]])
    assert [cap.at(number) for number in (2, 3, 4)] == [800, 800, 800]
    cap.observe([None])
    other = DelayedCap(1, 1000, 10)
    other.load_state_dict(cap.state_dict())
    other.lag = 2
    assert (other.at(4), other.begun) == (cap.at(4), cap.begun)


# -- in a loader -----------------------------------------------------------------------------------------------

LENGTHS = [9, 7, 8, 5, 6, 4, 9, 3] * 8


def loader(max_tokens: Any, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"minibatch_size": 8, "num_replicas": 1, "rank": 0, "collate_fn": list}
    return BalancedDataLoader(
        [list(range(length)) for length in LENGTHS],
        max_tokens=max_tokens,
        **{"lengths": LENGTHS, **defaults, **options},
    )


def adapt(loader: BalancedDataLoader) -> BalancedDataLoader:
    loader.adapt(RunInfo(dense=False, measured=True))
    return loader


@pytest.mark.parametrize(("max_tokens", "expected"), [(36, 28), (None, 9), ([36], [28])])
def test_any_cap_of_a_loader_falls_and_a_resumed_run_has_it(max_tokens: Any, expected: Any) -> None:
    own = adapt(loader(max_tokens))
    minibatches = iter(own)
    for _ in range(3):
        largest, minibatch = 0, next(minibatches)
        assert isinstance(minibatch, Minibatch) and minibatch.origin is not None
        largest = max(sum(map(len, batch)) for batch in minibatch)
        ran_out = [[36, 4]] if minibatch.origin.number == 1 else []
        assert ("memory" in own.state_dict()) == (minibatch.origin.number > 1), "nothing is learnt before"
        assert minibatch.origin.cap is not None
        minibatch.origin.cap.observe([[minibatch.origin.number, ran_out]] if ran_out else [None])
    assert own.max_tokens == expected
    assert largest <= (28 if max_tokens else 9)
    state = own.state_dict()
    resumed = adapt(loader(max_tokens))
    resumed.load_state_dict(state)
    assert resumed.max_tokens == expected
    assert resumed.plan(1, 1).text == own.plan(1, 1).text
    other = adapt(loader(30))
    with pytest.warns(UserWarning, match=r"What max_tokens had learnt is not taken over: it began with"):
        other.load_state_dict(state)
    assert other.max_tokens == 30
    assert own.memory_values == {"memory/max_tokens": 28 if max_tokens else 9, "memory/ran_out": 1}
    adapt(own)
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
    fixed.adapt(RunInfo(dense=False, repeats=True))
    assert fixed.max_tokens == 9
    assert fixed.memory_values == {}, "runs that must be bit-equal"
