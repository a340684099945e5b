"""Samples with rows of numbers: no cap is exceeded, the sum of costs is level, and one number is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance import (
    COLLECTIVE_SAFE,
    POLICIES,
    Collation,
    FittedCost,
    PolynomialCost,
    collective_cost,
    least_cost,
    microbatch_costs,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    transformer,
    with_speeds,
)
from tests.support.refusals import assert_refused

many = settings(deadline=None, max_examples=120, derandomize=True)
CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
COSTS: dict[str, Any] = {
    "tokens": lambda ranks: "tokens",
    "function": lambda ranks: lambda rows: rows[:, 0] + 3 * rows[:, 1],
    "overhead": lambda ranks: quadratic(constant=50),
    "dense": lambda ranks: quadratic(crossover=300, constant=50, dense=True),
    "model": lambda ranks: transformer(CONFIG),
    "speeds": lambda ranks: with_speeds(
        quadratic(constant=50), [1 / (1 + rank % 3) for rank in range(ranks)]
    ),
}


@st.composite
def some_rows(draw: st.DrawFn) -> np.ndarray:
    """Texts of which some have images, and a third number that is small."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count = draw(st.integers(1, 40))
    tokens = np.clip(rng.lognormal(4, draw(st.floats(0.1, 1.5)), count), 1, 2000).astype(int)
    patches = rng.integers(0, 400, count) * (rng.random(count) < draw(st.floats(0, 1)))
    return np.column_stack([tokens, patches, rng.integers(0, 3, count)])[:, : draw(st.integers(2, 3))]


def caps_for(rows: np.ndarray, room: float) -> tuple[int, ...]:
    return tuple(max(int(room * most), 1) for most in rows.max(0))


def check(plan: Any, rows: np.ndarray, caps: Any, collation: Collation) -> None:
    assert sorted(one for rank in plan for own in rank for one in own) == list(range(len(rows)))
    for rank, cap in zip(plan, caps, strict=True):
        for own in filter(None, rank):
            assert collation.tokens(rows[own]) <= cap[0]
            assert (rows[own, 1:].sum(0) <= cap[1:]).all()


@many
@given(
    some_rows(),
    st.integers(1, 6),
    st.sampled_from(["packed", "apart", "padded", "stacked"]),
    st.sampled_from(POLICIES),
    st.sampled_from(sorted(COSTS)),
    st.floats(1, 4),
    st.data(),
)
def test_no_microbatch_exceeds_a_cap_of_its_rank(rows, ranks, kind, policy, cost, room, data):
    collation, model = Collation(kind), COSTS[cost](ranks)
    caps = [caps_for(rows, room)] * ranks
    if policy == "lb_mini":  # ranks may have their own
        caps = [caps_for(rows, data.draw(st.floats(0.3, 2))) for _ in range(ranks)]
        caps[data.draw(st.integers(0, ranks - 1))] = caps_for(rows, room)
    options: dict[str, Any] = {"policy": policy, "cost": model, "allow_empty": True, "collation": collation}
    plan = plan_minibatch(rows, ranks, caps, **options)
    check(plan, rows, caps, collation)
    assert plan == plan_minibatch(list(map(tuple, rows.tolist())), ranks, caps, **options)
    if len({*caps}) == 1:
        assert plan == plan_minibatch(rows, ranks, caps[0], **options)
    if policy in COLLECTIVE_SAFE:
        assert len(set(map(len, plan))) == 1
    found = on_demand_cost(plan, rows, model, collation=collation)
    assert found >= least_cost(rows, ranks, model, caps, collation=collation) * (1 - 1e-9)


def test_the_sum_of_costs_is_level() -> None:
    """Work is in the patches as much as in the tokens, and neither tells the other."""
    for ranks in (2, 4, 8):
        for kind in ("packed", "apart", "padded"):
            rng = np.random.default_rng(ranks)
            rows = np.column_stack([rng.integers(100, 900, 12 * ranks), rng.integers(0, 900, 12 * ranks)])
            cost, collation = PolynomialCost(0, 1, 30), Collation(kind)
            for policy, evaluate, slack in (
                ("lb_mini", on_demand_cost, 1.02),
                ("steal", on_demand_cost, 1.02),
                ("lb_micro", collective_cost, 1.1),
            ):
                plan = plan_minibatch(rows, ranks, (2000, 2000), policy, cost, collation=collation)  # type: ignore[arg-type]
                busy = sum(map(sum, microbatch_costs(plan, rows, cost, collation=collation)))
                assert evaluate(plan, rows, cost, collation=collation) <= slack * busy / ranks


def test_padding_raises_the_first_number_and_any_number_decides_how_many_microbatches_there_are() -> None:
    rows, cost = [(10, 5), (30, 1), (20, 0)], lambda rows: rows[:, 0] + 100 * rows[:, 1]
    ((padded,),) = microbatch_costs([[[0, 1, 2]]], rows, cost, collation=Collation("padded"))
    assert padded == 3 * 30 + 100 * 6
    assert Collation("padded", multiple=8).rows(rows) == [[32, 5], [32, 1], [32, 0]]
    assert Collation("padded", multiple=8).tokens(rows) == 96
    for caps in ((100, 8), (20, 800)):
        assert plan_minibatch([(10, 4)] * 4, 1, caps) == [[[0, 2], [1, 3]]]
    assert plan_minibatch([(10, 4)] * 4, 1, (40, 16)) == [[[0, 1, 2, 3]]]
    texts_and_images = [(90, 0), (10, 80), (80, 10), (20, 90)]
    assert len(plan_minibatch(texts_and_images, 1, (100, 100))[0]) == 2, "a text and an image fit together"


@many
@given(some_rows(), st.floats(1, 4))
def test_one_rank_packs_rows_into_few_microbatches(rows: np.ndarray, room: float) -> None:
    caps = caps_for(rows, room)
    (microbatches,) = plan_minibatch(rows, 1, caps)
    check([microbatches], rows, [caps], Collation())
    fewest = int(np.ceil(rows.sum(0) / caps).max())
    assert fewest <= len(microbatches) <= max(2 * rows.shape[1] * fewest, 1)


def test_rows_of_one_number_are_numbers() -> None:
    lengths = np.random.default_rng(0).integers(10, 2000, 24)
    for kind in ("packed", "padded"):
        collation: Any = Collation(kind)
        one = plan_minibatch(lengths, 3, 4000, cost=quadratic(constant=64), collation=collation)
        assert one == plan_minibatch(
            lengths[:, None], 3, (4000,), cost=quadratic(constant=64), collation=collation
        )


def seconds_of(rows: list[Any]) -> float:
    tokens, patches = np.array(rows).sum(0)
    return float(2e-6 * tokens + 5e-5 * patches + 1e-3)


def observed(seed: int, ranks: int = 2) -> list[Any]:
    rng = np.random.default_rng(seed)
    drawn = [rng.integers((50, 0), (2000, 900), (int(rng.integers(1, 5)), 2)).tolist() for _ in range(ranks)]
    return [(rank, rows, seconds_of(rows) * (1 + rank)) for rank, rows in enumerate(drawn)]


def test_a_coefficient_is_learnt_for_each_number() -> None:
    cost = FittedCost(2)
    before = plan_minibatch([(900, 10), (10, 900), (500, 500), (400, 400)], 2, cost=cost)
    assert sorted(one for rank in before for own in rank for one in own) == [0, 1, 2, 3]
    for step in range(60):
        cost.observe(observed(step))
    assert cost.coefficients.shape == (2, 4)
    np.testing.assert_allclose(cost.coefficients[:, 2], [5e-5, 1e-4], rtol=0.05)
    rows = [[1000, 10], [30, 800]]
    assert cost.predict(1, rows) == pytest.approx(2 * seconds_of(rows), rel=0.03)
    np.testing.assert_allclose(
        cost.samples(np.array([[1000.0, 0.0]])), cost.snapshot().samples(np.array([[1e3, 0]]))
    )
    other = FittedCost(2)
    other.load_state_dict(cost.state_dict())
    assert other.coefficients.tolist() == cost.coefficients.tolist()
    plan = plan_minibatch([observed(9)[0][1][0]] * 6, 2, cost=cost)
    assert sum(map(len, plan[0])) == 4, "the slower rank gets less"


def learnt(rows: Any) -> FittedCost:
    cost = FittedCost(2)
    cost.observe([(0, rows, 0.5)])
    return cost


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 9}, r"2 numbers each, and max_tokens=9 caps 1: .*max_tokens=\(9, 3\)"),
    (
        {"max_tokens": [(9, 9), 9]},
        r"\(max_tokens=\[\(9, 9\), 9\]\) cannot work. Write max_tokens=8192, \(8192, 64\)",
    ),
    (
        {"max_tokens": [(9, 9), (9,)]},
        r"another number of caps on one rank.*max_tokens=\[\(9, 9\), \(9, 9\)\]",
    ),
    ({"max_tokens": (9, 0)}, r"Planner\(max_tokens=\(9, 0\)\) cannot work"),
    ({"max_tokens": ()}, r"max_tokens=\(\) caps nothing"),
    (
        {"max_tokens": (9, 2)},
        r"sample 0 has \(5, 3\), more than max_tokens=\(9, 2\).*write max_tokens=\(9, 3\)",
    ),
    ({"max_tokens": [(9, 2), (4, 9)]}, r"write max_tokens=\[\(9, 3\), \(4, 9\)\]"),
    ({"max_tokens": [(9, 9), (9, 8)], "policy": "steal"}, r'write policy="lb_mini", or max_tokens=\(9, 8\)'),
    (
        {"lengths": [5, 4], "max_tokens": (9, 9)},
        r"have one length here. Write max_tokens=9;.*max_tokens=\[9, 9\]",
    ),
    ({"cost": lambda rows: rows + 1}, r"a cost for each number.*cost=lambda lengths: lengths\[:, 0\]"),
    ({"cost": with_speeds(lambda rows: rows, [1, 2])}, r"a cost for each number"),
    ({"cost": lambda rows: rows.sum()}, r"shape \[\] for 3 samples.*cost=lambda lengths: lengths\[:, 0\]"),
    ({"cost": lambda rows: rows[:, 1] - 1}, r"cost of sample 2 .* must be positive"),
    ({"cost": learnt([[5, 3, 1]])}, r"learnt from samples of 3 numbers each, and these have 2"),
    (
        {"cost": learnt([[5, 3]]), "lengths": [5, 4]},
        r"learnt from samples of 2 numbers each, and these have 1",
    ),
]


def test_refusals_show_the_right_line() -> None:
    good: dict[str, Any] = {"lengths": [(5, 3), (4, 3), (2, 1)], "num_ranks": 2}
    plan_minibatch(**good)
    assert_refused(lambda change: plan_minibatch(**(good | change)), WRONG)
