"""The tables of the benchmarks: what they say for given numbers, and where they are put."""

from __future__ import annotations

import math

import pytest

from benchmarks.tables import Column, Table, put_into
from lightning_odc.bench.policies_report import (
    COMBINATIONS,
    Combination,
    bound,
    summarize,
    table,
    worst_loss_difference,
)

TABLE = Table("speed", "How fast", [Column("name"), Column("share", "percent"), Column("ms", ".1f")])


def test_a_table_as_markdown_and_as_data():
    TABLE.rows[:] = [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, math.nan]]
    assert TABLE.markdown().splitlines()[2:] == ["| a | 1.234 % | 1.0 (2.5) |", "| b | 0.000 % |  |"]
    assert TABLE.record()["rows"] == [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, None]]


def test_a_table_is_put_between_its_comments_alone():
    page = "one\n<!-- table: speed -->\nold\n<!-- end of table: speed -->\ntwo\n"
    TABLE.rows[:] = [["a", 0.5, 1.0]]
    once = put_into(page, [TABLE])
    assert "| a | 50.000 % | 1.0 |" in once
    assert "old" not in once
    assert (once[:4], once[-4:]) == ("one\n", "two\n")
    assert put_into(once, [TABLE]) == once
    with pytest.raises(ValueError, match="no place for 'speed'"):
        put_into("nothing", [TABLE])


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
