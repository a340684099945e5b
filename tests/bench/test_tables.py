"""The tables of the benchmarks: what they say for given numbers."""

from __future__ import annotations

import math

import pytest

from lightning_odc.bench.policies_report import (
    COMBINATIONS,
    Combination,
    bound,
    summarize,
    table,
    worst_loss_difference,
)


def test_the_bound_shares_work_by_speed():
    assert bound([3.0, 1.0], [1.0, 1.0]) == 2
    assert bound([2.0, 3.0], [1.0, 2 / 3]) == pytest.approx(2.4)  # 4 units of work at 1 2/3 units per second
    assert bound([2.4, 2.4], [1.0, 2 / 3]) == pytest.approx(2.4)


def runs(seconds: list[float], idle: float) -> list[dict[str, list[float]]]:
    return [{"seconds": [s, s], "idle": [idle, idle], "losses": [6.0], "tokens": [3]} for s in seconds]


def test_a_speed_up_is_split_in_two():
    times = {key: [4.0, 8.0] for key in COMBINATIONS}
    times[Combination("on_demand", "local_sort")] = [2.0, 4.0]
    times[Combination("on_demand", "lb_mini", "fitted")] = [1.0, 2.0]
    ranks = [
        {key: runs(seconds, 0.0 if rank == 0 else 0.5) for key, seconds in times.items()} for rank in (0, 1)
    ]
    rows = {row.combination: row for row in summarize(ranks, [1.0, 1.0])}
    best = rows[Combination("on_demand", "lb_mini", "fitted")]
    assert (best.communication, best.balancing, best.total) == (2, 2, 4)
    assert best.idle == pytest.approx((0.25 + 0.125) / 2)
    assert best.over_bound == pytest.approx((1 / 0.75 + 2 / 1.75) / 2 - 1)
    assert best.losses == [2.0]
    assert worst_loss_difference([best, best._replace(losses=[2.5])]) == 0.25
    for wrong in (math.nan, math.inf):
        worse = best._replace(losses=[wrong])
        assert worst_loss_difference([best, worse]) == worst_loss_difference([worse, best]) == math.inf
    record = best.record()
    assert (record["communication"], record["by_communication"], record["cost"]) == ("on_demand", 2, "fitted")
    assert rows[Combination("collective", "lb_micro")].record()["idle"] == pytest.approx(
        (0.25 / 4 + 0.25 / 8) / 2
    )
    assert "| on_demand | lb_mini | fitted | 1.50 (1.00, 2.00) | x4.00 | x2.00 | x2.00 |" in table([best])
