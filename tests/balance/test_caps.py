"""One token cap per rank: devices of unlike memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance import (
    Collation,
    Planner,
    least_cost,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    with_speeds,
)
from tests.balance.test_planner import LENGTHS

many = settings(deadline=None, max_examples=150, derandomize=True)
KINDS = st.sampled_from(["packed", "apart", "padded", "stacked"])
COSTS = {
    "plain": lambda ranks: quadratic(),
    "overhead": lambda ranks: quadratic(constant=3000),
    "dense": lambda ranks: quadratic(constant=3000, dense=True),
    "speeds": lambda ranks: with_speeds(
        quadratic(constant=500), [1 / (1 + rank % 3) for rank in range(ranks)]
    ),
}


@many
@given(LENGTHS, st.integers(1, 6), KINDS, st.sampled_from(sorted(COSTS)), st.data())
def test_samples_run_only_where_they_fit(
    lengths: list[int], ranks: int, kind: Any, cost: str, data: st.DataObject
) -> None:
    largest = max(lengths)
    caps = data.draw(st.lists(st.integers(1, 2 * largest), min_size=ranks, max_size=ranks))
    caps[data.draw(st.integers(0, ranks - 1))] = largest + data.draw(st.integers(0, largest))
    collation, model = Collation(kind), COSTS[cost](ranks)
    plan = plan_minibatch(lengths, ranks, caps, cost=model, collation=collation)
    assert sorted(i for rank in plan for own in rank for i in own) == list(range(len(lengths)))
    for rank, cap in zip(plan, caps, strict=True):
        assert all(collation.tokens([lengths[i] for i in own]) <= cap for own in rank)
    assert plan == plan_minibatch(lengths, ranks, np.array(caps), cost=model, collation=collation)
    found = on_demand_cost(plan, lengths, model, collation=collation)
    assert found >= least_cost(lengths, ranks, model, caps, collation=collation) * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro"])
def test_equal_caps_are_one_cap(kind: Any, policy: Any) -> None:
    lengths = np.random.default_rng(0).integers(10, 2000, 24)
    options: dict[str, Any] = {"policy": policy, "cost": quadratic(constant=64), "collation": Collation(kind)}
    assert plan_minibatch(lengths, 3, [4000] * 3, **options) == plan_minibatch(lengths, 3, 4000, **options)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_rank_with_a_larger_cap_packs_more(kind: Any) -> None:
    plan = plan_minibatch([50] * 12, 2, [200, 50], cost=quadratic(constant=100), collation=Collation(kind))
    assert {len(own) for own in plan[1]} == {1}
    assert max(len(own) for own in plan[0]) == 4
    assert sum(map(len, plan[0])) > sum(map(len, plan[1]))


def test_long_samples_on_the_only_large_rank_are_levelled_by_short_ones() -> None:
    lengths = [900, 800] + [100] * 17
    plan = plan_minibatch(lengths, 2, [200, 1000], cost="tokens")
    assert sorted(i for own in plan[0] for i in own) == list(range(2, 19))
    assert on_demand_cost(plan, lengths, "tokens") == 1700


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": [9, 9, 9]}, r"max_tokens has 3 caps for 2 ranks.*max_tokens=\[9, 9\].*max_tokens=9"),
    ({"max_tokens": []}, r"max_tokens has 0 caps for 2 ranks"),
    (
        {"max_tokens": [4, 3]},
        r"sample 0 has 5 tokens, more than 4, the largest cap.*write max_tokens=\[5, 3\]",
    ),
    ({"max_tokens": [5, 0]}, r"max_tokens must be a whole number of at least 1, got 0"),
    (
        {"max_tokens": [5, 6], "policy": "lb_micro"},
        r"any microbatch.*write policy=\"lb_mini\", or max_tokens=5",
    ),
    ({"max_tokens": [5, 6], "policy": "steal"}, r"write policy=\"lb_mini\""),
    ({"max_tokens": [5, 6], "policy": "local_sort"}, r"write policy=\"lb_mini\""),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_refusals_show_the_right_line(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"lengths": [5, 4, 3, 2], "num_ranks": 2}
    plan_minibatch(**good)
    with pytest.raises(ValueError, match=message):
        plan_minibatch(**(good | change))


def test_a_planner_keeps_the_cap_of_all_samples() -> None:
    planner = Planner(2, collation=Collation("padded", 8)).capped_for([5, 99])
    assert planner.max_tokens == 104
    assert Planner(2, [50, 60]).capped_for([5, 59]).max_tokens == [50, 60]
    with pytest.raises(ValueError, match="sample 1 has 61 tokens"):
        Planner(2, [50, 60]).capped_for([5, 61])
