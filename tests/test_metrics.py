"""The metrics against arithmetic, on one process and on several real ones."""

from __future__ import annotations

import math
import pickle

import pytest

from lightning_odc.metrics import IdleFraction, LoadImbalance
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")

UNEVEN = [[(3.0, 1.0), (2.0, 2.0), (6.0, 0.5)], [(4.0, 0.0)], []]


def idle_fraction(table: list[list[tuple[float, float]]]) -> float:
    flat = [pair for row in table for pair in row]
    total = sum(busy + idle for busy, idle in flat)
    return sum(idle for _, idle in flat) / total


def imbalance(table: list[list[tuple[float, float]]]) -> float:
    steps = max(len(row) for row in table)
    columns = [[row[step][0] if step < len(row) else 0.0 for row in table] for step in range(steps)]
    total = sum(sum(column) / len(table) for column in columns)
    return sum(max(column) for column in columns) / total


@on_ranks(3)
def test_ranks_agree_with_the_arithmetic(rank):
    init_gloo(rank)
    fraction = IdleFraction()
    unbalanced = LoadImbalance()
    for busy, idle in UNEVEN[rank]:
        fraction.update(busy, idle)
        unbalanced.update(busy)
    found = fraction.compute().item()
    assert found == pytest.approx(idle_fraction(UNEVEN), rel=1e-6)
    found = unbalanced.compute().item()
    assert found == pytest.approx(imbalance(UNEVEN), rel=1e-6)
    expected = [busy for busy, _ in UNEVEN[rank]]
    assert unbalanced.steps.tolist() == expected, "given back as it was"
    fraction.reset()
    unbalanced.reset()
    fraction.update(rank, 1)
    unbalanced.update(rank)
    found = fraction.compute().item()
    expected = pytest.approx(3 / (0 + 1 + 2 + 3))
    assert found == expected
    found = unbalanced.compute().item()
    expected = pytest.approx(2 * 3 / (0 + 1 + 2))
    assert found == expected


def test_one_process():
    fraction = IdleFraction()
    unbalanced = LoadImbalance()
    assert math.isnan(fraction.compute())
    assert math.isnan(unbalanced.compute())
    fraction.update(3.0, 1.0)
    unbalanced.update(3.0)
    assert fraction.compute() == pytest.approx(0.25)
    assert unbalanced.compute() == 1
    found = fraction(1.0, 3.0)
    assert found == pytest.approx(0.75)  # forward: the value of this update alone
    assert fraction.compute() == pytest.approx(0.5)
    assert unbalanced(5.0) == 1
    assert unbalanced.steps.tolist() == [3, 5]


def test_times_that_cannot_be():
    for wrong in (-1.0, math.nan, math.inf):
        fraction = IdleFraction()
        unbalanced = LoadImbalance()
        with pytest.raises(ValueError, match="idle_seconds"):
            fraction.update(1.0, wrong)
        with pytest.raises(ValueError, match="busy_seconds"):
            unbalanced.update(wrong)
        assert fraction.busy == 0
        assert len(unbalanced.steps) == 0


@pytest.mark.parametrize("metric", [IdleFraction(), LoadImbalance()], ids=["idle", "imbalance"])
def test_pickles(metric):
    if isinstance(metric, LoadImbalance):
        metric(1.0)
    else:
        metric(1.0, 2.0)
    found = pickle.loads(pickle.dumps(metric)).compute()
    assert found == metric.compute()
