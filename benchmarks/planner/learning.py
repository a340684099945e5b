"""How fast `MeasuredCost` learns, in a simulation with noise and pauses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.planner.rivals import PAPER_1_5B, draw_lengths
from benchmarks.tables import Column, Table
from lightning_odc.balance import (
    PolynomialCost,
    microbatch_costs,
    on_demand_cost,
    plan_minibatch,
    quadratic,
    with_speeds,
)
from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.costs import MICROBATCH
from lightning_odc.balance.learnt import MeasuredCost, Sums

_RANKS = 8
_PER_RANK = 8
_CAP = 65_536
_MINIBATCHES = 40
_OVERHEAD = 0.05  # seconds
_SLOW_RANK = 3
_CLOSE = 0.05
_FOR_SO_MANY = 3


@dataclass(frozen=True)
class Scenario:
    """What there is to learn.

    Attributes:
        name: Name of the scenario.
        slowness: Slowness of one rank.
        dense: attention runs over all tokens of a microbatch.
        change_at: minibatch from which another rank is the slow one.
    """

    name: str
    slowness: float = 1.0
    dense: bool = False
    change_at: int = -1


SCENARIOS = (
    Scenario("one rank 1.5 times as slow", 1.5),
    Scenario("all alike, dense attention", dense=True),
    Scenario("one rank 1.5 times as slow, dense attention", 1.5, dense=True),
    Scenario("after 20 minibatches another rank is slow", 1.5, change_at=20),
)


def learn(scenario: Scenario, seed: int, noise: float = 0.03) -> Floats:
    """A run of 40 minibatches of 8 samples per rank on 8 ranks.

    Measurements have 3 percent of noise, and one in 50 is a pause that makes it 5 times as long.

    Returns:
        ``[40, 2]``: by how much a minibatch planned with `MeasuredCost` and with the default cost takes longer than one
        planned with the true cost.
    """
    rng = np.random.default_rng(seed)
    guess = quadratic(constant=MICROBATCH, dense=True)  # what is known of a model without a config
    fit = MeasuredCost(_RANKS, guess)
    rows = []
    slowness = np.where(np.arange(_RANKS) == _SLOW_RANK, scenario.slowness, 1.0)
    base = PolynomialCost(PAPER_1_5B.quadratic, PAPER_1_5B.linear, _OVERHEAD, scenario.dense)
    for step in range(_MINIBATCHES):
        if step == scenario.change_at:
            slowness = np.roll(slowness, 2)
        true = with_speeds(base, (1 / slowness).tolist())
        lengths = draw_lengths("longalign", _RANKS, _PER_RANK, 1000 * seed + step)
        plans = [
            plan_minibatch(lengths, _RANKS, _CAP, cost=cost) for cost in (fit.found or guess, guess, true)
        ]
        spent = [on_demand_cost(plan, lengths, true) for plan in plans]
        row = [spent[0] / spent[2] - 1, spent[1] / spent[2] - 1]
        rows.append(row)
        exact = microbatch_costs(plans[0], lengths, true)
        sums = []
        for microbatches, seconds in zip(plans[0], exact, strict=True):
            sums.append(_measured(fit, microbatches, seconds, lengths, rng, noise))
        fit.observe(sums)
    return np.array(rows)


def _measured(
    fit: MeasuredCost,
    microbatches: list[list[int]],
    exact: list[float],
    lengths: Ints,
    rng: np.random.Generator,
    noise: float,
) -> Sums:
    """What a rank measures."""
    times = []
    for microbatch, seconds in zip(microbatches, exact, strict=True):
        pause = 1.0
        if rng.random() < 0.02:
            pause = 5.0
        measured_seconds = seconds * pause * float(np.exp(rng.normal(0, noise)))
        times.append((lengths[microbatch].tolist(), measured_seconds))
    return fit.sums_of(times)


def needed(excess: Floats, begin: int) -> int:
    """Minibatches seen after ``begin`` until three in a row are within 5 percent of the plan with the true cost."""
    for step in range(begin, len(excess) - _FOR_SO_MANY + 1):
        if (excess[step : step + _FOR_SO_MANY] < _CLOSE).all():
            return step - begin
    return len(excess) - begin


def measured(seeds: int) -> list[Table]:
    """How many minibatches it takes."""
    runs = {s: np.array([learn(s, seed) for seed in range(seeds)]) for s in SCENARIOS}
    steps = []
    for scenario, run in runs.items():
        begin = max(scenario.change_at, 0)
        counts = [needed(own[:, 0], begin) for own in run]
        steps.append(
            [scenario.name, [float(np.median(counts)), max(counts)], float(run[:, begin:, 1].mean())]
        )
    title = "Minibatches until within 5 % of the plan with the true cost"
    return [Table("measured", title, _STEPS, steps)]


_STEPS = (
    Column("what there is to learn"),
    Column("minibatches, median (worst)", "g"),
    Column("excess of the guess", ".0%"),
)
