"""One token cap per rank: devices of unlike memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_odc.balance import (
    Collation,
    Planner,
    on_demand_cost,
    plan_minibatch,
    quadratic,
)
from tests.support.refusals import assert_refused


def test_equal_caps_are_one_cap() -> None:
    for policy in (
        "lb_mini",
        "lb_micro",
    ):
        for kind in (
            "packed",
            "padded",
        ):
            lengths = np.random.default_rng(0).integers(10, 2000, 24)
            options: dict[str, Any] = {
                "policy": policy,
                "cost": quadratic(constant=64),
                "collation": Collation(kind),
            }
            assert plan_minibatch(lengths, 3, [4000] * 3, **options) == plan_minibatch(
                lengths, 3, 4000, **options
            )


def test_a_rank_with_a_larger_cap_packs_more() -> None:
    for kind in (
        "packed",
        "padded",
    ):
        plan = plan_minibatch(
            [50] * 12, 2, [200, 50], cost=quadratic(constant=100), collation=Collation(kind)
        )
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


def test_refusals_show_the_right_line() -> None:
    good: dict[str, Any] = {"lengths": [5, 4, 3, 2], "num_ranks": 2}
    plan_minibatch(**good)
    assert_refused(lambda change: plan_minibatch(**(good | change)), WRONG)


def test_a_planner_keeps_the_cap_of_all_samples() -> None:
    planner = Planner(2, collation=Collation("padded", 8)).capped_for([5, 99])
    assert planner.max_tokens == 104
    assert Planner(2, [50, 60]).capped_for([5, 59]).max_tokens == [50, 60]
    with pytest.raises(ValueError, match="sample 1 has 61 tokens"):
        Planner(2, [50, 60]).capped_for([5, 61])
