"""How many tokens a microbatch has, by what the collate_fn makes of it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from lightning_odc.balance import (
    Collation,
    Planner,
    average_costs,
    least_cost,
    microbatch_costs,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    with_speeds,
)
from tests.support.refusals import assert_refused

LENGTHS = [100, 90, 10]


def test_tokens_of_a_microbatch() -> None:
    for collation, alone, rows, words in (
        (Collation(), [100, 90, 10], [100, 90, 10], "packs samples into one row"),
        (Collation("apart"), [100, 90, 10], [100, 90, 10], "keeps samples apart"),
        (Collation("padded"), [100, 90, 10], [100, 100, 100], "pads to the longest sample"),
        (
            Collation("padded", 8),
            [104, 96, 16],
            [104, 104, 104],
            "pads to the longest sample, a multiple of 8",
        ),
        (Collation("padded", fixed=64), [64, 64, 64], [64, 64, 64], "pads to 64 tokens"),
        (Collation("stacked"), [100, 90, 10], [100, 100, 100], "stacks samples of equal length"),
    ):
        assert collation.row_lengths(np.array(LENGTHS)).tolist() == alone
        assert collation.rows(LENGTHS) == rows
        assert collation.tokens(LENGTHS) == sum(rows)
        assert collation.tokens([]) == 0
        assert collation.describe() == words


def test_a_padded_microbatch_costs_its_rows() -> None:
    cost = with_speeds(quadratic(crossover=100, constant=7.0, dense=True), [1, 0.5])
    plan = [[[0, 2]], [[1]]]
    assert microbatch_costs(plan, LENGTHS, cost, collation=Collation("padded")) == [
        [2 * (100 + 100**2 / 100) + 7],
        [2 * (90 + 90**2 / 100 + 7)],
    ]
    apart = microbatch_costs(plan, LENGTHS, cost, collation=Collation("apart"))
    assert apart[0] == pytest.approx([100 + 100 + 10 + 1 + 7])
    packed = microbatch_costs(plan, LENGTHS, cost)
    assert packed[0] == pytest.approx([100 + 100 + 10 + 1 + 7 + 2 * 100 * 10 / 100])
    average = average_costs(
        [np.array([100, 10])], quadratic(100, 7.0), 2, collation=Collation("padded", fixed=50)
    )
    assert average == [2 * (50 + 50**2 / 100) + 7]


def test_the_default_cap_is_the_longest_row() -> None:
    for policy in ("local_sort", "lb_micro", "lb_mini", "steal"):
        fixed = Collation("padded", fixed=64)
        plan = plan_minibatch([10, 20, 30, 100], 2, None, policy, quadratic(constant=1e4), collation=fixed)
        assert (
            plan_minibatch([10, 20, 30, 100], 2, 64, policy, quadratic(constant=1e4), collation=fixed) == plan
        )
        assert all(len(microbatch) == 1 for rank in plan for microbatch in rank)
        assert least_cost([10, 20], 1, "tokens", collation=fixed) == pytest.approx(128)


WRONG: list[tuple[Any, str]] = [
    (lambda: Collation(cast(Any, "padding")), r"kind='padding' is unknown; write one of 'packed', 'apart'"),
    (lambda: Collation("padded", 0), r"multiple must be a whole number of at least 1"),
    (lambda: Collation("padded", fixed=0), r"fixed must be a whole number of at least 1"),
    (
        lambda: Collation("packed", 8),
        r"pads nothing.*Collation\('padded', multiple=8.*or Collation\('packed'\)",
    ),
    (
        lambda: plan_minibatch([5], 1, collation=cast(Any, "padded")),
        r"collation='padded' is unknown: write collation=Collation\('padded'\)",
    ),
    (
        lambda: plan_minibatch([7, 9], 1, 15, collation=Collation("padded", 8)),
        r"sample 1 has 9 tokens, padded to 16, more than max_tokens=15.*write max_tokens=16",
    ),
    (
        lambda: plan_minibatch([7, 90], 1, 15, collation=Collation("padded", fixed=32)),
        r"sample 0 has 7 tokens, padded to 32, more than max_tokens=15",
    ),
]


def test_refusals_show_the_right_line() -> None:
    assert_refused(lambda wrong: wrong(), WRONG)


def test_long_samples_on_the_only_large_rank_are_levelled_by_short_ones() -> None:
    lengths = [900, 800] + [100] * 17
    plan = plan_minibatch(lengths, 2, [200, 1000], cost="tokens")
    assert sorted(i for own in plan[0] for i in own) == list(range(2, 19))
    assert on_demand_cost(plan, lengths, "tokens") == 1700


WRONG_CAPS: list[tuple[dict[str, Any], str]] = [
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
]


def test_refusals_of_caps_show_the_right_line() -> None:
    good: dict[str, Any] = {"lengths": [5, 4, 3, 2], "num_ranks": 2}
    plan_minibatch(**good)
    assert_refused(lambda change: plan_minibatch(**(good | change)), WRONG_CAPS)


def test_a_planner_keeps_the_cap_of_all_samples() -> None:
    planner = Planner(2, collation=Collation("padded", 8)).capped_for([5, 99])
    assert planner.max_tokens == 104
    rows = Planner(2, collation=Collation("padded", 8)).capped_for([(5, 0), (99, 0), (7, 3)])
    assert rows.max_tokens == (104, 3)
    assert Planner(2, [50, 60]).capped_for([5, 59]).max_tokens == [50, 60]
    with pytest.raises(ValueError, match="sample 1 has 61 tokens"):
        Planner(2, [50, 60]).capped_for([5, 61])
