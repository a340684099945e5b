"""Plans of one minibatch: what every policy promises, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance import (
    COLLECTIVE_SAFE,
    POLICIES,
    Collation,
    Plan,
    collective_cost,
    least_cost,
    microbatch_costs,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    with_speeds,
)
from lightning_odc.balance.search import TOLERANCE
from tests.support.refusals import assert_refused


@st.composite
def some_lengths(draw: st.DrawFn) -> list[int]:
    """Lists that hypothesis shrinks, and long-tailed ones, which it would not find."""
    if draw(st.booleans()):
        return draw(st.lists(st.one_of(st.integers(1, 64), st.integers(1, 70_000)), min_size=1, max_size=40))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    drawn = np.clip(rng.lognormal(8, draw(st.floats(0.1, 2)), draw(st.integers(1, 60))), 1, 70_000)
    return drawn.astype(int).tolist()


LENGTHS = some_lengths()
RANKS = st.integers(1, 9)
PACKED = Collation()
COLLATIONS = st.one_of(
    st.sampled_from([PACKED, Collation("apart")]),
    st.builds(Collation, st.sampled_from(["padded", "stacked"]), st.sampled_from([1, 8, 512])),
    st.builds(lambda fixed: Collation("padded", fixed=fixed), st.integers(1, 3000)),
)
many = settings(deadline=None, max_examples=150, derandomize=True)


def cost_named(name: str, ranks: int) -> Any:
    speeds = [1 / (1 + rank % 3) for rank in range(ranks)]
    overhead = quadratic(constant=3000)
    return {
        "tokens": "tokens",
        "quadratic": "quadratic",
        "overhead": overhead,
        "function": lambda lengths: lengths**1.5,
        "falling": lambda lengths: 1 / lengths,
        "speeds": with_speeds("quadratic", speeds),
        "speeds and overhead": with_speeds(quadratic(constant=3000), speeds),
        "dense": quadratic(constant=3000, dense=True),
        "dense and speeds": with_speeds(quadratic(dense=True), speeds),
    }[name]


COSTS = st.sampled_from(
    ["tokens", "quadratic", "overhead", "function", "falling", "speeds", "speeds and overhead"]
)


def check(plan: Plan, lengths: list[int], cap: int, collation: Collation = PACKED) -> None:
    """Every sample is in one microbatch, which is not above the cap."""
    flat = [sample for rank in plan for microbatch in rank for sample in microbatch]
    assert sorted(flat) == list(range(len(lengths)))
    for sample in flat:
        assert type(sample) is int
    rows = collation.row_lengths(lengths)
    for rank in plan:
        for own in rank:
            assert collation.tokens([lengths[i] for i in own]) <= cap
            if collation.kind == "stacked":
                assert len(set(rows[own].tolist())) <= 1


@pytest.mark.slow
@settings(many, max_examples=400)
@given(LENGTHS, RANKS, COSTS, st.sampled_from(POLICIES), COLLATIONS, st.sampled_from([1.0, 1.4, 4.0]))
def test_every_sample_once_under_the_cap_and_in_step_for_collectives(
    lengths: list[int],
    ranks: int,
    cost: str,
    policy: Any,
    collation: Collation,
    room: float,
) -> None:
    most = int(max(collation.row_lengths(lengths)))
    model = cost_named(cost, ranks)
    options: dict[str, Any] = {"cost": model, "collation": collation}
    cap = int(room * most)
    plan = plan_minibatch(lengths, ranks, cap, policy, **options)
    check(plan, lengths, cap, collation)
    for same in (np.array(lengths, dtype=np.float32), torch.tensor(lengths)):
        assert plan == plan_minibatch(same, ranks, cap, policy, **options)
    found = on_demand_cost(plan, lengths, model, collation=collation)
    assert found >= least_cost(lengths, ranks, model, cap, collation=collation) * (1 - 1e-9)
    if policy in COLLECTIVE_SAFE:
        counts = [sum(map(len, rank)) for rank in plan]
        assert max(counts) - min(counts) <= 1
        assert len({len(rank) for rank in plan}) == 1
        for rank in plan:
            for place in range(len(rank)):
                if not rank[place]:
                    assert not any(rank[place:])
    else:
        for rank in plan:
            for own in rank:
                assert own
        for costs in microbatch_costs(plan, lengths, model, collation=collation):
            is_sorted = all(a >= b * (1 - 1e-12) for a, b in pairwise(costs))
            if cost != "falling":
                assert is_sorted, "the largest first"


def test_local_sort_deals_in_turn_and_few_samples_leave_some_ranks_without_work() -> None:
    assert plan_minibatch([5, 40, 7, 10, 6, 30], 2, policy="local_sort") == [[[2], [4], [0]], [[1], [5], [3]]]
    assert sorted(plan_minibatch([30, 20], 4)) == [[], [], [[0]], [[1]]]
    faster = plan_minibatch([30, 20], 4, cost=with_speeds("tokens", [0.1, 1, 0.1, 2]))
    assert faster == [[], [[1]], [], [[0]]]


def test_where_no_room_is_found_the_costliest_microbatches_are_split() -> None:
    for seed in (65, 189):  # some rank's samples do not fit beside the others' microbatches
        lengths = np.random.default_rng(seed).integers(1, 64, 72).tolist()
        cost = with_speeds(quadratic(4000, constant=64, dense=True), [2.0, 1.25, 0.91, 2.0])
        plan = plan_minibatch(lengths, 4, 120, "lb_micro", cost)
        check(plan, lengths, 120)
        assert {sum(map(len, rank)) for rank in plan} == {18}
        assert len({len(rank) for rank in plan}) == 1
        for rank in plan:
            for own in rank:
                assert own


@many
@given(LENGTHS, RANKS, st.sampled_from(["lb_mini", "lb_micro"]), st.sampled_from(["packed", "padded"]))
def test_the_unit_of_the_cost_does_not_matter(lengths: list[int], ranks: int, policy: Any, kind: Any) -> None:
    options: dict[str, Any] = {"collation": Collation(kind)}
    plans = [
        plan_minibatch(lengths, ranks, None, policy, lambda x, u=unit: (x + x * x / 4096) * u, **options)
        for unit in (1.0, 2.0**-40, 2.0**30)
    ]
    assert plans[0] == plans[1] == plans[2]


@many
@given(st.lists(st.integers(1, 70_000), min_size=2, max_size=24), st.integers(2, 6))
def test_balancing_is_no_worse_than_not_balancing(lengths: list[int], ranks: int) -> None:
    lengths = lengths * ranks
    plain = plan_minibatch(lengths, ranks, policy="local_sort")
    mini = plan_minibatch(lengths, ranks)
    assert on_demand_cost(mini, lengths) <= on_demand_cost(plain, lengths) * (1 + TOLERANCE)
    micro = plan_minibatch(lengths, ranks, policy="lb_micro")
    assert collective_cost(micro, lengths) <= collective_cost(plain, lengths) * (1 + TOLERANCE)


@many
@given(LENGTHS, RANKS, st.sampled_from(["lb_mini", "lb_micro"]), st.sampled_from([0, 100, 3000, 10**6]))
def test_knowing_of_dense_attention_does_not_hurt(lengths, ranks, policy, constant):
    if policy == "lb_micro":
        lengths = lengths * ranks
    dense = quadratic(constant=constant, dense=True)
    span = collective_cost
    if policy == "lb_mini":
        span = on_demand_cost
    knowing = span(plan_minibatch(lengths, ranks, None, policy, dense), lengths, dense)
    blind = plan_minibatch(lengths, ranks, None, policy, quadratic(constant=constant))
    # In step, the search stops within a thousandth of the bound.
    bound = 1.001
    if policy == "lb_mini":
        bound = 1.02
    assert knowing <= span(blind, lengths, dense) * bound


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [5, 0, 3]}, r"sample 1 has length 0\. .*leave empty samples out"),
    ({"lengths": []}, r"at least one sample"),
    ({"max_tokens": 4}, r"sample 0 has 5 tokens, more than max_tokens=4.*write max_tokens=5"),
    ({"max_tokens": 0}, r"max_tokens=0\) cannot work"),
    ({"num_ranks": 0}, r"num_ranks=0\) cannot work. Write num_ranks=8"),
    ({"policy": "lb-mini"}, r"policy=.lb-mini.\) cannot work. Write policy=.local_sort., .lb_micro"),
    ({"cost": "cubic"}, r"cost='cubic' is unknown.*transformer\(model.config\)"),
    ({"cost": 3}, r"cost=3 is not a cost"),
    ({"cost": lambda x: x[:1]}, r"shape \[1\] for 3 samples"),
    ({"cost": lambda x: x * 0}, r"cost of sample 0 \(5 tokens\) is 0.0.*must be positive"),
    ({"cost": with_speeds("tokens", [1, 1, 1])}, r"3 speeds, and there are 2 ranks"),
]


def test_refusals_show_the_right_line() -> None:
    good: dict[str, Any] = {"lengths": [5, 4, 3], "num_ranks": 2}
    plan_minibatch(**good)
    assert_refused(lambda change: plan_minibatch(**(good | change)), WRONG)
    with pytest.raises(ValueError, match="is longer"):
        collective_cost([[[0]], [[1], [2]]], [5, 5, 5])


def test_the_planner_needs_numpy_only() -> None:
    script = (
        "import sys, types\n"
        "package = types.ModuleType('lightning_odc')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['lightning_odc'] = package\n"
        "import lightning_odc.balance\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'scipy', 'pandas'} & set(sys.modules)\n"
        "assert 'numpy' in sys.modules and not heavy, heavy\n"
    )
    package = Path(__file__).parents[2] / "lightning_odc"
    subprocess.run([sys.executable, "-c", script, str(package)], check=True)
