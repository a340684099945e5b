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
    observe(cap, [out(1000, samples=1)], [], [])
    assert cap.value == [1160, 1160, 1200], "no cap helps a sample that does not fit alone"
    assert cap.ran_out == 5


def test_plans_made_before_that_run_out_too_change_nothing_more() -> None:
    for cap, least, other_rank, expected in (
        (1000, 100, [out(990)], 792),
        (1000, 900, [], 900),  # it stays above the longest sample
        ([1000, 500], 900, [out(500)], [900, 400]),  # which fits on rank 0
    ):
        own = DelayedCap(2, cap, least)
        for _ in range(3):
            observe(own, [out(1000)], other_rank)
            assert own.value == expected


def test_equal_reports_give_equal_caps_and_a_state_goes_on() -> None:
    first, second = DelayedCap(2, 1000, 10), DelayedCap(2, 1000, 10)
    assert first.values() == {"memory/max_tokens": 1000, "memory/ran_out": 0}
    observe(first, [], [out(1000)])
    second.load_state_dict(first.state_dict())
    for cap in (first, second):
        observe(cap, [out(700)], [])
        assert cap.values() == {"memory/max_tokens": 560, "memory/ran_out": 2}
    assert first.state_dict() == second.state_dict()
    for other, message in (
        (DelayedCap(3, 1000, 10), "2 ranks, and there are 3"),
        (DelayedCap(2, 900, 10), "began"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(first.state_dict())
        assert other.ran_out == 0


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


MEASURED = RunInfo(dense=False, measured=True)


def loader(max_tokens: Any, info: RunInfo = MEASURED, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"minibatch_size": 8, "num_replicas": 1, "rank": 0, "lengths": LENGTHS}
    samples = [list(range(length)) for length in LENGTHS]
    own = BalancedDataLoader(samples, max_tokens=max_tokens, collate_fn=list, **{**defaults, **options})
    own.adapt(info)
    return own


def test_any_cap_of_a_loader_falls_and_a_resumed_run_has_it() -> None:
    for max_tokens, expected in (
        (36, 28),
        (None, 9),
        ([36], [28]),
    ):
        own = loader(max_tokens)
        minibatches = iter(own)
        for number in range(3):
            minibatch = next(minibatches)
            assert isinstance(minibatch, Minibatch) and minibatch.origin is not None
            largest = max(sum(map(len, batch)) for batch in minibatch)
            assert ("memory" in own.state_dict()) == (number > 1), "nothing is learnt before"
            assert minibatch.origin.cap is not None
            minibatch.origin.cap.observe([[number, [[36, 4]]] if number == 1 else None])
        assert own.max_tokens == expected
        assert largest <= (28 if max_tokens else 9)
        state = own.state_dict()
        resumed, other = loader(max_tokens), loader(30)
        resumed.load_state_dict(state)
        assert resumed.max_tokens == expected
        assert resumed.plan(1, 1).text == own.plan(1, 1).text
        with pytest.warns(UserWarning, match=r"What max_tokens had learnt is not taken over: it began with"):
            other.load_state_dict(state)
        assert other.max_tokens == 30
        assert own.memory_values == {"memory/max_tokens": 28 if max_tokens else 9, "memory/ran_out": 1}
        own.adapt(MEASURED)
        assert own.max_tokens == (max_tokens or 9), "another fit may be of another model"


def test_caps_that_stay() -> None:
    for options in (
        {"unroll": True, "policy": "lb_micro"},
        {"lengths": [(length, 1) for length in LENGTHS]},
        {"info": RunInfo(dense=False, repeats=True)},
    ):
        own = loader(None, **options)
        assert own.max_tokens in (9, (9, 1))
        assert own.memory_values == {}
