"""What measured times correct: the speeds of ranks, and the quadratic part of a cost that knows no model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.rivals import draw_lengths
from lightning_odc.balance import (
    Cost,
    PolynomialCost,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    transformer,
    with_speeds,
)
from lightning_odc.balance.costs import SpeedCost
from lightning_odc.balance.evaluate import microbatch_costs
from lightning_odc.balance.learnt import MeasuredCost, solved

MODEL = transformer(
    {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}, dense=True
)
GUESS = quadratic(constant=64.0, dense=True)
RANKS = 4


def measured(cost: MeasuredCost, true: Cost, steps: int, seed: int = 0, noise: float = 0.03) -> None:
    """Plan by what is known, and measure with noise and pauses."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        lengths = draw_lengths("longalign", RANKS, 6, 100 * seed + step)
        plan = plan_minibatch(lengths, RANKS, 65_536, cost=cost.found or cost.prior)
        sums = []
        for own, exact in zip(plan, microbatch_costs(plan, lengths, true), strict=True):
            times = []
            for microbatch, seconds in zip(own, exact, strict=True):
                pause = 1.0
                if rng.random() < 0.02:
                    pause = 5.0
                normal = rng.normal(0, noise)
                times.append((lengths[microbatch].tolist(), seconds * pause * math.exp(normal)))
            sums.append(cost.sums_of(times))
        cost.observe(sums)


def excess(cost: MeasuredCost, true: Cost) -> float:
    """By how much plans take longer than those by the true cost."""
    spent = [0.0, 0.0]
    for seed in range(900, 908):
        lengths = draw_lengths("longalign", RANKS, 6, seed)
        for place, known in enumerate((cost.found or cost.prior, true)):
            spent[place] += on_demand_cost(plan_minibatch(lengths, RANKS, 65_536, cost=known), lengths, true)
    return spent[0] / spent[1] - 1


@pytest.mark.parametrize("prior", [MODEL, GUESS], ids=["model", "guess"])
@pytest.mark.parametrize("slowness", [1.5, 3.0])
def test_a_slow_rank_gets_less_after_few_minibatches(prior: Any, slowness: float) -> None:
    speeds = [1.0, 1.0, 1 / slowness, 1.0]
    cost = MeasuredCost(RANKS, prior)
    true = with_speeds(prior, speeds)
    assert excess(cost, true) > 0.2
    measured(cost, true, 4)
    assert isinstance(cost.found, SpeedCost)
    found = np.array(cost.found.speeds)
    np.testing.assert_allclose(found / found[0], speeds, rtol=0.08)
    assert excess(cost, true) < 0.04


@pytest.mark.parametrize("prior", [MODEL, GUESS], ids=["model", "guess"])
def test_where_times_say_nothing_new_all_runs_have_the_same_plans(prior: Any) -> None:
    cost = MeasuredCost(RANKS, prior)
    for seed in range(4):
        measured(cost, prior, 8, seed)
        assert cost.found is None


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("crossover", [1000.0, 500_000.0])
def test_the_share_of_the_quadratic_part_is_found(crossover: float, dense: bool) -> None:
    true = quadratic(crossover, constant=64.0, dense=dense)
    cost = MeasuredCost(RANKS, GUESS)
    before = excess(cost, true)
    measured(cost, true, 6)
    if before > 0.05:
        assert isinstance(cost.found, PolynomialCost)
        expected = pytest.approx(crossover, rel=0.6)
        assert cost.found.linear / cost.found.quadratic == expected
    assert excess(cost, true) < 0.03


def test_another_rank_that_becomes_slow_is_found() -> None:
    cost = MeasuredCost(RANKS, MODEL)
    true = with_speeds(MODEL, [1, 0.5, 1, 1])
    measured(cost, true, 6)
    measured(cost, with_speeds(MODEL, [1, 1, 0.5, 1]), 12, seed=1)
    assert isinstance(cost.found, SpeedCost)
    smallest = min(cost.found.speeds)
    found = cost.found.speeds.index(smallest)
    assert found == 2
    measured(cost, MODEL, 20, seed=2)
    assert cost.found is None, "it is as fast as the others again"


def test_numbers_that_are_none_change_nothing() -> None:
    """``numpy`` would solve equations with an infinite number for ever."""
    cost = MeasuredCost(2, GUESS)
    for _ in range(6):
        cost.observe([cost.sums_of([([900, 30], 1.0)] * 2), cost.sums_of([([900, 30], 2.0)] * 2)])
        cost.observe([[math.inf] * 7, [math.nan] * 7])
    assert isinstance(cost.found, SpeedCost)
    found = cost.found.speeds[0] / cost.found.speeds[1]
    assert found == pytest.approx(2, rel=0.1)
    nothing = MeasuredCost(2, GUESS)
    sums = nothing.sums_of([])
    nothing.observe([sums] * 2)
    assert nothing.found is None


def test_two_equations_by_hand() -> None:
    # 2 x + y = 5 and x + 3 y = 10; and where one would be negative, the other alone.
    found = solved([2.0, 1.0, 1.0, 3.0], [5.0, 10.0], 1.0, 0.0)
    assert found == pytest.approx([1, 3])
    found = solved([2.0, 1.0, 1.0, 3.0], [1.0, 9.0], 1.0, 0.0)
    assert found == pytest.approx([1e-3, 3])
    found = solved([2.0, 1.0, 1.0, 3.0], [5.0, 0.0], 1.0, 0.0)
    assert found == pytest.approx([2.5, 1e-3])
    found = solved([1.0, 1.0, 1.0, 1.0], [2.0, 2.0], 2.0, 0.0)
    assert found == [2.0, 2.0], "similar microbatches determine nothing"
    found = solved([2.0, 1.0, 1.0, 3.0], [5.0, 10.0], 2.0, 1e9)
    assert found == pytest.approx([2, 2])
