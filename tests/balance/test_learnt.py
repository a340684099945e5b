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
from lightning_odc.balance.learnt import MeasuredCost

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
        assert cost.found.linear / cost.found.quadratic == pytest.approx(crossover, rel=0.6)
    assert excess(cost, true) < 0.03


@pytest.mark.parametrize("prior", [MODEL, GUESS], ids=["model", "guess"])
def test_another_rank_that_becomes_slow_is_found_soon(prior: Any) -> None:
    cost = MeasuredCost(RANKS, prior)
    measured(cost, with_speeds(prior, [1, 0.5, 1, 1]), 8)
    true = with_speeds(prior, [1, 1, 0.5, 1])
    measured(cost, true, 6, seed=1)
    assert isinstance(cost.found, SpeedCost)
    assert excess(cost, true) < 0.12
    measured(cost, prior, 10, seed=2)
    assert cost.found is None, "it is as fast as the others again"


def test_one_long_microbatch_per_minibatch_is_not_taken_for_a_slow_rank() -> None:
    rng = np.random.default_rng(0)
    for noise in (0.03, 0.1, 0.2):
        cost = MeasuredCost(8, MODEL)
        for _ in range(40):
            seconds = np.exp(rng.normal(0, noise, 8)).tolist()
            cost.observe([cost.sums_of([([9000], own)]) for own in seconds])
            assert cost.found is None


def test_a_rank_without_microbatches_changes_nothing() -> None:
    cost = MeasuredCost(2, GUESS)
    nothing = cost.sums_of([])
    cost.observe([nothing] * 2)
    assert cost.found is None
    for _ in range(6):
        cost.observe([cost.sums_of([([900, 30], 1.0)] * 2), nothing])
        assert cost.found is None
